"""Which tokens an algorithm counts: the trainable ones of a batch, or all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..extras import torch
from . import kernels
from .segments import segment_sum, spread

if TYPE_CHECKING:
    from torch import Tensor


class Trainable(NamedTuple):
    """Which tokens count, in rows laid end to end. Observations, prompts and padding normally do not."""

    mask: Tensor  # [N] bool
    offsets: Tensor  # [R + 1] int64: row r holds tokens offsets[r] : offsets[r + 1]

    @property
    def counts(self) -> Tensor:
        """[R] int64: tokens of each row that count."""
        if not kernels.on_cpu(self.mask):
            return segment_sum(self.mask, self.offsets).to(torch.int64)
        counts = torch.empty(len(self.offsets) - 1, dtype=torch.int64)
        kernels.count(*map(kernels.as_array, (self.mask, self.offsets, counts)))
        return counts

    def only(self, values: Tensor) -> Tensor:
        """[N]: `values` at the tokens that count, 0 elsewhere. Returns `values` itself if nothing changes."""
        if not kernels.on_cpu(values):
            return torch.where(self.mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
        array, mask = kernels.as_array(values), kernels.as_array(self.mask)
        if not kernels.has_values_outside(array, mask):
            return values
        masked = np.empty_like(array)
        kernels.copy_masked(array, mask, masked)
        return torch.from_numpy(masked)

    def row_sum(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of `values` [N] over the tokens of a row that count."""
        if not kernels.on_cpu(values):
            return segment_sum(self.only(values), self.offsets)
        sums = torch.empty(len(self.offsets) - 1, dtype=torch.float64)
        kernels.row_sum(*map(kernels.as_array, (values, self.mask, self.offsets, sums)))
        return sums

    def row_mean(self, values: Tensor) -> Tensor:
        """[R] float64: the mean of `values` [N] over the tokens of a row that count; 0 for a row without any."""
        return self.row_sum(values) / self.counts.clamp(min=1)


def tokens_where(mask: Tensor, offsets: Tensor) -> Trainable:
    """The tokens where `mask` [N] is not 0, in rows at `offsets` [R + 1]."""
    return Trainable(as_bool(mask), offsets)


def spread_rows(
    values: Tensor, mask: Tensor, offsets: Tensor, out: Tensor | None = None
) -> tuple[Tensor, bool]:
    """([N] float32: `values` [R] at their row's tokens where `mask` [N] is not 0, else 0; whether it is all 0 and 1).

    One pass; on a device the mask is not checked. out: memory for the result, used on a CPU.
    """
    if not kernels.on_cpu(values):
        return torch.where(mask != 0, spread(values.to(torch.float32), offsets, len(mask)), 0.0), True
    column = torch.empty(len(mask), dtype=torch.float32) if out is None else out
    return column, kernels.spread_rows(*map(kernels.as_array, (values, mask, offsets, column)))


def as_bool(mask: Tensor) -> Tensor:
    """Where `mask` is not 0; a view for uint8, because masks of that dtype hold only 0 and 1."""
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype == torch.uint8:
        return mask.view(torch.bool)
    if not kernels.on_cpu(mask):
        return mask != 0
    nonzero = torch.empty(mask.shape, dtype=torch.bool)
    kernels.nonzero(kernels.as_array(mask).reshape(-1), kernels.as_array(nonzero).reshape(-1))
    return nonzero
