"""ReMax: the reward of a greedy rollout as baseline (Li et al., arXiv:2310.10505)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch, expand
from ..registry import Estimate, estimator
from ..scan import reverse_scan
from ..segments import moments


@estimator("remax", scope="group")
def remax(batch: PackedBatch) -> Estimate:
    """A_i = r_i - b_g, b_g = mean reward of the group's baseline members (role "baseline").

    A group without a baseline member gives 0. The return is the reward. One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, batch.baseline)
    advantages = torch.where(stats.size > 0, stats.centred, 0.0)
    return Estimate("row", advantages[batch.row_trajectory], batch.rewards[batch.row_trajectory])


@estimator("remax_to_go", scope="group", level="token", needs=("response_mask", "token_level_rewards"))
def remax_to_go(batch: PackedBatch) -> Estimate:
    """A_t = G_t - b_g, G_t = R_t + G_{t+1}: a KL in the rewards counts for the tokens up to it (verl).

    Without a KL the same numbers as `remax`. [N] in the dtype of the rewards.
    """
    returns = reverse_scan(batch.column("token_level_rewards"), 1.0, batch.trainable_tokens)
    stats = moments(batch.rewards, batch.group_offsets, batch.baseline)
    baseline = (batch.rewards - stats.centred)[batch.row_trajectory]
    has_none = (stats.size == 0)[batch.row_trajectory]
    advantages = returns - expand(batch, "row", baseline)
    return Estimate("token", advantages.masked_fill(expand(batch, "row", has_none) != 0, 0), returns)
