"""The packed batch every algorithm works on: rows laid end to end, no padding.

Sizes: N tokens in R rows of M trajectories in G groups; S steps. Trajectories are ordered by
(group_id, rollout_index), groups and rows follow, so every segment is contiguous and a sum over a segment
visits its members in the same order whatever else is in the batch: results do not depend on the number of
workers or the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """The turns of a batch, in time order within each trajectory. All tensors have length S."""

    trajectory: Tensor  # int64: index into trajectories
    row: Tensor  # int64: index into rows
    start: Tensor  # int64: first token, counted from the start of the packed batch
    end: Tensor  # int64: exclusive
    rewards: Tensor  # float64
    state: Tensor  # int64: equal numbers = equal state_key; -1 = no state_key

    def __len__(self) -> int:
        return len(self.trajectory)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows of a batch, or of a chunk of its groups, with everything an algorithm may ask for.

    Scalars that decide numbers are float64; columns are float32 as they came, rounded once at the end.
    """

    cu_seqlens: Tensor  # [R + 1] int64: row r holds tokens cu_seqlens[r] : cu_seqlens[r + 1]
    row_trajectory: Tensor  # [R] int64
    trajectory_group: Tensor  # [M] int64
    rewards: Tensor  # [M] float64: the trajectory's reward, shaped by the steps of the chain
    baseline: Tensor  # [M] bool: role is baseline
    steps: Steps
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each [N]; response_mask uint8

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def num_rows(self) -> int:
        return len(self.row_trajectory)

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectory_group)

    @property
    def num_groups(self) -> int:
        """G: groups are numbered from 0 without gaps."""
        return int(self.trajectory_group[-1]) + 1 if len(self.trajectory_group) else 0

    @property
    def device(self) -> torch.device:
        return self.rewards.device

    @property
    def token_row(self) -> Tensor:
        """[N] int64: the row of each token."""
        lengths = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        return torch.repeat_interleave(lengths, output_size=None)

    def with_columns(self, **columns: Tensor) -> PackedBatch:
        """A copy with columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})
