"""Keeps groups of lost producers from holding up other producers until their deadline.

A group belongs to the instance of a producer that was the last to open it, push to it or touch it. If that instance
is lost, or a later instance has its name, the group stops counting in pacing. It stays open, and counts again as soon
as any producer pushes to it or touches it. Prompts that it has leased are there for others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..messages import log_fields
from ..prompts.stored import give_back_of_lost
from ..run import Run, Shard
from ..run.consumer import GROUPER
from ..run.heartbeats import Attendance
from ..store.replies import as_text, replies_of

logger = logging.getLogger(__name__)

PAGE: Final = 256
#: Whom a group belongs to: name of a producer, and its instance.
OWNER: Final = re.compile(rb"(.*) ([0-9]{1,15})", re.DOTALL)


class LostProducers:
    """What one grouper knows of producers that are lost."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._attendance = Attendance(run)
        # Of each shard: producer, its first instance that may be alive, for whom nothing is left to do.
        self._done: dict[int, set[tuple[bytes, int]]] = {}
        self._done_leases: set[tuple[bytes, int]] = set()

    def look(self) -> None:
        """Find out who is lost, and what prompts and groups are theirs. Without pacing groups may stay."""
        self._attendance.look()
        first_alive = self._attendance.first_alive.items()
        if first_alive - self._done_leases:
            give_back_of_lost(self._run, dict(first_alive))
            self._done_leases = set(first_alive)
        for shard in self._run.shards:
            done = self._done.get(shard.index, set()) & first_alive
            changed = first_alive - done
            # Tickets of a lost producer may open more meanwhile: looked through again until there is none.
            if changed and self._is_paced(shard) and not self._abandon(shard, dict(changed)):
                done |= changed
            self._done[shard.index] = done

    def _is_paced(self, shard: Shard) -> bool:
        """Whether admission depends on open groups: as the trainer says, or the manifest before there is one."""
        max_staleness = shard.connection.scripts.hget(shard.keys.trainer, "max_staleness")
        if max_staleness is None:
            return self._run.manifest.max_staleness is not None
        return max_staleness != b""

    def _abandon(self, shard: Shard, first_alive: Mapping[bytes, int]) -> int:
        """How many groups no longer count. Pacing bounds how many are open, so they are read one by one."""
        abandoned = 0
        open_groups: Any = shard.connection.scripts.zrange(shard.keys.open, 0, -1)
        for start in range(0, len(open_groups), PAGE):
            for owner, ids in self._groups_by_owner(shard, open_groups[start : start + PAGE]).items():
                match = OWNER.fullmatch(owner)
                if match is None or int(match[2]) >= first_alive.get(match[1], 0):
                    continue
                count: int = shard.call("abandon", [owner, *ids], group_hashes=map(shard.keys.group, ids))
                if count:
                    abandoned += count
                    text = "producer %s is lost or was started again: %d of its groups do not count in pacing"
                    fields = log_fields("producer_lost", run=shard.run, role=GROUPER)
                    logger.warning(text, as_text(match[1]), count, extra=fields)
        return abandoned

    def _groups_by_owner(self, shard: Shard, members: Sequence[bytes]) -> dict[bytes, list[str]]:
        """Ids of open groups by who was the last to open, push to or touch them."""
        pipe = shard.connection.scripts.pipeline(transaction=False)
        for member in members:
            pipe.hget(shard.keys.group("").encode() + member, "producer")
        groups: dict[bytes, list[str]] = {}
        for member, owner in zip(members, replies_of(pipe), strict=True):
            if owner:  # "" = nobody plays it
                groups.setdefault(owner, []).append(member.decode(errors="replace"))
        return groups
