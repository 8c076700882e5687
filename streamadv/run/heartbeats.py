"""Which producers of a run are there, by their heartbeats, and so whether more can come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container
from typing import Any, Final, NamedTuple

from .malformed import reject
from .run import Run

HEARTBEAT_S: Final = 10.0
#: A producer silent for longer is taken for dead (three missed heartbeats).
PRODUCER_TIMEOUT_S: Final = 30.0
#: One silent for longer is taken off the list, unless it has finished.
FORGET_S: Final = 3600.0
#: So many of each kind stay on the list, the latest: those that have finished, and those that are lost.
PAST_KEPT: Final = 100
#: Names that one script takes off the list, each with its heartbeat.
FORGET_SLICE: Final = 1000
#: What a heartbeat writes: when (ms of the server, another at each heartbeat), how, and which instance of that name.
PRODUCER_STATE: Final = re.compile(r"[0-9]{1,15} (open|finished|gone)( [0-9]{1,15})?")


class Heard(NamedTuple):
    """A producer's last heartbeat, and when it was first seen."""

    value: bytes
    when: float

    @property
    def state(self) -> bytes:
        return self.value.split(b" ")[1]


class Attendance:
    """The producers that one reader has heard of: alive is whose heartbeat has changed lately, by the reader's clock.

    Times of the server are not compared, since its clock may be set and a failover brings another one. So a producer
    that died before the first look is taken for alive for PRODUCER_TIMEOUT_S more. Taking somebody off the list
    ends nothing: who has not said that it is finished, or gone, is waited for.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._heard: dict[bytes, Heard] = {}
        self._some_finished = False  # of those no longer on the list

    def look(self) -> None:
        """Read the list; take off it what is no state of a producer, and who is gone."""
        home, now = self._run.home, self._clock()
        stored: Any = self._run.connection.scripts.hgetall(home.keys.producers)
        leaving: list[bytes] = []
        for name, value in stored.items():
            if not PRODUCER_STATE.fullmatch(value.decode(errors="replace")):
                reject(home, home.keys.producers, name, "no state of a producer", {"state": value})
                continue
            if name not in self._heard or self._heard[name].value != value:
                self._heard[name] = Heard(value, now)
            heard = self._heard[name]
            if heard.state == b"gone" or (heard.state == b"open" and now - heard.when > FORGET_S):
                leaving += [name, value]
        finished = {name for name in stored if name in self._heard and self._heard[name].state == b"finished"}
        for past in (finished, self.lost & stored.keys()):
            by_age = sorted(past, key=lambda name: int(self._heard[name].value.partition(b" ")[0]))
            leaving += [part for name in by_age[:-PAST_KEPT] for part in (name, self._heard[name].value)]
        for start in range(0, len(leaving), FORGET_SLICE):
            part = leaving[start : start + FORGET_SLICE]
            home.call("forget_producers", part)
        self._forget_past(stored)

    def _forget_past(self, listed: Container[bytes]) -> None:
        """Of those that are off the list only the silent are waited for, as long as anybody who is silent is."""
        lost = self.lost
        for name in [name for name in self._heard if name not in listed]:
            state = self._heard[name].state
            self._some_finished |= state == b"finished"
            if state != b"open" or name in lost:
                del self._heard[name]

    @property
    def lost(self) -> set[bytes]:
        """Producers that have not finished and are no longer heard of, as of the last look."""
        limit = self._clock() - PRODUCER_TIMEOUT_S
        return {name for name, heard in self._heard.items() if heard.state == b"open" and heard.when <= limit}

    @property
    def ended(self) -> bool:
        """Whether a producer has finished and no other is alive, as of the last look."""
        lost = self.lost
        states = [heard.state for name, heard in self._heard.items() if name not in lost]
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
