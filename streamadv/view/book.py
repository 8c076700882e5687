"""The book: every group that can be looked at, a line each, and how lines are chosen and counted.

Kept groups do not change, so each is read once: the newest first, older ones by and by, so no page waits for all of
them. What is open, waiting or dead is read anew, at most every few seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Final, Self

from .. import clock
from ..errors import SettingError
from ..messages import brief
from ..run import Run, Shard
from ..status.kept import why
from ..status.seen import PLACES, SeenGroup, Where, kept_pages, read_groups_at
from ..store.keys import EntryId

#: Lines of a page.
PAGE: Final = 100
#: Bins of a histogram.
BINS: Final = 16
#: Stands for all outcomes of dropped groups.
DROPPED: Final = "dropped"
#: A book is read again after so many seconds, and after so many times as long as reading took.
FRESH_S: Final = 1.5
PATIENCE: Final = 5.0
#: Seconds that one reading of kept groups takes at most.
SLICE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Line:
    """A group in a table."""

    where: Where
    shard: int
    entry: str
    group_id: str
    outcome: str
    why: str
    batch: int | None
    named_for: int | None  # the batch at whose naming it was dropped
    version: int | None
    versions: tuple[int, int] | None
    source: str
    rewards: tuple[tuple[int, float | None, bool], ...]  # rollout index, reward, whether it counts
    known: tuple[float, ...]  # the rewards that count
    mean: float | None  # of these
    tokens: int
    ended_ms: int | None
    kl: float | None  # of its batch, see `kl_of`

    @classmethod
    def of(cls, group: SeenGroup, run: Run) -> Self:
        spans = [member.versions for member in group.members if member.versions]
        rewards = [
            (each.rollout_index, each.reward, each.rollout_index in group.counting) for each in group.members
        ]
        known = tuple(reward for _, reward, counts in rewards if counts and reward is not None)
        return cls(
            group.where,
            group.shard,
            group.entry,
            group.group_id,
            group.outcome,
            why(group, run.manifest),
            group.batch if group.where != "kept" or group.outcome == "trained" else None,
            group.naming[0] if group.naming else None,
            group.version,
            (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None,
            group.data_source or "",
            tuple(rewards),
            known,
            sum(known) / len(known) if known else None,
            sum(member.num_tokens for member in group.members),
            group.ended_ms,
            kl_of(group.record),
        )

    @property
    def is_dropped(self) -> bool:
        """Whether it has ended and was neither trained on nor for evaluation."""
        return self.where == "kept" and self.outcome not in ("trained", "eval")

    @property
    def deviation(self) -> float | None:
        """Their standard deviation, of the sample."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None

    @property
    def length(self) -> float | None:
        """Mean tokens of a rollout."""
        return self.tokens / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which lines are asked for, as an address says it. None and "": any."""

    where: str = ""
    outcome: str = ""
    source: str | None = None
    batch: int | None = None
    naming: int | None = None  # dropped while this batch was named
    low: float | None = None  # mean reward
    high: float | None = None
    least: float | None = None  # of the reward of any rollout that counts
    most: float | None = None
    short: float | None = None  # mean tokens
    long: float | None = None
    find: str = ""  # part of the group's id; * stands for anything
    text: str = ""  # that one of its rollouts has
    skip: int = 0  # groups that were searched for it before
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """From the words of an address. Raises SettingError."""
        numbers: dict[str, Callable[[str], float]] = dict.fromkeys(("batch", "naming", "skip", "page"), int)
        numbers |= dict.fromkeys(("low", "high", "least", "most", "short", "long"), float)
        given: dict[str, Any] = {}
        for name, text in query.items():
            if name not in cls.__slots__:
                continue
            try:
                given[name] = numbers[name](text) if name in numbers else text
            except ValueError:
                raise SettingError(f"{name} is {brief(text)}, needs a number") from None
        return cls(**{**given, "page": max(1, given.get("page", 1)), "skip": max(0, given.get("skip", 0))})

    def has(self, line: Line) -> bool:
        """Whether the line is asked for."""
        return (
            self.where in ("", line.where)
            and (self.outcome in ("", line.outcome) or (self.outcome == DROPPED and line.is_dropped))
            and self.source in (None, line.source)
            and self.batch in (None, line.batch)
            and self.naming in (None, line.named_for)
            and _is_like(line.group_id, self.find)
            and _within(line.mean, self.low, self.high)
            and any(_within(reward, self.least, self.most) for reward in line.known or (None,))
            and _within(line.length, self.short, self.long)
        )

    def words(self, **changes: Any) -> dict[str, str]:
        """As words of an address, on the first page and from the first group on unless told otherwise."""
        changed = replace(self, **{"page": 1, "skip": 0, **changes})
        words, first = {name: getattr(changed, name) for name in self.__slots__}, (("page", 1), ("skip", 0))
        return {
            name: str(value)
            for name, value in words.items()
            if value is not None and (value != "" or name == "source") and (name, value) not in first
        }


@dataclass(frozen=True, slots=True)
class Bin:
    low: float
    high: float
    count: int


class _Kept:
    """The kept groups of a shard, by their entries."""

    def __init__(self, run: Run, shard: Shard) -> None:
        self._run, self._shard = run, shard
        self._forget()

    def _forget(self) -> None:
        self.lines: dict[str, Line] = {}
        self.is_whole = False
        """All those there are were read."""
        self._ends: tuple[str, str] | None = None  # the oldest and the newest entry that were read
        self._first: str | None = None  # the oldest there was

    def read(self, seconds: float) -> None:
        """Those that are new, then older ones for so long; and forget those that the run has forgotten."""
        until = clock.now() + seconds
        if self._ends is None:
            self.is_whole = False  # nothing was there; something may be now
        else:
            newest = self._ends[1]
            pages = kept_pages(self._shard, newest)
            page = next(pages, [])
            if not page or page[0].entry != newest:
                self._forget()  # the server has lost it, or forgotten all that was read
            for new in chain([page[1:]], pages) if self._ends else ():
                self._add(new)
        while not self.is_whole:
            start = f"({self._ends[0]}" if self._ends else "+"
            page = next(kept_pages(self._shard, start, back=True), [])
            self._add(page)
            self.is_whole = not page
            if clock.now() >= until:
                break
        oldest: Any = self._shard.connection.scripts.xrange(self._shard.keys.kept, "-", "+", 1)
        first = oldest[0][0].decode() if oldest else None
        if first != self._first:
            self.lines = {
                entry: line
                for entry, line in self.lines.items()
                if first and EntryId.of(entry) >= EntryId.of(first)
            }
            self._first = first

    def _add(self, page: Sequence[SeenGroup]) -> None:
        self.lines.update({group.entry: Line.of(group, self._run) for group in page})
        entries = [*(group.entry for group in page), *(self._ends or ())]
        if entries:
            self._ends = min(entries, key=EntryId.of), max(entries, key=EntryId.of)


class Book:
    """All lines of a run. Belongs to one thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kept = [_Kept(run, shard) for shard in run.shards]
        self._lines: list[Line] = []
        self._due = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all kept groups were read."""
        return all(kept.is_whole for kept in self._kept)

    def lines(self) -> list[Line]:
        """Open groups, then what waits, was kept and is dead: of each the newest first."""
        if (began := clock.now()) < self._due:
            return self._lines
        lines = list[Line]()
        for place in PLACES:
            if place == "kept":
                found = sorted(self.kept(), key=lambda line: EntryId.of(line.entry))
            else:
                found = [Line.of(group, self._run) for group in read_groups_at(self._run, place)]
            lines += sorted(found, key=lambda line: line.ended_ms or 0, reverse=True)
        self._lines = lines
        if self.is_whole:
            self._due = clock.now() + max(FRESH_S, PATIENCE * (clock.now() - began))
        return lines

    def kept(self) -> list[Line]:
        """Lines of the kept groups alone, as far as they were read."""
        for kept in self._kept:
            kept.read(SLICE_S / len(self._kept))
        return [line for kept in self._kept for line in kept.lines.values()]


def batches_of(lines: Sequence[Line]) -> dict[int, float | None]:
    """Mean reward of the groups in the book, by batch."""
    by_batch: dict[int, list[float]] = {}
    for line in lines:
        if line.batch is not None:
            by_batch.setdefault(line.batch, []).extend(line.known)
    return {k: sum(rewards) / len(rewards) if rewards else None for k, rewards in sorted(by_batch.items())}


#: Metrics of a batch that say how far the policy has moved, the first one first: to the reference policy, and between
#: the policy that has played and the one that is trained.
KL_METRICS: Final = ("critic/kl", "rollout_corr/kl")


def kl_of(record: Mapping[str, Any]) -> float | None:
    """The mean KL of a kept group's batch; None if its chain has measured none."""
    metrics = record.get("metrics")
    found = [metrics.get(name) for name in KL_METRICS] if isinstance(metrics, dict) else []
    return next((value for value in found if isinstance(value, float) and math.isfinite(value)), None)


def facets(lines: Sequence[Line], choice: Choice) -> dict[str, dict[str, int]]:
    """How many lines each place, outcome and source has, under the rest of the choice."""
    counts = {}
    anything: dict[str, Any] = {"where": "", "outcome": "", "source": None}
    for name, value in anything.items():
        others = replace(choice, **{name: value})
        counted = Counter(getattr(line, name) for line in lines if others.has(line))
        counts[name] = dict(sorted(counted.items()))
    if dropped := sum(map(replace(choice, outcome=DROPPED).has, lines)):
        counts["outcome"][DROPPED] = dropped
    return counts


def histogram(values: Sequence[float | None]) -> list[Bin]:
    """The values in bins of one width; what is no number is in none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return []
    low, high = min(known), max(known)
    if low == high:
        return [Bin(low, high, len(known))]
    width = (high - low) / BINS
    counts = Counter(min(BINS - 1, int((value - low) / width)) for value in known)
    edges = [low + number * width for number in range(BINS)] + [high]
    return [Bin(*ends, counts[number]) for number, ends in enumerate(pairwise(edges))]


def _is_like(group_id: str, part: str) -> bool:
    at = 0
    for piece in part.split("*"):
        at = group_id.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)
