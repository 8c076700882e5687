"""REINFORCE: the discounted return from each token on (Williams 1992)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import blocks, reverse_scan


@estimator("reinforce", scope="row", level="token", needs=("response_mask", "token_level_rewards"))
def reinforce(batch: PackedBatch, *, gamma: float = 1.0, mask_aware: bool = True) -> Estimate:
    """G_t = R_t + gamma * G_{t+1}; A_t = G_t.

    mask_aware: time advances on trainable tokens only, so observations between two turns do not discount.
    False counts every token, as ROLL does.
    """
    cut = blocks(batch.cu_seqlens, batch.num_tokens)
    rewards = batch.column("token_level_rewards")
    mask = batch.column("response_mask")
    discount: Tensor | float = gamma
    if mask_aware and gamma != 1.0:
        discount = torch.where(mask.bool(), gamma, torch.ones((), dtype=torch.float64, device=mask.device))
    return Estimate("token", reverse_scan(rewards, discount, cut))
