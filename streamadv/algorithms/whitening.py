"""Whitening over everything trainable in the batch: (x - mean) / sqrt(var + 1e-8), var with ddof 1."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .segments import segment_sum, whole

EPSILON: Final = 1e-8


def whiten(values: Tensor, offsets: Tensor, weight: Tensor | None = None, shift_mean: bool = True) -> Tensor:
    """[K] float64: `values` [K] at mean 0 and variance 1 over elements that count `weight` [K] times each.

    weight None: once each. Sums run per segment (`offsets` [R + 1], e.g. rows) and then over the segments,
    so they do not depend on threads. Elements of weight 0 are transformed like the others. With fewer than
    two elements the values come back unchanged (as in ROLL; verl raises); equal values give exactly 0.
    shift_mean False adds the mean back.
    """
    if weight is None:
        return _whiten_all(values, offsets, shift_mean)
    values = values.to(torch.float64)
    counts = weight > 0
    total = _sum(weight.to(torch.float64), offsets)
    if not len(values):
        return values
    above = values - torch.where(total > 0, torch.where(counts, values, torch.inf).amin(), 0.0)
    mean_above = _sum(torch.where(counts, above * weight, 0.0), offsets) / total.clamp(min=1)
    centred = above - mean_above
    squares = _sum(torch.where(counts, centred.square() * weight, 0.0), offsets)
    scaled = centred * torch.rsqrt(squares / (total - 1).clamp(min=1) + EPSILON)
    if not shift_mean:
        scaled = scaled + (values - centred)  # the mean
    return torch.where(total > 1, scaled, values)


def _whiten_all(values: Tensor, offsets: Tensor, shift_mean: bool) -> Tensor:
    """Every element counts once: in one buffer, for these are the long ones."""
    scaled = values.to(torch.float64, copy=True)
    total = len(scaled)
    if total < 2:
        return scaled
    least = scaled.amin()
    scaled -= least
    mean_above = _sum(scaled, offsets) / total
    scaled -= mean_above
    scaled *= torch.rsqrt(_sum(scaled.square(), offsets) / (total - 1) + EPSILON)
    return scaled if shift_mean else scaled.add_(least + mean_above)


def _sum(values: Tensor, offsets: Tensor) -> Tensor:
    """0-d float64: the sum of all values, segment by segment."""
    partial = segment_sum(values, offsets)
    return segment_sum(partial, whole(partial))[0]
