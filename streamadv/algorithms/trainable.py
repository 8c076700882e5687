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

    @property
    def counts(self) -> Tensor:
        """[R] int64: tokens of each row that count."""
        return _counts(self.mask, self.offsets)

    def only(self, values: Tensor) -> Tensor:
        """[N]: `values` at the tokens that count, 0 elsewhere; themselves if it is so already."""
        if not kernels.on_cpu(values):
            return torch.where(self.mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
        given, mask = kernels.array(values), kernels.array(self.mask)
        if not kernels.is_astray(given, mask):
            return values
        kept = np.empty_like(given)
        kernels.keep(given, mask, kept)
        return torch.from_numpy(kept)

    def row_sum(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of `values` [N] over each row's tokens that count."""
        if not kernels.on_cpu(values):
            return segment_sum(self.only(values), self.offsets)
        sums = torch.empty(len(self.offsets) - 1, dtype=torch.float64)
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
    return Trainable(as_bool(mask), cu_seqlens)


def padded_tokens(mask: Tensor) -> Trainable:
    """The tokens where a padded `mask` [B, T] is not 0, its rows laid end to end with their padding."""
    return trainable_tokens(mask.reshape(-1), padded_offsets(mask))


def token_counts(mask: Tensor) -> Tensor:
    """[B] int64: how many tokens of each row of a padded `mask` [B, T] count."""
    return _counts(mask.reshape(-1), padded_offsets(mask))


def padded_offsets(mask: Tensor) -> Tensor:
    """[B + 1] int64: the rows of a padded `mask` [B, T] in its flattened form."""
    rows, width = mask.shape
    return torch.arange(rows + 1, device=mask.device) * width


def spread_rows(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[N] float32: `values` [R] at their row's tokens where `mask` [N] is not 0, 0 elsewhere."""
    if not kernels.on_cpu(values):
        spread_out = spread(values.to(torch.float32), offsets, len(mask))
        return torch.where(mask != 0, spread_out, 0.0)
    found = np.empty(len(mask), np.float32)
    kernels.spread_rows(*map(kernels.array, (values, mask, offsets)), found)
    return torch.from_numpy(found)


def all_tokens(batch: PackedBatch) -> Trainable:
    """Every token of `batch` counts."""
    everything = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.device)
    return Trainable(everything, batch.cu_seqlens)


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


def _counts(mask: Tensor, offsets: Tensor) -> Tensor:
    if not kernels.on_cpu(mask):
        return segment_sum(mask != 0, offsets).to(torch.int64)
    counts = torch.empty(len(offsets) - 1, dtype=torch.int64)
    kernels.count(*map(kernels.array, (mask, offsets, counts)))
    return counts
