"""ReMax: the reward of a greedy rollout as baseline (Li et al., arXiv:2310.10505)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments


@estimator("remax", scope="group")
def remax(batch: PackedBatch) -> Estimate:
    """A_i = r_i - b_g, b_g = mean reward of the group's baseline members (role "baseline").

    A group without a baseline member gives 0. The return is the reward. One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, batch.baseline)
    advantages = torch.where(stats.size > 0, stats.centred, 0.0)
    return Estimate("row", advantages[batch.row_trajectory], batch.rewards[batch.row_trajectory])
