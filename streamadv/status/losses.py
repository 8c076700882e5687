"""Which of the groups that ended are lost for training, by reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from ..metrics import KEPT

#: Outcomes of lost groups, by the reason of a wait for other groups.
LOST: Final = {
    "filtered": ("zero_variance", "difficulty", "no_train_members"),
    "ended_short": ("incomplete", "expired", "cancelled"),
    "stale": ("stale",),
    "rolled_back": ("rolled_back",),
    "dead": ("dead", "malformed"),
}
#: What happens to a group after it was counted as kept.
AFTERWARDS: Final = ("stale", "rolled_back", "dead")


@dataclass(frozen=True, slots=True)
class Losses:
    """Of the groups that ended in some time: how many came in, and how many of these are lost, by reason."""

    produced: int
    by_reason: dict[str, int]

    @classmethod
    def of(cls, outcomes: Mapping[str, int]) -> Self:
        """outcomes: counts of how groups ended in that time.

        A group that came in earlier and was lost in that time does not count: only new groups tell what will come.
        """
        kept = sum(outcomes.get(name, 0) for name in KEPT)
        lost = {reason: sum(outcomes.get(name, 0) for name in names) for reason, names in LOST.items()}
        produced = kept + lost["filtered"] + lost["ended_short"] + outcomes.get("malformed", 0)
        for reason in AFTERWARDS:
            lost[reason] = min(lost[reason], kept)
            kept -= lost[reason]
        return cls(produced, {reason: count for reason, count in lost.items() if count > 0})

    @property
    def total(self) -> int:
        return sum(self.by_reason.values())


def counts_as_text(outcomes: Mapping[str, int]) -> str:
    """`name count` of each outcome, without those at 0: "stale 2, zero_variance 5"."""
    return ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()) if count > 0)
