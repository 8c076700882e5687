"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import blocks, next_in_row, reverse_scan


@estimator("gae", scope="row", level="token", needs=("response_mask", "values", "token_level_rewards"))
def gae(batch: PackedBatch, *, gamma: float = 1.0, lam: float = 0.95, mask_aware: bool = True) -> Estimate:
    """delta_t = R_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; returns A + V.

    The value after a row's last token is 0. mask_aware: t runs over trainable tokens only; at the others
    advantage and next value are carried through (verl, AReaL). False lets t run over all tokens, so the
    last action bootstraps from an observation's or padding token's value (ROLL, SkyRL, slime).
    """
    rewards, values, mask = (
        batch.column(name) for name in ("token_level_rewards", "values", "response_mask")
    )
    return gae_scan(rewards, values, mask if mask_aware else None, batch.cu_seqlens, gamma, lam)


def gae_scan(
    rewards: Tensor, values: Tensor, mask: Tensor | None, cu_seqlens: Tensor, gamma: float, lam: float
) -> Estimate:
    """GAE over packed rows; all tensors [N]. Outside `mask` the advantage is what the next action's is."""
    cut = blocks(cu_seqlens, len(values))
    values = values.to(torch.float64)
    if mask is None:
        delta = rewards + gamma * next_in_row(values, cu_seqlens) - values
        advantages = reverse_scan(delta, gamma * lam, cut)
    else:
        chosen = mask.bool()
        upcoming = reverse_scan(torch.where(chosen, values, 0.0), (~chosen).double(), cut)
        delta = rewards + gamma * next_in_row(upcoming, cu_seqlens) - values
        carry = torch.where(chosen, gamma * lam, torch.ones_like(values))
        advantages = reverse_scan(torch.where(chosen, delta, 0.0), carry, cut)
    return Estimate("token", advantages, advantages + values)
