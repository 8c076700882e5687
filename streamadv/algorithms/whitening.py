"""Whitening over the trainable tokens of a batch: (x - mean) / sqrt(var + 1e-8), var with ddof 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ..extras import torch
from . import kernels
from .segments import Trainable, moments, whole

if TYPE_CHECKING:
    from torch import Tensor

EPSILON: Final = 1e-8


class Summary(NamedTuple):
    """Of the values that count, each a 0-d float64 tensor."""

    size: Tensor  # how many count (sum of weights)
    mean: Tensor
    squares: Tensor  # sum of squared distances from the mean
    greatest: Tensor  # -inf if nothing counts
    least: Tensor  # inf if nothing counts

    @property
    def scale(self) -> Tensor:
        """What whitening multiplies distances from the mean by."""
        scale = 1 / (self.squares / (self.size - 1).clamp(min=1) + EPSILON).sqrt()
        return torch.where(self.size > 1, scale, 1.0)

    @property
    def centre(self) -> Tensor:
        """What whitening measures distances from: 0 if it leaves the values as they are."""
        return torch.where(self.size > 1, self.mean, 0.0)

    def whitened(self) -> Summary:
        """Of the float32 values that `whiten` makes of these."""
        ends = ((end - self.centre) * self.scale for end in (self.greatest, self.least))
        greatest, least = (end.to(torch.float32).to(torch.float64) for end in ends)
        return Summary(self.size, self.mean - self.centre, self.squares * self.scale**2, greatest, least)


def summarise(values: Tensor, weight: Tensor) -> Summary:
    """Of `values` [K] that count `weight` [K] times (0 = not at all, whatever the value)."""
    if weight.dtype == torch.bool and kernels.on_cpu(values):
        found = kernels.statistics(*map(kernels.as_array, (values, weight)))
        return Summary(*torch.tensor(found, dtype=torch.float64).unbind())
    counts, values, weight = weight > 0, values.to(torch.float64), weight.to(torch.float64)
    size = torch.where(counts, weight, 0.0).sum()
    least, greatest = size + torch.inf, size - torch.inf
    if len(values):
        least = torch.where(counts, values, torch.inf).amin()
        greatest = torch.where(counts, values, -torch.inf).amax()
    # Measured from the least value, equal values differ by exactly 0.
    origin = torch.where(size > 0, least, 0.0)
    above = torch.where(counts, values - origin, 0.0)
    mean_above = (above * weight).sum() / size.clamp(min=1)
    squares = torch.where(counts, (above - mean_above).square() * weight, 0.0).sum()
    return Summary(size, origin + mean_above, squares, greatest, least)


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
    if shift_mean and not everywhere and kernels.on_cpu(values) and values.dtype == torch.float32:
        result = torch.empty_like(values, memory_format=torch.contiguous_format)
        arrays = map(kernels.as_array, (values, tokens.mask))
        kernels.rescale(*arrays, summary.centre.item(), summary.scale.item(), result.numpy())
        return result
    scaled = (values.to(torch.float64) - summary.centre).mul_(summary.scale)
    scaled = (scaled if shift_mean else scaled.add_(summary.centre)).to(values.dtype)
    return scaled if everywhere else tokens.only(scaled)


def whiten_weighted(values: Tensor, weight: Tensor) -> Tensor:
    """[K] float64: `whiten` of `values` [K] that count `weight` [K] times; elements of weight 0 are transformed too."""
    values = values.to(torch.float64)
    stats = moments(values, whole(values), weight)
    scaled = stats.centred * torch.rsqrt(stats.std.square() + EPSILON)
    return torch.where(stats.size > 1, scaled, values)
