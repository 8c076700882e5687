"""REINFORCE with one time step per turn, a run of trainable tokens (ROLL)."""

from __future__ import annotations

from ..packed import PackedBatch
from ..registry import Estimate, Share, estimator
from ..turns import turn_returns


@estimator("agentic_reinforce", scope="row", level="token", needs=("response_mask", "token_level_rewards"))
def agentic_reinforce(batch: PackedBatch, *, gamma: Share = 1.0) -> Estimate:
    """G_k = R_k + gamma * G_{k+1} over the turns k of a row; A_t = G_k on all tokens of turn k.

    R_k is the token-level reward at the turn's last token. Reads response_mask and token_level_rewards [N], gives [N]
    in the dtype of the rewards. As ROLL's agentic_reinforce.
    """
    rewards = batch.column("token_level_rewards")
    return Estimate("token", turn_returns(rewards, batch.trainable_tokens, gamma))
