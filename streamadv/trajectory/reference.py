"""The reference: one trajectory as users see it, with everything that is known of it without its columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .schema import Role, Status


class StepSpan(NamedTuple):
    """A `schema.Step`, compact."""

    row: int
    start: int
    end: int
    reward: float
    state_key: str | None


@dataclass(frozen=True, slots=True)
class Reference:
    """One trajectory, of a batch or for a scorer. Satisfies `algorithms.packed.Packable`."""

    group_id: str
    rollout_index: int
    row_lengths: tuple[int, ...]  # tokens
    row_trainable: tuple[int, ...]  # tokens with response_mask 1
    status: Status = Status.COMPLETED
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    role: Role = Role.TRAIN
    versions: tuple[int, int] | None = None  # oldest and newest over trainable tokens
    data_source: str | None = None
    steps: tuple[StepSpan, ...] = ()

    @property
    def is_baseline(self) -> bool:
        return self.role is Role.BASELINE

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    def staleness(self, k: int) -> int | None:
        """`k` minus the oldest version over trainable tokens, at least 0; None without a version."""
        return None if self.versions is None else max(0, k - self.versions[0])
