"""The board: the whole run at one moment, as boxes from producers to commits, with who waits for what."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Literal

from .. import clock
from ..messages import counted, seconds_text
from ..run import Run
from ..status import Status, read_status
from ..status.causes import ordinary_wait, reasons_of, unsaved
from ..store.reasons import Reason
from .book import Book, batches_of

#: Readings that rates and curves are made of.
HISTORY: Final = 240
#: Seconds that a rate is measured over.
RATE_S: Final = 5.0
#: Where the cause of a wait is. All others concern the server, or every box.
AT: Final = {
    **dict.fromkeys(
        ("no_producer", "producers_idle", "pacing", "max_bytes", "batch_over_budget"), "producers"
    ),
    **dict.fromkeys(("no_grouper", "no_scorer", "backlog", "stream_end"), "rollouts"),
    **dict.fromkeys(("incomplete_groups", "missing_scores", "ended_short", "groups_coming"), "open"),
    **dict.fromkeys(("filtered", "stale", "rolled_back", "dead"), "waiting"),
    **dict.fromkeys(("no_advantage_worker", "failing_chain", "unknown_estimator", "computing"), "batches"),
    **dict.fromkeys(("no_trainer", "unmarked", "other_rank"), "trainer"),
    "uncommitted": "committed",
}
#: Waits that are in the course of things.
ORDINARY: Final = frozenset({"pacing", "groups_coming", "computing"})
State = Literal["idle", "flowing", "waiting", "stuck"]

#: Addresses of rows.
OPEN: Final = "/groups?where=open"
WAITING: Final = "/groups?where=waiting"
TRAINED: Final = "/groups?outcome=trained"
BATCH: Final = "/batch"
PEOPLE: Final = "#people"
#: Where the rows are of those who read a stream.
OF_STREAM: Final = {"work": BATCH}


@dataclass(frozen=True, slots=True)
class Box:
    """One place of the diagram. link: the address that has its rows; each note has its own."""

    name: str
    title: str
    count: int
    link: str
    notes: list[tuple[str, str]]
    rate: float | None = None
    unit: str = ""
    rate_link: str = ""
    state: State = "idle"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over time, or by batch. link: the address that has their rows."""

    name: str
    title: str
    link: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment."""

    at: float
    pushed: int
    grouped: int
    batches: int
    version: int
    trained: int
    staleness: float | None
    waits: bool


@dataclass(slots=True)
class Board:
    """What the screen shows, from reading to reading. Belongs to one thread."""

    run: Run
    book: Book
    history: deque[Reading] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def read(self) -> dict[str, Any]:
        """The run now, for the template."""
        status = read_status(self.run)
        ledger, trainer = status.ledger, status.trainer
        self.history.append(
            Reading(
                at=clock.now(),
                pushed=ledger.pushed,
                grouped=sum(status.groups.outcomes.values()),
                batches=(trainer.version or 0) + max(0, trainer.untrained),
                version=trainer.version or 0,
                trained=ledger.trained,
                staleness=status.staleness.mean,
                waits=trainer.state == "waits" and not is_over(status),
            )
        )
        reasons = [reason for reason in (*reasons_of(status), unsaved(status)) if reason]
        if not reasons and status.trainer.state == "waits" and not is_over(status):
            reasons = [ordinary_wait(status)]
        boxes = self._boxes(status, reasons)
        kept = [line for line in self.book.kept() if line.batch is not None]
        kl = {line.batch or 0: line.kl for line in kept}
        rewards = list(batches_of(kept).values())
        staleness = [reading.staleness for reading in self.history]
        titles = {box.name: box.title for box in boxes}
        return {
            "status": status,
            "over": is_over(status),
            "boxes": boxes,
            "reasons": [
                (reason, titles.get(AT.get(reason.name, "")), reason.remedy(status.run)) for reason in reasons
            ],
            "curves": [
                Curve("reward", "mean reward by batch, of kept groups", BATCH, rewards[-HISTORY:]),
                Curve("kl", "KL by batch, of kept groups", BATCH, [kl[k] for k in sorted(kl)][-HISTORY:]),
                Curve("pushed", "rollouts pushed a second", OPEN, self._curve("pushed")),
                Curve("trained", "rollouts committed a second", TRAINED, self._curve("trained")),
                Curve("staleness", "staleness of the next batch, mean", WAITING, staleness),
                Curve("idle", "time in which the trainer waits, %", BATCH, self._idle()),
            ],
            "of_stream": OF_STREAM,
            "has_kl": not kl or any(value is not None for value in kl.values()),
            "ignored": self.run.manifest.ignored,
            "ordinary": ORDINARY,
        }

    def _boxes(self, status: Status, reasons: Sequence[Reason]) -> list[Box]:
        places, trainer, groups, ledger = status.places, status.trainer, status.groups, status.ledger
        producers = [producer.state for producer in status.producers]
        work = status.streams["work"]
        boxes = [
            Box("producers", "producers", producers.count("open"), PEOPLE, _lost(producers)),
            Box("rollouts", "rollouts queued", places.rollouts + places.scoring, OPEN, _ages(status, "rollouts", OPEN),
                self._rate("pushed"), "pushed", "#pushed"),
            Box("open", "open groups", groups.open, OPEN, _lack(status), self._rate("grouped"), "ended", "#ended"),
            Box("waiting", "groups for a batch", status.groups_waiting, WAITING, _staleness(status)),
            Box("batches", "named batches", max(0, trainer.untrained), BATCH,
                [(f"{counted(work.length, 'work item')} left", BATCH), *_ages(status, "work", BATCH)],
                self._rate("batches"), "named", BATCH),
            Box("trainer", "policy version", trainer.version or 0, BATCH, [_doing(status)], self._rate("version"),
                "updates", "#idle"),
            Box("committed", "committed", ledger.trained, TRAINED,
                [(f"{counted(trainer.uncommitted, 'batch', 'batches')} trained and not committed", BATCH)],
                self._rate("trained"), "rollouts", "#trained"),
        ]  # fmt: skip
        stuck = {AT.get(reason.name) for reason in reasons if reason.name not in ORDINARY}
        waits = {AT.get(reason.name) for reason in reasons}
        for number, box in enumerate(boxes):
            state: State = "idle"
            if box.name in stuck:
                state = "stuck"
            elif box.rate or (box.name == "producers" and boxes[1].rate):
                state = "flowing"
            elif box.name in waits or (box.count and box.name in ("rollouts", "open", "waiting", "batches")):
                state = "waiting"
            boxes[number] = replace(box, state=state)
        return boxes

    def _rate(self, name: str) -> float | None:
        """Events a second lately; None before the second reading."""
        newest = self.history[-1]
        before = [reading for reading in self.history if newest.at - reading.at <= RATE_S]
        if len(before) < 2:
            return None
        change = getattr(newest, name) - getattr(before[0], name)
        return max(0.0, float(change)) / (newest.at - before[0].at)

    def _idle(self) -> list[float]:
        """Share of the readings of the last seconds at which the trainer waits, at each reading."""
        waits = [100.0 * reading.waits for reading in self.history]
        width = int(2 * RATE_S)
        parts = [waits[max(0, end - width) : end] for end in range(1, len(waits) + 1)]
        return [sum(part) / len(part) for part in parts]

    def _curve(self, name: str) -> list[float]:
        return [
            max(0.0, getattr(new, name) - getattr(old, name)) / max(1e-3, new.at - old.at)
            for old, new in pairwise(self.history)
        ]


def is_over(status: Status) -> bool:
    """Whether the trainer has ended the run, or nothing is left of it and nothing can come."""
    producers = {producer.state for producer in status.producers} - {"serves"}
    ledger = status.ledger
    is_empty = not (ledger.queued or ledger.in_flight or status.groups.open)
    waits = any(reason.name == "prompts_left" for reason in reasons_of(status))
    return status.trainer.finished or (producers == {"finished"} and is_empty and not waits)


Notes = list[tuple[str, str]]


def _lost(producers: Sequence[str]) -> Notes:
    finished, lost = producers.count("finished"), producers.count("lost")
    notes = [f"{finished} finished"] * bool(finished) + [f"{lost} lost"] * bool(lost)
    return [(note, PEOPLE) for note in notes]


def _ages(status: Status, stream: str, link: str) -> Notes:
    age_s = status.streams[stream].oldest_age_s
    return [] if age_s is None else [(f"the oldest for {seconds_text(age_s)}", link)]


def _lack(status: Status) -> Notes:
    lack = status.groups.lack
    notes = [f"lack {counted(lack.rollouts, 'rollout')}"] * bool(lack.rollouts)
    notes += [f"lack {counted(lack.scores, 'score')}"] * bool(lack.scores)
    notes += [] if lack.oldest_s is None else [f"the oldest for {seconds_text(lack.oldest_s)}"]
    return [(note, OPEN) for note in notes]


def _staleness(status: Status) -> Notes:
    staleness = status.staleness
    text = f"staleness {staleness.mean or 0:.1f}, at most {staleness.max}"
    return [] if staleness.mean is None else [(text, "#staleness")]


def _doing(status: Status) -> tuple[str, str]:
    """What the trainer does, and where its batch is."""
    trainer = status.trainer
    heard = "" if trainer.silent_s is None else f" for {seconds_text(trainer.silent_s)}"
    words = {
        "none": "no trainer has taken the run",
        "waits": f"waits for batch {trainer.version}",
        "trains": f"trains on batch {trainer.batch}",
        "lost": f"silent{heard}",
        "left": "has left",
        "ended": "has seen the end",
    }
    k = {"waits": trainer.version, "trains": trainer.batch}.get(trainer.state)
    text = "the run has ended" if is_over(status) else words[trainer.state]
    return text, BATCH if k is None else f"{BATCH}?k={k}"
