"""Some trajectories of a packed batch as a batch of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .packed import Level, PackedBatch, Steps


@dataclass(frozen=True, slots=True)
class Part:
    """Trajectories of a batch, and where their values stand in the whole one: int64 indices, ascending."""

    batch: PackedBatch
    trajectories: Tensor
    indices: Mapping[Level, Tensor]  # of rows, steps and tokens


def part_of(batch: PackedBatch, selection: Tensor) -> Part:
    """The trajectories for which `selection` [M] bool is set; the host waits for a device to know how many.

    Groups are numbered anew. Columns are copied; where the mask is set throughout, the part is the batch itself.
    """
    of_row = selection[batch.row_trajectory]
    masks = (selection, of_row, of_row[batch.token_row], selection[batch.steps.trajectory])
    trajectories, rows, tokens, steps = (mask.nonzero().flatten() for mask in masks)
    indices: dict[Level, Tensor] = {"row": rows, "step": steps, "token": tokens}
    if len(trajectories) == batch.num_trajectories:
        return Part(batch, trajectories, indices)
    lengths = batch.row_lengths[rows]
    cu_seqlens = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
    present, groups = torch.unique_consecutive(batch.trajectory_group[trajectories], return_inverse=True)
    part = replace(
        batch,
        cu_seqlens=cu_seqlens,
        row_trajectory=torch.searchsorted(trajectories, batch.row_trajectory[rows]),
        row_trainable=batch.row_trainable[rows],
        trajectory_group=groups,
        rewards=batch.rewards[trajectories],
        baseline=batch.baseline[trajectories],
        steps=_steps(batch, trajectories, rows, steps, cu_seqlens),
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
    return Part(part, trajectories, indices)


def _steps(
    batch: PackedBatch, trajectories: Tensor, rows: Tensor, positions: Tensor, cu_seqlens: Tensor
) -> Steps:
    """The steps at `positions`. cu_seqlens: of the part that consists of `rows`."""
    steps = batch.steps
    row = torch.searchsorted(rows, steps.row[positions])
    shift = cu_seqlens[row] - batch.cu_seqlens[steps.row[positions]]
    start, end = steps.start[positions] + shift, steps.end[positions] + shift
    return Steps(
        trajectory=torch.searchsorted(trajectories, steps.trajectory[positions]),
        row=row,
        start=start,
        end=end,
        rewards=steps.rewards[positions],
        state=steps.state[positions],
        num_tokens=int((end - start).sum()),
    )
