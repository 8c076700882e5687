"""Which tokens an algorithm counts: the trainable ones of a batch, or all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
        """[N]: `values` at the tokens that count, 0 elsewhere."""
        return torch.where(self.mask, values, torch.zeros((), dtype=values.dtype, device=values.device))

    def spread(self, values: Tensor) -> Tensor:
        """[N] float32: a row's value of `values` [R] at its tokens that count, 0 elsewhere."""
        if kernels.on_cpu(values):
            result = torch.empty(len(self.mask))
            arrays = map(kernels.as_array, (values, self.mask, self.offsets))
            kernels.spread(*arrays, result.numpy())
            return result
        on_tokens = spread(values, self.offsets, len(self.mask))
        return torch.where(self.mask, on_tokens, torch.zeros((), device=values.device))

    def row_sum(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of `values` [N] over the tokens of a row that count."""
        return segment_sum(self.only(values), self.offsets)

    def row_mean(self, values: Tensor) -> Tensor:
        """[R] float64: the mean of `values` [N] over the tokens of a row that count; 0 for a row without any."""
        return self.row_sum(values) / self.counts.clamp(min=1)


def tokens_where(mask: Tensor, offsets: Tensor) -> Trainable:
    """The tokens where `mask` [N] is not 0, in rows at `offsets` [R + 1]."""
    return Trainable(as_bool(mask), offsets)


def as_bool(mask: Tensor) -> Tensor:
    """Where `mask` is not 0; a view for uint8, because masks of that dtype hold only 0 and 1."""
    return mask.view(torch.bool) if mask.dtype == torch.uint8 else mask.to(torch.bool)
