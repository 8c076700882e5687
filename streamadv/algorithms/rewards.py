"""Response-level rewards: normalisation with separate scopes of mean and std, and clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..errors import SettingError
from ..extras import torch
from .running_moments import RunningMoments
from .segments import moments, whole

if TYPE_CHECKING:
    from torch import Tensor

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


def clip(values: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(`values` [K] held in -limit .. limit, which of them were outside [K] bool)."""
    return values.clamp(-limit, limit), values.abs() > limit
