"""REINFORCE++ and its variant with a group baseline (Hu et al., arXiv:2501.03262)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, Share, estimator
from ..scan import ends_row, reverse_scan
from ..segments import moments
from ..whitening import whiten, whiten_weighted
from .reinforce import reinforce
from .singleton import Singleton, settle_singletons


@estimator(
    "reinforce_plus_plus", scope="batch", level="token", needs=("response_mask", "token_level_rewards")
)
def reinforce_plus_plus(
    batch: PackedBatch, *, gamma: Share = 1.0, reset_at_observations: bool = False
) -> Estimate:
    """A = whiten(G) over the batch, G_t = R_t + gamma * G_{t+1} over trainable tokens; returns G.

    reset_at_observations: G restarts at every masked token, so an episode's reward reaches only its last turn (verl).
    Reads response_mask and token_level_rewards [N], gives [N].
    """
    tokens = batch.trainable_tokens
    if not reset_at_observations:
        returns = reinforce(batch, gamma=gamma).advantages
    else:
        following = tokens.mask.roll(-1) & ~ends_row(tokens)
        passed_on = gamma * following.to(torch.float64)
        returns = reverse_scan(batch.column("token_level_rewards"), passed_on, batch.all_tokens)
    return Estimate("token", whiten(returns, tokens), returns)


@estimator("reinforce_plus_plus_baseline", scope="batch")
def reinforce_plus_plus_baseline(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """A_i = whiten(r_i - mean(r_g)) over the batch, a row counted once per trainable token; [R] float64.

    A group of one has 0 before whitening (singleton "raw", as verl: its reward).
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    centred = settle_singletons(stats.size, stats.centred, batch.rewards, singleton)
    rows = centred[batch.row_trajectory]
    return Estimate("row", whiten_weighted(rows, batch.row_trainable))
