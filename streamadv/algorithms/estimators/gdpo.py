"""GDPO: normalises named rewards one by one, then their sum over the batch (TRL)."""

from __future__ import annotations

import torch

from ...errors import TrajectoryError
from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..rewards import normalise


@estimator("gdpo", scope="batch")
def gdpo(batch: PackedBatch, *, weights: dict[str, float] | None = None, epsilon: float = 1e-4) -> Estimate:
    """A_i = z(sum_k w_k * z_k), z_k = (r_k - mean(group)) / (std(group) + epsilon), outer z the same over the batch.

    Unlike GRPO on the sum, a reward with little spread in a group counts as much as the others. std has ddof 1; a group
    of equal rewards gives 0.

    Args:
      batch: with named rewards (`components`).
      weights: name -> w_k; None = 1 for all.

    Returns:
      One value per row [R] float64. Raises TrajectoryError for a name that the trajectories lack.
    """
    counted = (~batch.baseline).double()
    total = torch.zeros_like(batch.rewards)
    for name, weight in (weights or dict.fromkeys(batch.components, 1.0)).items():
        if name not in batch.components:
            present = ", ".join(batch.components) or "none"
            raise TrajectoryError(f"gdpo weights name {name!r}, the trajectories have {present}")
        total = total + weight * normalise(
            batch.components[name],
            batch.group_offsets,
            mean="group",
            std="group",
            epsilon=epsilon,
            weight=counted,
        )
    advantages = normalise(
        total, batch.group_offsets, mean="batch", std="batch", epsilon=epsilon, weight=counted
    )
    return Estimate("row", advantages[batch.row_trajectory])
