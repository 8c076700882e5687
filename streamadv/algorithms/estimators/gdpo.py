"""GDPO: normalises named rewards one by one, then their sum over the batch (arXiv:2601.05242)."""

from __future__ import annotations

from typing import Literal

from ...errors import TrajectoryError
from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, NotNegative, estimator
from ..rewards import normalise
from ..segments import segment_sum
from ..whitening import whiten_weighted
from .singleton import Singleton, settle_singletons


@estimator("gdpo", scope="batch")
def gdpo(
    batch: PackedBatch,
    *,
    weights: dict[str, float] | None = None,
    epsilon: NotNegative = 1e-4,
    norm_by_std: bool = True,
    singleton: Singleton = "zero",
    whiten_over: Literal["trajectories", "tokens"] = "trajectories",
) -> Estimate:
    """A_i = z(sum_k w_k * z_k), z_k = (r_k - mean(group)) / (std(group) + epsilon), outer z the same over the batch.

    Unlike GRPO on the sum, a reward with little spread in a group counts as much as the others. std has ddof 1; a group
    of equal rewards gives 0.

    Args:
      batch: with named rewards (`components`).
      weights: name -> w_k; None = 1 for all.
      norm_by_std: False leaves out std(group).
      singleton: z_k in a group of one: "zero", or "raw": r_k, over 1 + epsilon if norm_by_std, as verl.
      whiten_over: what counts once in the outer z: trajectories (TRL), or trainable tokens, so that long rows weigh
        more; then its variance has 1e-8 added under the root instead of epsilon to the std (verl).

    Returns:
      One value per row [R] float64. Raises TrajectoryError for a name that the trajectories lack.
    """
    counted = (~batch.baseline).double()
    size = segment_sum(counted, batch.group_offsets)[batch.trajectory_group]
    divisor_alone = 1 + epsilon if norm_by_std else 1.0
    total = torch.zeros_like(batch.rewards)
    for name, weight in (weights or dict.fromkeys(batch.components, 1.0)).items():
        if name not in batch.components:
            present = ", ".join(batch.components) or "none"
            raise TrajectoryError(f"gdpo weights name {name!r}, the trajectories have {present}")
        rewards = batch.components[name]
        scaled = normalise(
            rewards,
            batch.group_offsets,
            mean="group",
            std="group" if norm_by_std else None,
            epsilon=epsilon,
            weight=counted,
        )
        total = total + weight * settle_singletons(size, scaled, rewards / divisor_alone, singleton)
    if whiten_over == "tokens":
        rows_counted = torch.where(batch.baseline[batch.row_trajectory], 0, batch.row_trainable)
        return Estimate("row", whiten_weighted(total[batch.row_trajectory], rows_counted))
    advantages = normalise(
        total, batch.group_offsets, mean="batch", std="batch", epsilon=epsilon, weight=counted
    )
    return Estimate("row", advantages[batch.row_trajectory])
