"""Which producers of a run are there, by their heartbeats, and so whether more can come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from .malformed import reject_item
from .run import Run

HEARTBEAT_S: Final = 10.0
#: A producer silent for longer is taken for dead (three missed heartbeats).
PRODUCER_TIMEOUT_S: Final = 30.0
#: One silent for longer is taken off the list, unless it has finished.
FORGET_S: Final = 3600.0
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

    def look(self) -> None:
        """Read the list; take off it what is no state of a producer, and who is gone."""
        home, now = self._run.keys.home, self._clock()
        stored: Any = self._run.connection.scripts.hgetall(home.producers)
        leaving: list[bytes] = []
        for name, value in stored.items():
            if not PRODUCER_STATE.fullmatch(value.decode(errors="replace")):
                reject_item(
                    self._run, home, home.producers, name, "no state of a producer", value, removal="HDEL"
                )
                continue
            if name not in self._heard or self._heard[name].value != value:
                self._heard[name] = Heard(value, now)
            heard = self._heard[name]
            if heard.state == b"gone" or (heard.state == b"open" and now - heard.when > FORGET_S):
                leaving += [name, value]
        if leaving:
            self._run.call("forget_producers", [home.void, home.producers], leaving)

    @property
    def ended(self) -> bool:
        """Whether a producer has finished and no other is alive, as of the last look."""
        limit = self._clock() - PRODUCER_TIMEOUT_S
        states = [
            heard.state for heard in self._heard.values() if heard.when > limit or heard.state != b"open"
        ]
        return b"finished" in states and b"open" not in states


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
