"""What becomes of trajectories that have no score yet.

While a judge is away they wait, and their groups do not end at their deadlines. A trajectory that may end its process
is counted at the server before each try; tries that end with an exception need no server, because the process that
makes them survives and counts (`Call.tries`).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from .. import clock
from ..messages import log_fields
from ..run import Run
from ..store.replies import as_count, as_text
from .scores import ScoreError
from .scoring_streams import WaitingMember, waiting_entries

logger = logging.getLogger(__name__)

#: Seconds before a trajectory is asked for again: twice as long each time, half of it by chance.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
#: Seconds between two lines of the log.
LOG_INTERVAL_S: Final = 30.0
#: Groups are kept open so many times within a deadline.
KEPT_PER_DEADLINE: Final = 8


class Away:
    """What one process of a scorer knows of its judge's absence."""

    def __init__(self, run: Run, scorer: str) -> None:
        self._run, self._scorer = run, scorer
        self._since: float | None = None
        self._logged = self._kept = -math.inf

    def pause_s(self, error: ScoreError, waits: int) -> float:
        """Note that the judge was away. Returns the seconds until what has waited so often may be tried again."""
        now = clock.now()
        if self._since is None or now - self._logged >= LOG_INTERVAL_S:
            self._since, self._logged = now if self._since is None else self._since, now
            text = "scorer %s: waits for its judge, for %.0f s now: %s; no try is counted"
            fields = log_fields("judge_away", run=self._run.name, role=self._scorer)
            logger.warning(text, self._scorer, now - self._since, error, extra=fields)
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(waits, 10)) * random.uniform(0.5, 1)
        return max(pause, error.wait_s)

    def over(self) -> None:
        """Nothing waits for the judge any more."""
        if self._since is not None:
            fields = log_fields("judge_back", run=self._run.name, role=self._scorer)
            seconds = clock.now() - self._since
            logger.info("scorer %s: its judge is back after %.0f s", self._scorer, seconds, extra=fields)
            self._since = None

    def keep_groups_open(self) -> None:
        """While the judge is away: groups that wait for it get their whole time again, now and then."""
        deadline_s = self._run.manifest.group_deadline_s
        if self._since is None or clock.now() - self._kept < deadline_s / KEPT_PER_DEADLINE:
            return
        self._kept = clock.now()
        for shard in self._run.shards:
            waiting = waiting_entries(shard, self._scorer)
            for group_id in {as_text(entry.fields.get(b"group_id", b"")) for entry in waiting}:
                producer = shard.connection.scripts.hget(shard.keys.group(group_id), "producer")
                if producer is not None:
                    shard.call("touch", [group_id, round(deadline_s * 1000), producer], group=group_id)


class Tries:
    """The tries of one scorer, kept with those of groups at which advantage workers tried (`attempt.lua`)."""

    def __init__(self, run: Run, scorer: str) -> None:
        self._run, self._scorer = run, scorer
        self._counted: set[str] = set()

    def count(self, item: WaitingMember) -> int:
        """Count one more try. Returns how many there are with it."""
        field = self._field(item)
        self._counted.add(field)
        tries: int = self._run.shards[item.packet.entry.shard].call("attempt", [field, "1"])
        return tries

    def forget(self, item: WaitingMember) -> None:
        """If this process has counted one."""
        field = self._field(item)
        if field in self._counted:
            self._run.shards[item.packet.entry.shard].call("attempt", [field, "0"])
            self._counted.discard(field)

    def fewest_first(self, units: Sequence[Sequence[WaitingMember]]) -> list[Sequence[WaitingMember]]:
        """In the order of tries at their first members: what ends this process again does so when others are done."""
        if len(units) < 2:
            return list(units)
        pipe = self._run.connection.scripts.pipeline(transaction=False)
        for first, *_ in units:
            pipe.hget(self._run.shards[first.packet.entry.shard].keys.attempts, self._field(first))
        tries = map(as_count, pipe.execute())
        return [unit for _, unit in sorted(zip(tries, units, strict=True), key=itemgetter(0))]

    def _field(self, item: WaitingMember) -> str:
        return f"{self._scorer} {item.trajectory.group_id} {item.trajectory.rollout_index}"
