"""REINFORCE++ and its variant with a group baseline (Hu et al., arXiv:2501.03262)."""

from __future__ import annotations

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments, whole
from ..whitening import whiten
from .reinforce import reinforce
from .singleton import Singleton, settle_singletons


@estimator(
    "reinforce_plus_plus", scope="batch", level="token", needs=("response_mask", "token_level_rewards")
)
def reinforce_plus_plus(batch: PackedBatch, *, gamma: float = 1.0) -> Estimate:
    """G_t = R_t + gamma * G_{t+1} over trainable tokens, whitened over the batch; returns G.

    verl resets the return at observation tokens, so earlier turns of an episode get nothing.
    """
    returns = reinforce(batch, gamma=gamma).advantages
    return Estimate("token", whiten(returns, batch.column("response_mask"), batch.cu_seqlens), returns)


@estimator("reinforce_plus_plus_baseline", scope="batch")
def reinforce_plus_plus_baseline(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """r_i - mean(r_g), whitened over the batch with each row counted once per trainable token."""
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    centred = settle_singletons(batch, stats.size, stats.centred, batch.rewards, singleton)
    rows = centred[batch.row_trajectory]
    return Estimate("row", whiten(rows, batch.row_trainable, whole(rows)))
