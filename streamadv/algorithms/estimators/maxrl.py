"""MaxRL: centred rewards over the mean reward, so that rarely solved prompts weigh more (prime-rl, SkyRL)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, NotNegative, estimator
from ..segments import moments
from .singleton import Singleton, settle_singletons


@estimator("maxrl", scope="group")
def maxrl(
    batch: PackedBatch,
    *,
    epsilon: NotNegative = 0.0,
    negative_means: bool = False,
    singleton: Singleton = "zero",
) -> Estimate:
    """A_i = (r_i - mean(r_g)) / (mean(r_g) + epsilon); 0 where the mean is not positive (prime-rl).

    Args:
      negative_means: divide by negative means too, which reverses signs (SkyRL).
      singleton: the advantage in a group of one: "zero", or "raw": its reward.

    Returns:
      One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    defined = (stats.mean + epsilon != 0) if negative_means else stats.mean > 0
    advantages = torch.where(defined & (stats.centred != 0), stats.centred / (stats.mean + epsilon), 0.0)
    advantages = settle_singletons(stats.size, advantages, batch.rewards, singleton)
    return Estimate("row", advantages[batch.row_trajectory])
