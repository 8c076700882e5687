"""Counts how often a scorer has tried a trajectory that may end its process. The server counts before each try.

Tries that end with an exception need no server: the process that makes them survives and counts (`Suspect.tries`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..run import Run, Shard
from ..store.replies import as_count
from .scoring_streams import WaitingMember


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
