"""What becomes of trajectories that have no score yet.

While a judge is away they wait, and their groups do not end at their deadlines. A trajectory that may end its process
is counted at the server before each try; tries that end with an exception need no server, because the process that
makes them survives and counts (`Suspect.tries`). What a scorer gives up is logged, one line for many.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .. import clock
from ..messages import log_fields
from ..run import Run, Shard
from ..run.consumer import entries_of
from ..store.replies import as_count
from .scores import ScoreError
from .scoring_streams import WaitingMember

logger = logging.getLogger(__name__)

#: Seconds before a trajectory is asked for again: twice as long each time, half of it by chance.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
#: Seconds between two lines of the log.
LOG_INTERVAL_S: Final = 30.0
#: Groups are kept open so many times within a deadline.
KEPT_PER_DEADLINE: Final = 8
#: Entries of a stream that are looked at in one call.
PAGE: Final = 100


class Away:
    """What one process of a scorer knows of its judge's absence."""

    def __init__(self, run: Run, scorer: str) -> None:
        self._run, self._scorer = run, scorer
        self._since: float | None = None
        self._logged = self._kept = -math.inf

    def pause_s(self, error: ScoreError, waits: int) -> float:
        """Note that the judge was away. Returns the seconds until what has waited so often may be tried again."""
        now = clock.now()
        if self._since is None:
            self._since = now
        elif now - self._logged < LOG_INTERVAL_S:
            return self._pause_s(error, waits)
        self._logged = now
        logger.warning(
            "scorer %s: waits for its judge, for %.0f s now: %s; no try is counted",
            self._scorer,
            now - self._since,
            error,
            extra=log_fields("judge_away", run=self._run.name, role=self._scorer),
        )
        return self._pause_s(error, waits)

    def over(self) -> None:
        """Nothing waits for the judge any more."""
        if self._since is not None:
            logger.info(
                "scorer %s: its judge is back after %.0f s",
                self._scorer,
                clock.now() - self._since,
                extra=log_fields("judge_back", run=self._run.name, role=self._scorer),
            )
            self._since = None

    def keep_groups_open(self) -> None:
        """While the judge is away: groups that wait for it get their whole time again, now and then."""
        deadline_s = self._run.manifest.group_deadline_s
        if self._since is None or clock.now() - self._kept < deadline_s / KEPT_PER_DEADLINE:
            return
        self._kept = clock.now()
        for shard in self._run.shards:
            for group_id in self._waiting(shard):
                producer = shard.connection.scripts.hget(shard.keys.group(group_id), "producer")
                if producer is not None:
                    shard.call("touch", [group_id, round(deadline_s * 1000), producer], group=group_id)

    def _waiting(self, shard: Shard) -> set[str]:
        """Groups with a packet in the scorer's stream."""
        found, start = set[str](), "-"
        while True:
            reply: Any = shard.connection.scripts.xrange(shard.keys.scoring(self._scorer), start, "+", PAGE)
            for entry in entries_of(shard.index, reply):
                found.add(entry.fields.get(b"group_id", b"").decode(errors="replace"))
            if len(reply) < PAGE:
                return found
            start = f"({reply[-1][0].decode()}"

    @staticmethod
    def _pause_s(error: ScoreError, waits: int) -> float:
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(waits, 10)) * random.uniform(0.5, 1)
        return max(pause, error.wait_s)


class Tries:
    """The tries of one scorer, kept with those of groups at which advantage workers tried (`attempt.lua`)."""

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._counted: set[str] = set()

    def count(self, shard: Shard, item: WaitingMember) -> int:
        """Count one more try. Returns how many there are with it."""
        field = self._field(item)
        self._counted.add(field)
        tries: int = shard.call("attempt", [field, "1"])
        return tries

    def forget(self, shard: Shard, item: WaitingMember) -> None:
        """If this process has counted one."""
        field = self._field(item)
        if field in self._counted:
            shard.call("attempt", [field, "0"])
            self._counted.discard(field)

    def fewest_first(
        self, run: Run, units: Sequence[Sequence[WaitingMember]]
    ) -> list[Sequence[WaitingMember]]:
        """In the order of tries at their first members: what ends this process again does so when others are done."""
        if len(units) < 2:
            return list(units)
        tries = dict[str, int]()
        for index in {unit[0].packet.entry.shard for unit in units}:
            shard = run.shard(index)
            fields = [self._field(unit[0]) for unit in units if unit[0].packet.entry.shard == index]
            reply: Any = shard.connection.scripts.hmget(shard.keys.attempts, fields)
            tries.update(zip(fields, map(as_count, reply), strict=True))
        return sorted(units, key=lambda unit: tries[self._field(unit[0])])

    def _field(self, item: WaitingMember) -> str:
        return f"{self._scorer} {item.trajectory.group_id} {item.trajectory.rollout_index}"


#: Seconds between two lines for the same reason.
GIVEN_UP_EVERY_S: Final = 10.0


class _Noted(NamedTuple):
    """The first of some trajectories, and how many they are."""

    name: str
    group_id: str
    problem: str
    trajectories: int


class GivenUp:
    """Trajectories that became unscorable since the last lines of the log: how many and the first one, by reason."""

    def __init__(self, run: str, scorer: str) -> None:
        self._run = run
        self._scorer = scorer
        self._noted: dict[str, _Noted] = {}
        self._logged_at: dict[str, float] = {}

    def note(self, name: str, group_id: str, reason: str, problem: str, count: int = 1) -> None:
        """So many trajectories of a group, the first of which is `name`, are unscorable."""
        fields = log_fields(
            "trajectory_unscorable", run=self._run, role=self._scorer, group=group_id, reason=reason
        )
        logger.debug("scorer %s: trajectory %s is unscorable: %s", self._scorer, name, problem, extra=fields)
        before = self._noted.get(reason)
        if before is None:
            self._noted[reason] = _Noted(name, group_id, problem, count)
        else:
            self._noted[reason] = before._replace(trajectories=before.trajectories + count)

    def log(self, now: bool = False) -> None:
        """A line for each reason whose last one is GIVEN_UP_EVERY_S ago, or for all of them `now`."""
        for reason, noted in list(self._noted.items()):
            last = self._logged_at.get(reason)
            if not now and last is not None and clock.now() - last < GIVEN_UP_EVERY_S:
                continue
            del self._noted[reason]
            self._logged_at[reason] = clock.now()
            fields = log_fields(
                "trajectories_unscorable",
                run=self._run,
                role=self._scorer,
                group=noted.group_id,
                reason=reason,
                count=noted.trajectories,
            )
            which = f"trajectory {noted.name} is"
            if noted.trajectories > 1:
                which = f"{noted.trajectories} trajectories, {noted.name} first, are"
            text = "scorer %s: %s unscorable (%s): %s"
            logger.warning(text, self._scorer, which, reason, noted.problem, extra=fields)
