"""References: the trajectories of a batch one by one, made only for a loop that asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isnan
from typing import overload

from ..grouping.layout import Layout
from ..trajectory.members import BASELINE, HAS_REWARD, HAS_VERSION, NO_STATE, STATUSES, Positions
from ..trajectory.reference import Reference, StepSpan
from ..trajectory.schema import Role


class References(Sequence[Reference]):
    """References of the members of a layout, or of those at `positions`, which may repeat. Made at the first look."""

    def __init__(self, layout: Layout, positions: Positions | None = None) -> None:
        self._layout = layout
        self._positions = positions

    def __len__(self) -> int:
        return len(self._layout if self._positions is None else self._positions)

    @overload
    def __getitem__(self, index: int) -> Reference: ...
    @overload
    def __getitem__(self, index: slice) -> list[Reference]: ...
    def __getitem__(self, index: int | slice) -> Reference | list[Reference]:
        return self._made[index]

    @cached_property
    def _made(self) -> list[Reference]:
        references = references_of(self._layout)
        if self._positions is None:
            return references
        return [references[position] for position in self._positions.tolist()]


def references_of(layout: Layout) -> list[Reference]:
    """The members of a layout one by one."""
    members = layout.members
    rows, first_row = members.rows.tolist(), members.first_row.tolist()
    steps, first_step = members.steps.tolist(), members.first_step.tolist()
    named = [(name, values.tolist()) for name, values in members.rewards.items()]
    groups = layout.group.tolist()
    references = []
    for member, record in enumerate(members.table.tolist()):
        index, status, flags, _, _, _, reward, oldest, newest, _, _ = record
        group = layout.groups[groups[member]]
        own_rows = rows[first_row[member] : first_row[member + 1]]
        reference = Reference(
            group_id=group.group_id,
            rollout_index=index,
            row_lengths=tuple(tokens for tokens, _ in own_rows),
            row_trainable=tuple(trainable for _, trainable in own_rows),
            status=STATUSES[status],
            reward=reward if flags & HAS_REWARD else None,
            rewards={name: values[member] for name, values in named if not isnan(values[member])},
            role=Role.BASELINE if flags & BASELINE else Role.TRAIN,
            versions=(oldest, newest) if flags & HAS_VERSION else None,
            data_source=group.data_source,
            steps=tuple(
                StepSpan(row, start, end, step_reward, None if state == NO_STATE else members.states[state])
                for row, start, end, state, step_reward in steps[first_step[member] : first_step[member + 1]]
            ),
        )
        references.append(reference)
    return references
