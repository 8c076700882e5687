"""Response-level rewards: normalisation with mean and std chosen separately, then clipping."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .segments import moments, spread

NormScope = Literal["batch", "group"]


def normalise(
    values: Tensor,
    group_offsets: Tensor,
    *,
    mean: NormScope | None,
    std: NormScope | None,
    epsilon: float = 1e-6,
    counted: Tensor | None = None,
) -> Tensor:
    """(x - mean) / (std + epsilon) over the group or the whole batch, [K] float64.

    values [K] in contiguous groups given by `group_offsets` [G + 1]; std has ddof 1, epsilon stands outside
    the root. `counted` [K] bool leaves elements out of the statistics. Where the std is taken over fewer
    than two elements or over equal ones the result is exactly 0 (ROLL: NaN, or noise divided by epsilon).
    """
    values = values.to(torch.float64)
    whole = torch.tensor([0, len(values)], device=values.device)
    offsets = {"batch": whole, "group": group_offsets}
    result = values
    if mean is not None:
        result = moments(values, offsets[mean], counted).centred
    if std is not None:
        stats = moments(values, offsets[std], counted)
        divisor = spread(stats.std, offsets[std], len(values))
        result = torch.where(divisor > 0, result / (divisor + epsilon), torch.zeros_like(result))
    return result


def clip(values: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`values` [K] held in -limit .. limit, and which of them were outside ([K] bool)."""
    return values.clamp(-limit, limit), values.abs() > limit
