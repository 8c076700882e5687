"""A judge that is away: its trajectories wait, and their groups meanwhile do not end at their deadlines."""

from __future__ import annotations

import logging
import math
import random
from typing import Any, Final

from .. import clock
from ..messages import log_fields
from ..run import Run, Shard
from ..run.consumer import entries_of
from .scores import ScoreError

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
