"""What rank 0 dropped while it named batches, since the last delivered one."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..grouping.groups_log import LoggedGroup

#: Reasons and sources told apart; further sources are "other".
MAX_NAMES: Final = 256


class DroppedGroups:
    """Counts of dropped groups by reason and source.

    The groups themselves are not kept: a trainer may wait long while everything is dropped.
    """

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()
        self._trajectories: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, group: LoggedGroup, reason: str) -> None:
        """Count a group."""
        name = f"dropped/{reason}/{group.data_source or 'unknown'}"
        name = name if name in self._groups or len(self._groups) < MAX_NAMES else f"dropped/{reason}/other"
        self._groups[name] += 1
        self._trajectories[name] += len(group.members)
        self._tokens[name] += int(group.members.table["trainable"].sum())

    def __len__(self) -> int:
        """Groups."""
        return self._groups.total()

    def clear(self) -> None:
        """Begin anew, after the figures were reported."""
        for counts in (self._groups, self._trajectories, self._tokens):
            counts.clear()

    def figures(self) -> dict[str, float]:
        """Groups, and mean length of their trajectories in trainable tokens, by reason and source."""
        groups = {f"{name}/groups": float(count) for name, count in self._groups.items()}
        means = {name: self._tokens[name] / count for name, count in self._trajectories.items() if count}
        return groups | {f"{name}/response_length/mean": mean for name, mean in means.items()}
