"""GRPO: a rollout's reward against its siblings' (DeepSeekMath, arXiv:2402.03300, eq. 3)."""

from __future__ import annotations

import torch

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..rewards import normalise


@estimator("grpo", scope="group")
def grpo(batch: PackedBatch, *, norm_by_std: bool = True, epsilon: float = 1e-6) -> Estimate:
    """A_i = (r_i - mean(r_g)) / (std(r_g) + epsilon), one number per row.

    norm_by_std False is Dr.GRPO (arXiv:2503.20783): A_i = r_i - mean(r_g). std has ddof 1. A group of one
    and a group of equal rewards give exactly 0 (verl gives a lone rollout its raw reward, ROLL NaN).
    Baseline members stay outside mean and std.
    """
    advantages = normalise(
        batch.rewards,
        batch.group_offsets,
        mean="group",
        std="group" if norm_by_std else None,
        epsilon=epsilon,
        weight=(~batch.baseline).to(torch.float64),
    )
    return Estimate("row", advantages[batch.row_trajectory])
