"""RLOO: a reward against the mean of its siblings' (Ahmadian et al., arXiv:2402.14740, eq. 8)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, NotNegative, estimator
from ..rewards import normalise
from ..segments import moments
from .singleton import Singleton, settle_singletons


@estimator("rloo", scope="group")
def rloo(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """A_i = r_i - mean of the group's other rewards = (r_i - mean(r_g)) * n / (n - 1).

    A group of one gives 0; singleton "raw" keeps its reward, as verl's rloo (verl's vectorized form: 0). One value per
    row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    advantages = stats.centred * stats.size / (stats.size - 1).clamp(min=1)
    advantages = settle_singletons(stats.size, advantages, batch.rewards, singleton)
    return Estimate("row", advantages[batch.row_trajectory])


@estimator("rloo_normalized", scope="batch")
def rloo_normalized(batch: PackedBatch, *, epsilon: NotNegative = 1e-4) -> Estimate:
    """RLOO's advantages, less their mean over the batch's trajectories, over their std + epsilon (ddof 1), as TRL.

    Trajectories alone in their group have 0 and do not count. One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    counted = ~batch.baseline & (stats.size > 1)
    advantages = stats.centred * stats.size / (stats.size - 1).clamp(min=1)
    normalised = normalise(
        advantages, batch.group_offsets, mean="batch", std="batch", epsilon=epsilon, weight=counted.double()
    )
    return Estimate("row", torch.where(counted, normalised, 0.0)[batch.row_trajectory])
