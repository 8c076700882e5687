"""Some trajectories of a packed batch as a batch of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..extras import torch
from .packed import Level, PackedBatch, Steps, offsets_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Trajectories of a batch, and where their values stand in the whole one: int64 indices."""

    batch: PackedBatch
    trajectories: Tensor
    indices: Mapping[Level, Tensor]  # of rows, steps and tokens


def part_of(batch: PackedBatch, trajectories: Tensor) -> Part:
    """The trajectories [K] int64, in this order; those of a group must follow each other.

    Groups are numbered anew, columns copied. The host waits for a device to know how many rows and tokens there are.
    """
    steps = batch.steps
    rows = _spans(batch.row_offsets, trajectories)
    tokens = _spans(batch.cu_seqlens, rows)
    step_offsets = offsets_of(steps.trajectory, batch.num_trajectories)
    positions = _spans(step_offsets, trajectories)
    cu_seqlens = _offsets(batch.row_lengths[rows])
    present, groups = torch.unique_consecutive(batch.trajectory_group[trajectories], return_inverse=True)
    part = replace(
        batch,
        cu_seqlens=cu_seqlens,
        row_trajectory=_owners(batch.row_offsets, trajectories),
        row_trainable=batch.row_trainable[rows],
        trajectory_group=groups,
        rewards=batch.rewards[trajectories],
        baseline=batch.baseline[trajectories],
        steps=_steps(batch, rows, positions, _owners(step_offsets, trajectories), cu_seqlens),
        num_tokens=len(tokens),
        num_groups=len(present),
        columns={name: column[tokens] for name, column in batch.columns.items()},
        components={name: rewards[trajectories] for name, rewards in batch.components.items()},
        scores=None if batch.scores is None else batch.scores[trajectories],
        truncated=None if batch.truncated is None else batch.truncated[trajectories],
        given_mask=None if batch.given_mask is None else batch.given_mask[tokens],
        group_sources=[batch.group_sources[group] for group in present.tolist()]
        if batch.group_sources
        else (),
    )
    return Part(part, trajectories, {"row": rows, "step": positions, "token": tokens})


def _steps(batch: PackedBatch, rows: Tensor, positions: Tensor, owners: Tensor, cu_seqlens: Tensor) -> Steps:
    """The steps at `positions`, of the trajectories `owners`; rows and cu_seqlens: of the part."""
    steps = batch.steps
    row_in_part = torch.empty_like(batch.row_trajectory)
    row_in_part[rows] = torch.arange(len(rows), device=rows.device)
    row = row_in_part[steps.row[positions]]
    shift = cu_seqlens[row] - batch.cu_seqlens[steps.row[positions]]
    start, end = steps.start[positions] + shift, steps.end[positions] + shift
    return Steps(
        trajectory=owners,
        row=row,
        start=start,
        end=end,
        rewards=steps.rewards[positions],
        state=steps.state[positions],
        num_tokens=int((end - start).sum()),
    )


def _spans(offsets: Tensor, positions: Tensor) -> Tensor:
    """The indices offsets[p] : offsets[p + 1] of all `positions`, one after another."""
    lengths = offsets[positions + 1] - offsets[positions]
    shift = offsets[positions] - _offsets(lengths)[:-1]
    spread = torch.repeat_interleave(shift, lengths)
    return spread + torch.arange(len(spread), device=spread.device)


def _owners(offsets: Tensor, positions: Tensor) -> Tensor:
    """For each index of `_spans` the number of its position."""
    return torch.repeat_interleave(offsets[positions + 1] - offsets[positions])


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
