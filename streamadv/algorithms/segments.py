"""Sums and moments over contiguous segments, in float64.

A segment is summed element by element, in order. So its result depends on its elements alone, and neither on the rest
of the batch nor on the number of threads. `values` [K]; `offsets` [G + 1] int64: the range of a segment, also an empty
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """[G] float64: sum of `values` [K] over a segment, 0 for an empty one."""
    if not kernels.on_cpu(values):
        values = values.to(torch.float64)
        return torch.segment_reduce(values, "sum", offsets=offsets, initial=0, unsafe=True)
    sums = torch.empty(len(offsets) - 1, dtype=torch.float64)
    kernels.segment_sum(*map(kernels.as_array, (values, offsets, sums)))
    return sums


def segment_min(values: Tensor, offsets: Tensor) -> Tensor:
    """[G] float64: least value of a segment, inf for an empty one."""
    values = values.to(torch.float64)
    return torch.segment_reduce(values, "min", offsets=offsets, initial=torch.inf, unsafe=True)


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    """[G] float64: greatest value of a segment, -inf for an empty one."""
    values = values.to(torch.float64)
    return torch.segment_reduce(values, "max", offsets=offsets, initial=-torch.inf, unsafe=True)


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
    if not kernels.on_cpu(values):
        return _moments_on_device(values, offsets, weight)
    results = torch.empty((4, len(values)), dtype=torch.float64)
    kernels.moments(*map(kernels.as_array, (values, weight, offsets, results)))
    return Moments(*results.unbind())


def _moments_on_device(values: Tensor, offsets: Tensor, weight: Tensor) -> Moments:
    def spread_sum(values: Tensor) -> Tensor:
        return spread(
            segment_sum(torch.where(weight > 0, values * weight, 0.0), offsets), offsets, len(values)
        )

    total = spread_sum(torch.ones_like(values))
    least = spread(segment_min(torch.where(weight > 0, values, torch.inf), offsets), offsets, len(values))
    least = torch.where(total > 0, least, 0.0)
    mean_above = spread_sum(values - least) / total.clamp(min=1)
    centred = values - least - mean_above
    std = (spread_sum(centred.square()) / (total - 1).clamp(min=1)).sqrt()
    return Moments(total, least + mean_above, std, centred)
