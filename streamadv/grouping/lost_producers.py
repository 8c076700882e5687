"""Groups of producers that are lost must not keep others out until their deadline.

A group belongs to the producer that was the last to open it, push to it or touch it. Once that one is lost the group
does not count in pacing; it stays open, and counts again as soon as somebody pushes to it or touches it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from ..messages import log_fields
from ..run import Run
from ..run.consumer import GROUPER
from ..run.heartbeats import Attendance
from ..store.keys import ShardKeys
from ..store.replies import replies_of

logger = logging.getLogger(__name__)

PAGE: Final = 256


class LostProducers:
    """What one grouper knows of producers that are lost."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._attendance = Attendance(run, clock)
        self._done: set[tuple[int, bytes]] = set()  # shard, producer

    def look(self) -> None:
        """Find out who is lost, and what groups are theirs. Without pacing nothing is to do."""
        self._attendance.look()
        lost = self._attendance.lost
        self._done = {(shard, name) for shard, name in self._done if name in lost}
        for shard, keys in enumerate(self._run.keys.shards):
            names = {name for name in lost if (shard, name) not in self._done}
            # Tickets of a lost producer may open more meanwhile: looked through again until there is none.
            if names and self._is_paced(keys) and not self._abandon(keys, names):
                self._done |= {(shard, name) for name in names}

    def _is_paced(self, keys: ShardKeys) -> bool:
        told = self._run.connection.scripts.hget(keys.trainer, "max_staleness")
        return self._run.manifest.max_staleness is not None if told is None else told != b""

    def _abandon(self, keys: ShardKeys, names: set[bytes]) -> int:
        """How many groups count no more. Pacing bounds how many are open, so they are read one by one."""
        scripts, abandoned = self._run.connection.scripts, 0
        open_groups: Any = scripts.zrange(keys.open, 0, -1)
        for start in range(0, len(open_groups), PAGE):
            members: list[bytes] = open_groups[start : start + PAGE]
            pipe = scripts.pipeline(transaction=False)
            for member in members:
                pipe.hget(keys.group("").encode() + member, "producer")
            theirs: dict[bytes, list[str]] = {}
            for member, owner in zip(members, replies_of(pipe), strict=True):
                if owner in names:
                    theirs.setdefault(owner, []).append(member.decode(errors="replace"))
            for owner, ids in theirs.items():
                names_of = [keys.void, keys.ledger, keys.open, *map(keys.group, ids)]
                count: int = self._run.call("abandon", names_of, [owner, *ids])
                if not count:
                    continue
                abandoned += count
                logger.warning(
                    "producer %s is lost: its %d open groups do not count in pacing, unless others push to them",
                    owner.decode(errors="backslashreplace"),
                    count,
                    extra=log_fields("producer_lost", run=self._run.name, role=GROUPER),
                )
        return abandoned
