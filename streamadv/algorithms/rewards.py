"""Response-level rewards: normalisation with mean and std chosen separately, then clipping."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .segments import moments, spread, whole

NormScope = Literal["batch", "group"]


def normalise(
    values: Tensor,
    group_offsets: Tensor,
    *,
    mean: NormScope | None,
    std: NormScope | None,
    epsilon: float = 1e-6,
    std_floor: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """(x - mean) / (std + epsilon), each taken over the group or the whole batch, [K] float64.

    values [K] in contiguous groups given by `group_offsets` [G + 1]; std has ddof 1, epsilon stands outside
    the root. `weight` [K] says how often an element counts in the statistics (0: not at all). Where std is
    not above `std_floor`, as with one element or equal ones, the result is exactly 0 (ROLL's reward_norm
    gives NaN, or rounding noise divided by epsilon).
    """
    values = values.to(torch.float64)
    offsets = {"batch": whole(values), "group": group_offsets}
    result = values
    if mean is not None:
        result = moments(values, offsets[mean], weight).centred
    if std is not None:
        divisor = spread(moments(values, offsets[std], weight).std, offsets[std], len(values))
        result = torch.where(divisor > std_floor, result / (divisor + epsilon), 0.0)
    return result


def clip(values: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`values` [K] held in -limit .. limit, and which of them were outside ([K] bool)."""
    return values.clamp(-limit, limit), values.abs() > limit
