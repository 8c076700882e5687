"""Groups of lost producers must not keep other producers waiting until their deadline.

A group belongs to the producer that was the last to open it, push to it or touch it. Once that one is lost the group
does not count in pacing; it stays open, and counts again as soon as somebody pushes to it or touches it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from ..messages import log_fields
from ..run import Run, Shard
from ..run.consumer import GROUPER
from ..run.heartbeats import Attendance
from ..store.replies import replies_of

logger = logging.getLogger(__name__)

PAGE: Final = 256


class LostProducers:
    """What one grouper knows of producers that are lost."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._attendance = Attendance(run)
        self._done: set[tuple[int, bytes]] = set()  # shard, producer

    def look(self) -> None:
        """Find out who is lost, and what groups are theirs. Without pacing nothing is to do."""
        self._attendance.look()
        lost = self._attendance.lost
        self._done = {(shard, name) for shard, name in self._done if name in lost}
        for shard in self._run.shards:
            names = {name for name in lost if (shard.index, name) not in self._done}
            # Tickets of a lost producer may open more meanwhile: looked through again until there is none.
            if names and self._is_paced(shard) and not self._abandon(shard, names):
                self._done |= {(shard.index, name) for name in names}

    def _is_paced(self, shard: Shard) -> bool:
        """Whether admission depends on open groups: as the trainer says, or the manifest before there is one."""
        max_staleness = shard.connection.scripts.hget(shard.keys.trainer, "max_staleness")
        if max_staleness is None:
            return self._run.manifest.max_staleness is not None
        return max_staleness != b""

    def _abandon(self, shard: Shard, names: set[bytes]) -> int:
        """How many groups no longer count. Pacing bounds how many are open, so they are read one by one."""
        abandoned = 0
        open_groups: Any = shard.connection.scripts.zrange(shard.keys.open, 0, -1)
        for start in range(0, len(open_groups), PAGE):
            for producer, ids in self._groups_by_producer(shard, open_groups[start : start + PAGE]).items():
                if producer not in names:
                    continue
                count: int = shard.call("abandon", [producer, *ids], group_hashes=map(shard.keys.group, ids))
                if count:
                    abandoned += count
                    text = "producer %s is lost: its %d open groups do not count in pacing, unless others push to them"
                    fields = log_fields("producer_lost", run=shard.run, role=GROUPER)
                    logger.warning(text, producer.decode(errors="backslashreplace"), count, extra=fields)
        return abandoned

    def _groups_by_producer(self, shard: Shard, members: Sequence[bytes]) -> dict[bytes, list[str]]:
        """Ids of open groups by who was the last to open, push to or touch them."""
        pipe = shard.connection.scripts.pipeline(transaction=False)
        for member in members:
            pipe.hget(shard.keys.group("").encode() + member, "producer")
        groups: dict[bytes, list[str]] = {}
        for member, producer in zip(members, replies_of(pipe), strict=True):
            if producer:  # "" = nobody plays it
                groups.setdefault(producer, []).append(member.decode(errors="replace"))
        return groups
