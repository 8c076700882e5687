"""A reference: one trajectory as users see it, with everything known about it except its columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan

from .checked import StepSpan
from .members import HAS_REWARD, HAS_VERSION, NO_STATE, STATUSES, Members, role_of
from .schema import Role, Status


@dataclass(frozen=True, slots=True)
class Reference:
    """One trajectory, of a batch or for a scorer."""

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


def references_of(members: Members, owners: Iterable[tuple[str, str | None]]) -> list[Reference]:
    """The members one by one. owners: group_id and data_source of each."""
    rows, first_row = members.rows.tolist(), members.first_row.tolist()
    steps, first_step = members.steps.tolist(), members.first_step.tolist()
    named = [(name, values.tolist()) for name, values in members.rewards.items()]
    references = []
    for member, (record, owner) in enumerate(zip(members.table.tolist(), owners, strict=True)):
        index, status, flags, _, _, _, reward, oldest, newest, _, _ = record
        own_rows = rows[first_row[member] : first_row[member + 1]]
        own_steps = steps[first_step[member] : first_step[member + 1]]
        reference = Reference(
            group_id=owner[0],
            rollout_index=index,
            row_lengths=tuple(tokens for tokens, _ in own_rows),
            row_trainable=tuple(trainable for _, trainable in own_rows),
            status=STATUSES[status],
            reward=reward if flags & HAS_REWARD else None,
            rewards={name: values[member] for name, values in named if not isnan(values[member])},
            role=role_of(flags),
            versions=(oldest, newest) if flags & HAS_VERSION else None,
            data_source=owner[1],
            steps=tuple(
                StepSpan(row, start, end, step_reward, None if state == NO_STATE else members.states[state])
                for row, start, end, state, step_reward in own_steps
            ),
        )
        references.append(reference)
    return references
