"""What was dropped at naming since the last batch."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..grouping.groups_log import LoggedGroup

#: Reasons and sources told apart; further sources are "other".
MAX_NAMES: Final = 256


class PassedOver:
    """What was dropped at naming since the last batch, in figures: a trainer may wait long while everything is."""

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()
        self._trajectories: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def append(self, dropped: tuple[str, LoggedGroup]) -> None:
        """Count a group with the reason."""
        reason, group = dropped
        name = f"dropped/{reason}/{group.data_source or 'unknown'}"
        name = name if name in self._groups or len(self._groups) < MAX_NAMES else f"dropped/{reason}/other"
        self._groups[name] += 1
        self._trajectories[name] += len(group.members)
        self._tokens[name] += sum(sum(member.row_trainable) for member in group.members)

    def __len__(self) -> int:
        """Groups."""
        return self._groups.total()

    def clear(self) -> None:
        """It is told."""
        for counts in (self._groups, self._trajectories, self._tokens):
            counts.clear()

    def figures(self) -> dict[str, float]:
        """Groups, and mean length of their trajectories, by reason and source."""
        found = {f"{name}/groups": float(count) for name, count in self._groups.items()}
        means = {name: self._tokens[name] / count for name, count in self._trajectories.items() if count}
        return found | {f"{name}/response_length/mean": mean for name, mean in means.items()}
