"""GRPO: a rollout's reward against its siblings' (DeepSeekMath, arXiv:2402.03300, eq. 3)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, NotNegative, estimator
from ..segments import moments
from .singleton import Singleton, settle_singletons


@estimator("grpo", scope="group")
def grpo(
    batch: PackedBatch,
    *,
    norm_by_std: bool = True,
    epsilon: NotNegative = 1e-6,
    least_std: NotNegative = 0.0,
    singleton: Singleton = "zero",
) -> Estimate:
    """A_i = (r_i - mean(r_g)) / (std(r_g) + epsilon), std with ddof 1.

    Equal rewards in a group give exactly 0. Baseline members count neither in mean nor in std.

    Args:
      batch: its rewards [M], as the chain has shaped them.
      norm_by_std: False is Dr.GRPO (arXiv:2503.20783): A_i = r_i - mean(r_g).
      epsilon: added to the std, outside the root.
      least_std: lower bound of the std (verl's vectorized form: sqrt(epsilon)).
      singleton: the advantage in a group of one: "zero", or "raw": r_i, over 1 + epsilon if
        norm_by_std, as verl (ROLL: NaN).

    Returns:
      One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    advantages = stats.centred
    if norm_by_std:
        divisor = stats.std.clamp(min=least_std) + epsilon
        advantages = torch.where(advantages != 0, advantages / divisor, 0.0)
    divisor_alone = 1 + epsilon if norm_by_std else 1.0
    advantages = settle_singletons(stats.size, advantages, batch.rewards / divisor_alone, singleton)
    return Estimate("row", advantages[batch.row_trajectory])
