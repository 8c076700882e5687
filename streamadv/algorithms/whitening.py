"""Whitening over the trainable tokens of a batch: (x - mean) / sqrt(var + 1e-8), var with ddof 1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ..extras import torch
from . import kernels
from .segments import moments, segment_min, segment_sum, whole
from .trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor

EPSILON: Final = 1e-8


class Summary(NamedTuple):
    """Of the values that count, on the host."""

    size: int
    mean: float
    squares: float  # sum of squared distances from the mean
    greatest: float  # -inf if nothing counts
    least: float  # inf if nothing counts
    is_stray: bool = False  # a value that does not count is not 0

    @property
    def scale(self) -> float:
        """What whitening multiplies distances from the mean by."""
        return 1 / math.sqrt(self.squares / (self.size - 1) + EPSILON) if self.size > 1 else 1.0

    def whitened(self) -> Summary:
        """Of the float32 values that `whiten` makes of these."""
        if self.size < 2:
            return self
        greatest, least = (
            float(np.float32((end - self.mean) * self.scale)) for end in (self.greatest, self.least)
        )
        return Summary(self.size, 0.0, self.squares * self.scale**2, greatest, least)


def summarise(values: Tensor, counted: Tensor) -> Summary | None:
    """Of `values` [K] where `counted` [K] is set; None on a device, and if `counted` is not bool."""
    if counted.dtype != torch.bool or not kernels.on_cpu(values):
        return None
    return Summary(*kernels.statistics(*map(kernels.as_array, (values, counted))))


def whiten(
    values: Tensor,
    tokens: Trainable,
    shift_mean: bool = True,
    everywhere: bool = False,
    summary: Summary | None = None,
) -> Tensor:
    """`values` at mean 0 and variance 1 over the tokens that count.

    Args:
      values: [N].
      tokens: which tokens count.
      shift_mean: False adds the mean back.
      everywhere: transform the other tokens too; otherwise they are 0.
      summary: of `values`, if it is known.

    Returns:
      [N], the dtype of `values`, from sums in float64. Equal values give exactly 0. With fewer than two tokens that
      count the values are unchanged, as in ROLL; verl raises.
    """
    summary = summary or summarise(values, tokens.mask)
    if summary is None:
        return _whiten_on_device(values, tokens, shift_mean, everywhere)
    array, mask = map(kernels.as_array, (values, tokens.mask))
    centre = summary.mean if summary.size > 1 else 0.0
    offset = 0.0 if shift_mean else centre
    whitened = np.empty_like(array)
    if everywhere:
        kernels.rescale(array, centre, summary.scale, offset, whitened)
    else:
        kernels.rescale_masked(array, mask, centre, summary.scale, offset, whitened)
    return torch.from_numpy(whitened)


def whiten_weighted(values: Tensor, weight: Tensor) -> Tensor:
    """[K] float64: `whiten` of `values` [K] that count `weight` [K] times; elements of weight 0 are transformed too."""
    values = values.to(torch.float64)
    stats = moments(values, whole(values), weight)
    scaled = stats.centred * torch.rsqrt(stats.std.square() + EPSILON)
    return torch.where(stats.size > 1, scaled, values)


def _whiten_on_device(values: Tensor, tokens: Trainable, shift_mean: bool, everywhere: bool) -> Tensor:
    precise = values.to(torch.float64)
    total = _sum(tokens.counts, whole(tokens.counts))
    # Measured from the least value, equal values differ by exactly 0.
    least = segment_min(torch.where(tokens.mask, precise, torch.inf), whole(precise))[0]
    least = torch.where(total > 0, least, 0.0)
    above = precise - least
    mean_above = _sum(tokens.only(above), tokens.offsets) / total.clamp(min=1)
    centred = above - mean_above
    squares = _sum(tokens.only(centred.square()), tokens.offsets)
    scaled = centred * torch.rsqrt(squares / (total - 1).clamp(min=1) + EPSILON)
    if not shift_mean:
        scaled = scaled + (least + mean_above)
    scaled = torch.where(total > 1, scaled, precise)
    return (scaled if everywhere else tokens.only(scaled)).to(values.dtype)


def _sum(values: Tensor, offsets: Tensor) -> Tensor:
    """0-d float64: the sum of all `values`, segment by segment."""
    partial = segment_sum(values, offsets)
    return segment_sum(partial, whole(partial))[0]
