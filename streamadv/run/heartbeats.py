"""Heartbeats: which producers and which ranks of the training job are alive, and whether the run is over."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from .. import clock
from .dead_letters import reject
from .run import Run

HEARTBEAT_S: Final = 10.0
#: A run ends no sooner after one of its servers was replaced: by then it has heard every producer that is alive.
SETTLE_S: Final = 1.5 * HEARTBEAT_S
#: A reader writes this often: if the server refuses its writes, it refuses heartbeats too, and silence proves nothing.
WRITE_S: Final = 5.0
#: A producer or trainer silent for longer has missed a heartbeat, and may have ended: nobody knows what it does.
HEARD_S: Final = HEARTBEAT_S + 2.0
#: A producer silent for longer counts as lost (three missed heartbeats).
PRODUCER_TIMEOUT_S: Final = 30.0
#: A producer silent for longer is taken off the list, unless it has finished.
FORGET_S: Final = 3600.0
#: Producers of each kind that stay on the list, the latest: finished ones, and lost ones.
PAST_KEPT: Final = 100
#: Names that one script takes off the list, each with its heartbeat; foreign ones that one look removes.
FORGET_SLICE: Final = 1000
#: In front of the name of a set of prompts over which somebody loops.
LOOPS_OVER: Final = "prompts:"
#: What a heartbeat writes: when (ms of the server, another at each heartbeat), how, and which instance of that name; a
#: gateway adds how many rollouts it plays, and seconds since the last turn of the one that has been silent for longest;
#: then the sets of prompts over which the producer's user loops.
PRODUCER_STATE: Final = re.compile(
    r"[0-9]{1,15} (open|serves|finished|gone)"
    rf"( [0-9]{{1,15}}( [0-9]{{1,9}} [0-9]{{1,9}})?( {LOOPS_OVER}[A-Za-z0-9._-]{{1,40}}){{0,1000}})?"
)


class LastHeartbeat(NamedTuple):
    """A producer's last heartbeat, and when it was first seen."""

    value: bytes
    when: float
    server_ms: int  # by the server's clock
    state: bytes
    instance: int

    @property
    def is_present(self) -> bool:
        """Whether it has neither finished nor gone."""
        return self.state in (b"open", b"serves")


class Attendance:
    """The producers one reader has heard of. A producer is alive while its heartbeat changes, by the reader's clock.

    Times of the server are not compared, because its clock may be set and a failover brings another one. So a producer
    that died before the first look counts as alive for PRODUCER_TIMEOUT_S more. One that vanishes from the list without
    having said that it has finished or gone counts as alive until then, too. A long time without a write of this reader
    counts as WRITE_S: heartbeats may have been refused in it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._heartbeats: dict[bytes, LastHeartbeat] = {}
        self._some_finished = False  # of those no longer on the list
        self._written = -math.inf  # when this reader's last write was taken

    def look(self) -> None:
        """Read the list. Take producers off it that have gone or are long past, and remove foreign fields."""
        home, now = self._run.home, clock.now()
        gap = now - self._written
        if gap > WRITE_S:
            home.call("forget_producers", [])
            self._written = now
        if gap > HEARTBEAT_S:
            for name, last in self._heartbeats.items():
                self._heartbeats[name] = last._replace(when=last.when + gap - WRITE_S)
        stored: Any = self._run.connection.scripts.hgetall(home.keys.producers)
        foreign = [
            name
            for name, value in stored.items()
            if not PRODUCER_STATE.fullmatch(value.decode(errors="replace"))
        ]
        for name in foreign[:FORGET_SLICE]:  # the rest at the next look
            reject(home, home.keys.producers, name, "no state of a producer", {b"state": stored[name]})
        for name in foreign:
            del stored[name]
        for name, value in stored.items():
            if name not in self._heartbeats or self._heartbeats[name].value != value:
                ms, state, *more = value.split(b" ")
                self._heartbeats[name] = LastHeartbeat(
                    value, now, int(ms), state, int(more[0]) if more else 0
                )
        names_to_forget = self._past(stored.keys() & self._heartbeats.keys(), now)
        parts = [part for name in names_to_forget for part in (name, self._heartbeats[name].value)]
        for start in range(0, len(parts), 2 * FORGET_SLICE):
            home.call("forget_producers", parts[start : start + 2 * FORGET_SLICE])
        # Off the list all are forgotten but those that fell silent lately: the run waits for them.
        lost = self.lost
        for name in self._heartbeats.keys() - stored.keys():
            last = self._heartbeats[name]
            self._some_finished |= last.state == b"finished"
            if not last.is_present or name in lost:
                del self._heartbeats[name]

    def _past(self, listed: Set[bytes], now: float) -> list[bytes]:
        """Producers to take off the list: gone, silent for long, or beyond the latest PAST_KEPT of their kind."""
        heartbeats = self._heartbeats
        names_to_forget = [
            name
            for name in listed
            if heartbeats[name].state == b"gone"
            or (heartbeats[name].is_present and now - heartbeats[name].when > FORGET_S)
        ]
        finished = {name for name in listed if heartbeats[name].state == b"finished"}
        for past in (finished, self.lost & listed):
            names_to_forget += sorted(past, key=lambda name: heartbeats[name].server_ms)[:-PAST_KEPT]
        return names_to_forget

    @property
    def lost(self) -> set[bytes]:
        """Producers that have not finished and are no longer heard of, as of the last look."""
        limit = clock.now() - PRODUCER_TIMEOUT_S
        return {
            name
            for name, heartbeat in self._heartbeats.items()
            if heartbeat.is_present and heartbeat.when <= limit
        }

    @property
    def first_alive(self) -> dict[bytes, int]:
        """Of each producer its first instance that may be alive, as of the last look."""
        lost = self.lost
        return {name: last.instance + (name in lost) for name, last in self._heartbeats.items()}

    def has_loop(self, prompts: str) -> bool:
        """Whether somebody loops over the set of prompts with this name, as of the last look.

        A producer that does so may have finished: it waits for what others play, or for a checkpoint.
        """
        limit, loop = clock.now() - PRODUCER_TIMEOUT_S, f"{LOOPS_OVER}{prompts}".encode()
        return any(
            last.state != b"gone" and last.when > limit and loop in last.value.split(b" ")
            for last in self._heartbeats.values()
        )

    @property
    def ended(self) -> bool:
        """Whether a producer has finished and no other is alive, as of the last look."""
        lost = self.lost
        states = [heartbeat.state for name, heartbeat in self._heartbeats.items() if name not in lost]
        return (self._some_finished or b"finished" in states) and b"open" not in states


def is_over(run: Run, attendance: Attendance) -> bool:
    """Whether nothing more can come: a producer has finished, no other is alive, no group is open."""
    attendance.look()
    if not attendance.ended:
        return False
    run.refresh()  # scorers that were named meanwhile
    scripts = run.connection.scripts
    return not any(
        scripts.zcard(keys.open)
        or scripts.xlen(keys.rollouts)
        or any(scripts.xlen(keys.scoring(scorer)) for scorer in run.manifest.scorers)
        for keys in run.keys.shards
    )


# Ranks of the training job

#: Seconds between two heartbeats of a rank.
BEAT_S: Final = 10.0
#: A rank silent for longer counts as lost (three missed heartbeats).
RANK_TIMEOUT_S: Final = 30.0
RANK_FIELD: Final = "rank:"
MAX_RANKS: Final = 1 << 20
MOST_REPORTED: Final = 10**15  # of batches, and of seconds

_FIELD: Final = re.compile(RANK_FIELD + "([0-9]{1,7})")
_HEARTBEAT: Final = re.compile("[0-9]{1,15} ")  # when, by the server's clock; the report follows

#: What a rank does: waits for its next batch, trains on one, has been closed.
Doing = Literal["waits", "trains", "left"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One heartbeat of a rank."""

    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    doing: Doing
    batch: Annotated[int, Field(ge=0, lt=MOST_REPORTED)] | None  # delivered last; None before the first one
    batch_s: Annotated[float, Field(ge=0, lt=MOST_REPORTED, allow_inf_nan=False)] | None  # seconds since then


#: Writes and reads a report as it is stored.
REPORT: Final = TypeAdapter(RankReport)


@dataclass(frozen=True, slots=True)
class HeardRank:
    """The last heartbeat of a rank, and how long ago it came."""

    report: RankReport
    silent_s: float

    @property
    def is_alive(self) -> bool:
        return self.report.doing != "left" and self.silent_s < RANK_TIMEOUT_S


def heard_ranks(session: Mapping[str, str], now_ms: int) -> dict[int, HeardRank]:
    """The ranks that have said something, from the fields of the session hash.

    Those of an earlier job that had more ranks are left out. now_ms: by the server's clock.
    """
    heard = {}
    for name, text in session.items():
        field, when = _FIELD.fullmatch(name), _HEARTBEAT.match(text)
        if field and when:
            with suppress(ValueError):  # somebody else has written it
                report = REPORT.validate_json(text[when.end() :])
                heard[int(field[1])] = HeardRank(report, max(0, now_ms - int(when[0])) / 1000)
    size = heard[0].report.world_size if 0 in heard else MAX_RANKS
    return {rank: heard[rank] for rank in sorted(heard) if rank < size}
