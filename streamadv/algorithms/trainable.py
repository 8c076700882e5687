"""The trainable tokens of a batch: what algorithms count, observations, prompts and padding left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .segments import segment_sum, spread

if TYPE_CHECKING:
    from .packed import PackedBatch


class Trainable(NamedTuple):
    """Which tokens count, in rows laid end to end."""

    mask: Tensor  # [N] bool
    offsets: Tensor  # [R + 1] int64: row r holds tokens offsets[r] : offsets[r + 1]
    counts: Tensor  # [R] int64: trainable tokens of each row

    def only(self, values: Tensor) -> Tensor:
        """[N]: `values` at the tokens that count, 0 elsewhere whatever stands there."""
        if not kernels.on_cpu(values):
            return torch.where(self.mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
        given = kernels.array(values)
        kept = np.empty_like(given)
        kernels.keep(given, kernels.array(self.mask), kept)
        return torch.from_numpy(kept)

    def spread_rows(self, values: Tensor) -> Tensor:
        """[N] float32: `values` [R] at their row's tokens that count, 0 elsewhere."""
        if not kernels.on_cpu(values):
            return self.only(spread(values.to(torch.float32), self.offsets, len(self.mask)))
        found = torch.empty(len(self.mask))
        kernels.spread_rows(*map(kernels.array, (values, self.mask, self.offsets, found)))
        return found

    def row_sum(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of `values` [N] over each row's tokens that count."""
        if not kernels.on_cpu(values):
            return segment_sum(self.only(values), self.offsets)
        sums = torch.empty(len(self.counts), dtype=torch.float64)
        kernels.row_sum(*map(kernels.array, (values, self.mask, self.offsets, sums)))
        return sums

    def row_mean(self, values: Tensor) -> Tensor:
        """[R] float64: the mean of `values` [N] over each row's tokens that count, 0 for a row without any."""
        return self.row_sum(values) / self.counts.clamp(min=1)


def trainable(batch: PackedBatch) -> Trainable:
    """The trainable tokens of `batch`. Needs the column response_mask."""
    return trainable_tokens(batch.column("response_mask"), batch.cu_seqlens)


def trainable_tokens(mask: Tensor, cu_seqlens: Tensor) -> Trainable:
    """The tokens where `mask` [N] is not 0, in the rows given by `cu_seqlens` [R + 1]."""
    counted = as_bool(mask)
    if not kernels.on_cpu(mask):
        return Trainable(counted, cu_seqlens, segment_sum(counted, cu_seqlens).to(torch.int64))
    counts = torch.empty(len(cu_seqlens) - 1, dtype=torch.int64)
    kernels.count(*map(kernels.array, (counted, cu_seqlens, counts)))
    return Trainable(counted, cu_seqlens, counts)


def padded_tokens(mask: Tensor) -> Trainable:
    """The tokens where a padded `mask` [B, T] is not 0, its rows laid end to end with their padding."""
    rows, width = mask.shape
    return trainable_tokens(mask.reshape(-1), torch.arange(rows + 1, device=mask.device) * width)


def all_tokens(batch: PackedBatch) -> Trainable:
    """Every token of `batch` counts."""
    everything = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.device)
    return Trainable(everything, batch.cu_seqlens, batch.row_lengths)


def as_bool(mask: Tensor) -> Tensor:
    """Where `mask` is not 0; of dtype uint8, which holds 0 and 1 only, a view."""
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype == torch.uint8:
        return mask.view(torch.bool)
    if not kernels.on_cpu(mask):
        return mask != 0
    counted = torch.empty(mask.shape, dtype=torch.bool)
    kernels.nonzero(kernels.array(mask).reshape(-1), kernels.array(counted).reshape(-1))
    return counted
