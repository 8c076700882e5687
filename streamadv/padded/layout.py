"""Between padded [B, T] tensors and the packed batch the algorithms work on."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..algorithms.arguments import Labels
from ..algorithms.packed import PackedBatch, Steps
from ..algorithms.packed_checks import BUILT
from ..algorithms.trainable import as_bool, padded_offsets, token_counts
from ..errors import ArgumentError


def label_codes(labels: Labels) -> Tensor:
    """[B] int64: equal labels, equal number, counted from 0 in order of appearance."""
    items = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else list(labels)
    numbers = defaultdict[object, int](itertools.count().__next__)
    return torch.from_numpy(np.fromiter(map(numbers.__getitem__, items), np.int64, len(items)))


def group_order(labels: Labels, device: torch.device) -> tuple[Tensor, Tensor]:
    """(order, offsets): rows group by group, in their own order inside; [B] and [G + 1] int64."""
    codes = label_codes(labels)
    order = torch.argsort(codes, stable=True)
    count = int(codes.max()) + 1 if len(codes) else 0
    offsets = torch.searchsorted(codes[order], torch.arange(count + 1))
    return order.to(device), offsets.to(device)


def as_batch(
    mask: Tensor,
    columns: Mapping[str, Tensor] | None = None,
    rewards: Tensor | None = None,
    index: Labels | None = None,
    counted: bool = False,
) -> tuple[PackedBatch, Tensor]:
    """Rows of `mask` [B, T] as a packed batch of B one-row trajectories, padding included as masked tokens.

    mask holds 0 and 1. columns: [B, T] each, None = not even response_mask; rewards [B]; index: group labels
    [B], None = every row alone; counted False leaves row_trainable at -1, which saves reading the mask once
    more. Returns the batch and the row order [B] it stands in, for `to_padded`.
    Raises ArgumentError if shapes disagree.
    """
    rows, width = mask.shape
    device = mask.device
    for name, column in (columns or {}).items():
        if column.shape != mask.shape:
            raise ArgumentError(
                f"{name} has shape {tuple(column.shape)}, response_mask {tuple(mask.shape)}: give both alike"
            )
    place = torch.arange(rows, device=device)
    order, group, groups = place, place, rows
    if index is not None:
        if len(index) != rows:
            raise ArgumentError(f"index has {len(index)} labels, response_mask {rows} rows: one each")
        codes = label_codes(index)
        groups = int(codes.max()) + 1 if rows else 0
        codes = codes.to(device)
        order = torch.argsort(codes, stable=True)
        group = codes[order]

    def laid_out(tensor: Tensor) -> Tensor:
        return (tensor if index is None else tensor.index_select(0, order)).reshape(-1)

    tokens = {} if columns is None else {"response_mask": as_bool(mask).view(torch.uint8), **columns}
    none = torch.zeros(0, dtype=torch.int64, device=device)
    unknown = torch.full((rows,), -1, device=device)
    reward = torch.zeros(rows, device=device) if rewards is None else rewards
    batch = PackedBatch(
        cu_seqlens=padded_offsets(mask),
        row_trajectory=place,
        row_trainable=token_counts(mask)[order] if counted else unknown,
        trajectory_group=group,
        rewards=reward[order].to(torch.float64),
        baseline=torch.zeros(rows, dtype=torch.bool, device=device),
        steps=Steps(none, none, none, none, none.double(), none, 0),
        num_tokens=rows * width,
        num_groups=groups,
        columns={name: laid_out(column) for name, column in tokens.items()},
        layout=BUILT,
    )
    return batch, order


def to_padded(values: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
    """[B, T] float32: packed results in the rows' own order."""
    rows = values.view(shape).to(torch.float32)
    return torch.empty_like(rows).index_copy_(0, order, rows)
