"""GDPO: named rewards are normalised one by one, then summed and normalised over the batch (TRL)."""

from __future__ import annotations

import torch

from ...errors import TrajectoryError
from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..rewards import normalise


@estimator("gdpo", scope="batch")
def gdpo(batch: PackedBatch, *, weights: dict[str, float] | None = None, epsilon: float = 1e-4) -> Estimate:
    """z over the batch of sum_k w_k * z_k, z_k = (r_k - mean(group)) / (std(group) + epsilon).

    weights: by name of the trajectories' rewards; None = 1 for each. Unlike GRPO on the sum, a reward with
    little spread in a group counts as much as the others. Raises TrajectoryError for a name nobody has.
    """
    counted = (~batch.baseline).double()
    total = torch.zeros_like(batch.rewards)
    for name, weight in (weights or dict.fromkeys(batch.components, 1.0)).items():
        if name not in batch.components:
            known = ", ".join(batch.components) or "none"
            raise TrajectoryError(f"gdpo weights name {name!r}, the trajectories have {known}")
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
