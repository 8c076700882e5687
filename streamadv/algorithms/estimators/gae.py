"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import reverse_scan, upcoming
from ..trainable import Trainable


@estimator("gae", scope="row", level="token", needs=("response_mask", "values", "token_level_rewards"))
def gae(batch: PackedBatch, *, gamma: float = 1.0, lam: float = 0.95, mask_aware: bool = True) -> Estimate:
    """delta_t = R_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; returns A + V.

    The value after a row's last token is 0. mask_aware: t runs over trainable tokens only (verl, AReaL).
    False lets t run over all tokens, so the last action bootstraps from an observation's or padding token's
    value (ROLL, SkyRL, slime).
    """
    tokens = batch.trainable_tokens if mask_aware else batch.all_tokens
    rewards, values = batch.column("token_level_rewards"), batch.column("values")
    return Estimate("token", *gae_scan(rewards, values, tokens, gamma, lam))


def gae_scan(
    rewards: Tensor, values: Tensor, tokens: Trainable, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [N] float32: GAE over the tokens that count, 0 elsewhere; rewards and values [N]."""
    if kernels.on_cpu(values):
        advantages, returns = (np.empty(len(values), np.float32) for _ in range(2))
        given = map(kernels.as_array, (rewards, values, tokens.mask, tokens.offsets))
        kernels.gae(*given, float(gamma), float(lam), advantages, returns)
        return torch.from_numpy(advantages), torch.from_numpy(returns)
    known = values.to(torch.float64)
    delta = rewards + gamma * upcoming(known, tokens) - known
    found = reverse_scan(delta, gamma * lam, tokens)
    return found.to(torch.float32), tokens.only(found + known).to(torch.float32)
