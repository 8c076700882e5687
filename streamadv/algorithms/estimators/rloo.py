"""RLOO: a reward against the mean of its siblings' (Ahmadian et al., arXiv:2402.14740, eq. 8)."""

from __future__ import annotations

from ..packed import PackedBatch
from ..registry import Estimate, estimator
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
