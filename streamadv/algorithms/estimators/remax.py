"""ReMax: the reward of a greedy rollout as baseline (Li et al., arXiv:2310.10505)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments, spread


@estimator("remax", scope="group")
def remax(batch: PackedBatch) -> Estimate:
    """A_i = r_i - b_g, b_g = mean reward of the group's baseline members (role "baseline").

    A group without a baseline member gives 0. The return is the reward. One value per row [R] float64.
    """
    offsets = batch.group_offsets
    stats = moments(batch.rewards, offsets, batch.baseline)
    has_baseline = spread(stats.size, offsets, len(batch.rewards)) > 0
    advantages = torch.where(has_baseline, stats.centred, 0.0)
    return Estimate("row", advantages[batch.row_trajectory], batch.rewards[batch.row_trajectory])
