"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...extras import torch
from .. import kernels
from ..packed import PackedBatch
from ..registry import Estimate, Share, estimator
from ..scan import reverse_scan, upcoming
from ..trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor


@estimator("gae", scope="row", level="token", needs=("response_mask", "values", "token_level_rewards"))
def gae(batch: PackedBatch, *, gamma: Share = 1.0, lam: Share = 0.95, mask_aware: bool = True) -> Estimate:
    """delta_t = R_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; returns A + V.

    Args:
      batch: with response_mask, values and token_level_rewards [N].
      gamma: discount.
      lam: weight of longer returns, 0 .. 1.
      mask_aware: t runs over trainable tokens only (verl, AReaL). False lets t run over all tokens, so the last action
        bootstraps from the value of an observation or padding token (ROLL, SkyRL, slime).

    Returns:
      Advantages and returns [N] float32. The value after a row's last token is 0.
    """
    tokens = batch.trainable_tokens if mask_aware else batch.all_tokens
    rewards, values = batch.column("token_level_rewards"), batch.column("values")
    return Estimate("token", *gae_scan(rewards, values, tokens, gamma, lam))


def gae_scan(
    rewards: Tensor, values: Tensor, tokens: Trainable, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [N] float32: GAE of rewards and values [N] over the tokens that count, 0 elsewhere."""
    if kernels.on_cpu(values):
        advantages, returns = (np.empty(len(values), np.float32) for _ in range(2))
        arrays = map(kernels.as_array, (rewards, values, tokens.mask, tokens.offsets))
        kernels.gae(*arrays, float(gamma), float(lam), advantages, returns)
        return torch.from_numpy(advantages), torch.from_numpy(returns)
    v_t = values.to(torch.float64)
    delta_t = rewards + gamma * upcoming(v_t, tokens) - v_t
    a_t = reverse_scan(delta_t, gamma * lam, tokens)
    return a_t.to(torch.float32), tokens.only(a_t + v_t).to(torch.float32)
