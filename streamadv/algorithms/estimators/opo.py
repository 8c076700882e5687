"""OPO: the length-weighted mean as baseline (Hao et al., arXiv:2505.23585)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments, segment_sum
from .singleton import Singleton, settle_singletons


@estimator("opo", scope="group")
def opo(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """A_i = r_i - sum_j(len_j * r_j) / sum_j(len_j) over the group; len = trainable tokens.

    A group of one gives 0 (singleton "raw", as verl: its reward), and so does a group without trainable tokens (verl:
    NaN). One value per row [R] float64.
    """
    offsets = batch.group_offsets
    length = segment_sum(batch.row_trainable, batch.row_offsets)
    counted = (~batch.baseline).double()
    size = segment_sum(counted, offsets)[batch.trajectory_group]
    stats = moments(batch.rewards, offsets, length * counted)
    advantages = settle_singletons(size, stats.centred, batch.rewards, singleton)
    advantages = torch.where(length > 0, advantages, 0.0)
    return Estimate("row", advantages[batch.row_trajectory])
