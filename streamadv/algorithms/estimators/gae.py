"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16)."""

from __future__ import annotations

from torch import Tensor

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import Blocks, add_upcoming, blocks, over_blocks, scan
from ..trainable import trainable


@estimator("gae", scope="row", level="token", needs=("response_mask", "values", "token_level_rewards"))
def gae(batch: PackedBatch, *, gamma: float = 1.0, lam: float = 0.95, mask_aware: bool = True) -> Estimate:
    """delta_t = R_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; returns A + V.

    The value after a row's last token is 0. mask_aware: t runs over trainable tokens only (verl, AReaL).
    False lets t run over all tokens, so the last action bootstraps from an observation's or padding token's
    value (ROLL, SkyRL, slime).
    """
    cut = trainable(batch).blocks if mask_aware else blocks(batch.cu_seqlens, batch.num_tokens)
    return gae_scan(batch.column("token_level_rewards"), batch.column("values"), cut, gamma, lam)


def gae_scan(rewards: Tensor, values: Tensor, cut: Blocks, gamma: float, lam: float) -> Estimate:
    """GAE over the tokens of `cut`, one value each; rewards and values [N]."""

    def slab(part: Blocks, reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        delta = add_upcoming(reward.sub_(value), value, gamma, part)
        advantages = scan(delta, gamma * lam, part)
        return advantages, value.add_(advantages)

    advantages, returns = over_blocks(slab, [rewards, values], cut, results=2)
    return Estimate("token", advantages, returns)
