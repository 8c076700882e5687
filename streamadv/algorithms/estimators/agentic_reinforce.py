"""REINFORCE with one time step per turn: a turn is a run of trainable tokens."""

from __future__ import annotations

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..turns import turn_returns


@estimator("agentic_reinforce", scope="row", level="token", needs=("response_mask", "token_level_rewards"))
def agentic_reinforce(batch: PackedBatch, *, gamma: float = 1.0) -> Estimate:
    """G_k = R at the last token of turn k + gamma * G_{k+1}; every token of the turn gets G_k (ROLL)."""
    rewards = batch.column("token_level_rewards")
    return Estimate("token", turn_returns(rewards, batch.trainable_tokens, gamma))
