"""REINFORCE: the discounted return from a token on (Williams 1992)."""

from __future__ import annotations

from ..packed import PackedBatch
from ..registry import Estimate, Share, estimator
from ..scan import reverse_scan


@estimator("reinforce", scope="row", level="token", needs=("response_mask", "token_level_rewards"))
def reinforce(batch: PackedBatch, *, gamma: Share = 1.0, mask_aware: bool = True) -> Estimate:
    """G_t = R_t + gamma * G_{t+1}; A_t = G_t.

    Args:
      batch: with response_mask and token_level_rewards [N].
      mask_aware: time advances on trainable tokens only, so observations between two turns do not discount. False
        advances on every token (ROLL).

    Returns:
      [N] in the dtype of the rewards.
    """
    tokens = batch.trainable_tokens if mask_aware else batch.all_tokens
    return Estimate("token", reverse_scan(batch.column("token_level_rewards"), gamma, tokens))
