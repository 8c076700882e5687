"""Sums and moments over contiguous segments, in float64, and values normalised by them; tokens that count, whitened.

A segment is summed element by element, in order. So its result depends on its elements alone, and neither on the rest
of the batch nor on the number of threads. `values` [K]; `offsets` [G + 1] int64: the range of a segment, also an empty
one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from ..errors import ArgumentError, SettingError
from ..extras import torch
from . import kernels

if TYPE_CHECKING:
    from torch import Tensor


class Moments(NamedTuple):
    """For each element the statistics of its segment, and its distance from the segment's mean; [K] float64."""

    size: Tensor  # elements that count (sum of weights)
    mean: Tensor  # 0 if none counts
    std: Tensor  # ddof 1; 0 below two elements
    centred: Tensor  # value - mean, exactly 0 where all counted values are equal


def _reduced(how: str, initial: float, values: Tensor, offsets: Tensor) -> Tensor:
    """[G] float64: the `values` [K] of a segment as one; `initial` for an empty one."""
    values = values.to(torch.float64)
    return torch.segment_reduce(values, how, offsets=offsets, initial=initial, unsafe=True)


segment_sum = partial(_reduced, "sum", 0)
segment_min = partial(_reduced, "min", math.inf)
segment_max = partial(_reduced, "max", -math.inf)


def keyed_sum(values: Tensor, keys: Tensor, size: int) -> Tensor:
    """[size] float64: sum of the `values` [K] of a key 0 .. size - 1 ([K] int64), added in order."""
    values = values.to(torch.float64)
    if kernels.on_cpu(values):
        return values.new_zeros(size).index_add_(0, keys, values)
    order = torch.argsort(keys, stable=True)  # index_add_ on a device adds in no fixed order
    offsets = torch.searchsorted(keys[order], torch.arange(size + 1, device=keys.device))
    return segment_sum(values[order], offsets)


def spread(values: Tensor, offsets: Tensor, size: int) -> Tensor:
    """[size]: a segment's value repeated over its elements."""
    lengths = offsets[1:] - offsets[:-1]
    if kernels.on_cpu(values):  # several times faster than repeat_interleave
        return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))
    return torch.repeat_interleave(values, lengths, output_size=size)


def whole(values: Tensor) -> Tensor:
    """[2] int64: the offsets of one segment that holds all `values`."""
    return torch.arange(2, device=values.device) * len(values)


def moments(values: Tensor, offsets: Tensor, weight: Tensor | None = None) -> Moments:
    """Size, mean and standard deviation (ddof 1) of each element's segment, and the centred values.

    Args:
      values: [K].
      offsets: [G + 1] int64.
      weight: [K], how often an element counts; None = once. An element of weight 0 stays outside the statistics,
        whatever its value, and is centred all the same.

    Distances are taken from the least value first, so that equal values differ by exactly 0 and a large common offset
    cancels.
    """
    values = values.to(torch.float64)
    weight = torch.ones_like(values) if weight is None else weight.to(torch.float64)
    counts = weight > 0
    size = segment_sum(weight.clamp(min=0), offsets)
    least = segment_min(torch.where(counts, values, torch.inf), offsets)
    least = torch.where(size > 0, least, 0.0)
    above = values - spread(least, offsets, len(values))
    mean_above = segment_sum(torch.where(counts, above * weight, 0.0), offsets) / size.clamp(min=1)
    centred = above - spread(mean_above, offsets, len(values))
    squares = segment_sum(torch.where(counts, centred * centred * weight, 0.0), offsets)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    size, mean, std = (spread(each, offsets, len(values)) for each in (size, least + mean_above, std))
    return Moments(size, mean, std, centred)


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared deviations. Immutable: a batch record carries a snapshot.

    They are merged batch by batch (Chan, Golub, LeVeque 1979): by the trainer once, when it names the batch, so a
    redelivered batch does not count twice. Raises ArgumentError for numbers that are not finite, or a negative count
    or sum of squares.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    def __post_init__(self) -> None:
        if not (
            self.count >= 0 and self.squares >= 0 and math.isfinite(self.count + self.mean + self.squares)
        ):
            raise ArgumentError(
                f"moments count {self.count}, mean {self.mean}, squares {self.squares}: finite numbers are needed, "
                "count and squares of 0 or more"
            )

    @classmethod
    def of(cls, values: Tensor) -> RunningMoments:
        """The moments of `values` [K] alone."""
        if not len(values):
            return cls()
        stats = moments(values, whole(values))
        squares = stats.std.square() * (stats.size - 1)
        return cls(len(values), stats.mean[0].item(), squares[0].item())

    def merged(self, other: RunningMoments) -> RunningMoments:
        """The moments of both samples together."""
        if not other.count:
            return self
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        squares = self.squares + other.squares + delta**2 * self.count * other.count / count
        return RunningMoments(count, mean, squares)

    def updated(self, values: Tensor) -> RunningMoments:
        """The moments with `values` [K] added."""
        return self.merged(RunningMoments.of(values))

    @property
    def var(self) -> float:
        """Population variance; 1 while the count is 0."""
        return self.squares / self.count if self.count else 1.0

    @property
    def std(self) -> float:
        """Sample standard deviation, ddof 1; 1 while the count is 0, infinite (no scale) after one value."""
        if self.count > 1:
            return math.sqrt(self.squares / (self.count - 1))
        return math.inf if self.count else 1.0


NormScope = Literal["batch", "group", "running"]


def normalise(
    values: Tensor,
    group_offsets: Tensor,
    *,
    mean: NormScope | None,
    std: NormScope | None,
    epsilon: float = 1e-6,
    std_floor: float | None = 0.0,
    weight: Tensor | None = None,
    running: RunningMoments | None = None,
) -> Tensor:
    """(x - mean) / (std + epsilon), [K] float64; std has ddof 1, epsilon stands outside the root.

    Args:
      values: [K], in contiguous groups.
      group_offsets: [G + 1].
      mean, std: over what they are taken: the group, the batch, or all batches so far; None = not at all.
      std_floor: where std is not above it, as with one element or equal ones, the result is exactly 0. None gives NaN,
        or rounding noise divided by epsilon, as ROLL's reward_norm.
      weight: [K], how often an element counts in the statistics; None = once.
      running: for the scope "running", the moments that the caller has updated with this batch.

    Raises SettingError for the scope "running" without `running`.
    """
    values = values.to(torch.float64)
    if mean is None and std is None:
        return values
    offsets = {"batch": whole(values), "group": group_offsets}
    if running is None and "running" in (mean, std):
        raise SettingError("reward mean or std is 'running', but no running moments were given")
    result, stats = values, None
    if mean == "running" and running is not None:
        result = values - running.mean
    elif mean is not None:
        stats = moments(values, offsets[mean], weight)
        result = stats.centred
    if std is None:
        return result
    if std == "running" and running is not None:
        divisor = torch.full_like(values, running.std)
    else:
        stats = stats if stats is not None and mean == std else moments(values, offsets[std], weight)
        divisor = stats.std if std_floor is not None else torch.where(stats.size > 1, stats.std, torch.nan)
    if std_floor is None:
        return result / (divisor + epsilon)
    return torch.where(divisor > std_floor, result / (divisor + epsilon), 0.0)


class Trainable(NamedTuple):
    """Which tokens count, in rows laid end to end. Observations, prompts and padding normally do not."""

    mask: Tensor  # [N] bool
    offsets: Tensor  # [R + 1] int64: row r holds tokens offsets[r] : offsets[r + 1]

    @property
    def counts(self) -> Tensor:
        """[R] int64: tokens of each row that count."""
        return self.before[self.offsets].diff()

    @property
    def before(self) -> Tensor:
        """[N + 1] int64: how many tokens count before each one, and at last in all."""
        return torch.nn.functional.pad(self.mask, (1, 0)).cumsum(0)

    def only(self, values: Tensor) -> Tensor:
        """[N]: `values` at the tokens that count, 0 elsewhere."""
        return torch.where(self.mask, values, torch.zeros((), dtype=values.dtype, device=values.device))

    def spread(self, values: Tensor) -> Tensor:
        """[N] float32: a row's value of `values` [R] at its tokens that count, 0 elsewhere."""
        return self.only(spread(values.to(torch.float32), self.offsets, len(self.mask)))

    def row_sum(self, values: Tensor) -> Tensor:
        """[R] float64: the sum of `values` [N] over the tokens of a row that count."""
        return segment_sum(self.only(values), self.offsets)

    def row_mean(self, values: Tensor) -> Tensor:
        """[R] float64: the mean of `values` [N] over the tokens of a row that count; 0 for a row without any."""
        return self.row_sum(values) / self.counts.clamp(min=1)


def tokens_where(mask: Tensor, offsets: Tensor) -> Trainable:
    """The tokens where `mask` [N] is not 0, in rows at `offsets` [R + 1]."""
    # A view for uint8, because masks of that dtype hold only 0 and 1.
    return Trainable(mask.view(torch.bool) if mask.dtype == torch.uint8 else mask.to(torch.bool), offsets)


#: Whitening: (x - mean) / sqrt(var + EPSILON), var with ddof 1, over the trainable tokens of a batch.
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
