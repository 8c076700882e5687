"""GRPO: a rollout's reward against its siblings' (DeepSeekMath, arXiv:2402.03300, eq. 3)."""

from __future__ import annotations

import torch

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments, spread


@estimator("grpo", scope="group")
def grpo(batch: PackedBatch, *, norm_by_std: bool = True, epsilon: float = 1e-6) -> Estimate:
    """A_i = (r_i - mean(r_g)) / (std(r_g) + epsilon), one number per row.

    norm_by_std False is Dr.GRPO (arXiv:2503.20783): A_i = r_i - mean(r_g). std has ddof 1. A group of one
    and a group of equal rewards give exactly 0 (verl gives a lone rollout its raw reward, ROLL NaN).
    Baseline members stay outside mean and std and get 0.
    """
    offsets = batch.group_offsets
    stats = moments(batch.rewards, offsets, ~batch.baseline)
    advantages = stats.centred
    if norm_by_std:
        advantages = advantages / (spread(stats.std, offsets, len(advantages)) + epsilon)
    alone = spread(stats.count, offsets, len(advantages)) < 2
    advantages = torch.where(alone | batch.baseline, torch.zeros_like(advantages), advantages)
    return Estimate("row", advantages[batch.row_trajectory])
