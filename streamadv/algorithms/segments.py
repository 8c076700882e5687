"""Sums and moments over contiguous segments, in float64.

A segment is summed member by member in order, so its result depends on its own members alone: not on what
else is in the batch, nor on the number of threads. Values of K elements; `offsets` [G + 1] int64 gives each
segment its range, empty ones allowed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Per-segment statistics and, per element, the distance from its segment's mean."""

    count: Tensor  # [G] float64: elements that count
    mean: Tensor  # [G] float64, 0 for an empty segment
    std: Tensor  # [G] float64, ddof 1; 0 below two elements
    centred: Tensor  # [K] float64: value - mean, exactly 0 where all counted values are equal


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """[G] float64: sum of `values` [K] over each segment, 0 for an empty one."""
    return torch.segment_reduce(values.to(torch.float64), "sum", offsets=offsets, initial=0, unsafe=True)


def segment_min(values: Tensor, offsets: Tensor) -> Tensor:
    """[G] float64: least value of each segment, inf for an empty one."""
    return torch.segment_reduce(
        values.to(torch.float64), "min", offsets=offsets, initial=torch.inf, unsafe=True
    )


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    """[G] float64: greatest value of each segment, -inf for an empty one."""
    return -segment_min(-values, offsets)


def spread(values: Tensor, offsets: Tensor, size: int) -> Tensor:
    """[size]: each segment's value repeated over its elements."""
    lengths = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(values, lengths, output_size=size)


def moments(values: Tensor, offsets: Tensor, counted: Tensor | None = None) -> Moments:
    """Count, mean, standard deviation (ddof 1) and centred values over each segment.

    `counted` [K] bool leaves elements out of the statistics; they are centred all the same.
    """
    values = values.to(torch.float64)
    size = len(values)
    weight = torch.ones_like(values) if counted is None else counted.to(torch.float64)
    count = segment_sum(weight, offsets)
    # Measured from the least value, equal values differ by exactly 0 and a large common offset cancels.
    least = segment_min(values if counted is None else values.masked_fill(~counted, torch.inf), offsets)
    least = torch.where(count > 0, least, torch.zeros_like(least))
    above = values - spread(least, offsets, size)
    above_counted = above if counted is None else torch.where(counted, above, torch.zeros_like(above))
    mean_above = segment_sum(above_counted, offsets) / count.clamp(min=1)
    centred = above - spread(mean_above, offsets, size)
    squares = segment_sum(centred.square() * weight, offsets)
    return Moments(count, least + mean_above, (squares / (count - 1).clamp(min=1)).sqrt(), centred)
