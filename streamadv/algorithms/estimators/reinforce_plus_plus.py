"""REINFORCE++ and its variant with a group baseline (Hu et al., arXiv:2501.03262)."""

from __future__ import annotations

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import blocks, next_in_row, reverse_scan
from ..segments import moments, whole
from ..trainable import trainable
from ..whitening import whiten
from .reinforce import reinforce
from .singleton import Singleton, settle_singletons


@estimator(
    "reinforce_plus_plus", scope="batch", level="token", needs=("response_mask", "token_level_rewards")
)
def reinforce_plus_plus(
    batch: PackedBatch, *, gamma: float = 1.0, reset_at_observations: bool = False
) -> Estimate:
    """G_t = R_t + gamma * G_{t+1} over trainable tokens, whitened over the batch; returns G.

    reset_at_observations: the return starts anew at every masked token, so only the last turn of an episode
    hears of its reward (verl).
    """
    mask = batch.column("response_mask")
    if not reset_at_observations:
        returns = reinforce(batch, gamma=gamma).advantages
    else:
        passed_on = gamma * next_in_row(mask.double(), batch.cu_seqlens)
        cut = blocks(batch.cu_seqlens, batch.num_tokens)
        returns = reverse_scan(batch.column("token_level_rewards"), passed_on, cut)
    tokens = trainable(batch)
    chosen = tokens.pick(returns) if reset_at_observations else returns
    return Estimate("token", whiten(chosen, tokens.offsets), returns)


@estimator("reinforce_plus_plus_baseline", scope="batch")
def reinforce_plus_plus_baseline(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """r_i - mean(r_g), whitened over the batch with each row counted once per trainable token."""
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    centred = settle_singletons(batch, stats.size, stats.centred, batch.rewards, singleton)
    rows = centred[batch.row_trajectory]
    return Estimate("row", whiten(rows, whole(rows), batch.row_trainable))
