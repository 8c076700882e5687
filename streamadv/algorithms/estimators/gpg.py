"""GPG: centred rewards, scaled up for samples that carry no gradient (Chu et al., arXiv:2504.02546)."""

from __future__ import annotations

from typing import Literal

from ..packed import PackedBatch
from ..registry import Estimate, Positive, estimator
from ..segments import moments, segment_sum, whole
from .singleton import Singleton, settle_singletons


@estimator("gpg", scope="batch")
def gpg(
    batch: PackedBatch,
    *,
    f_norm: Positive = 1.0,
    counted: Literal["advantages", "rewards"] = "advantages",
    singleton: Singleton = "zero",
) -> Estimate:
    """A_i = alpha * (r_i - mean(r_g)) / f_norm, alpha = B / (number of trajectories with a signal).

    B is the number of trajectories in the batch, without baseline members.

    Args:
      counted: what is a signal: a centred reward that is not 0, or "rewards": a reward that is not 0 (verl).
      singleton: the advantage in a group of one: "zero", or "raw": alpha / f_norm times its reward (verl).

    Returns:
      One value per row [R] float64.
    """
    trained = ~batch.baseline
    stats = moments(batch.rewards, batch.group_offsets, trained)
    centred = settle_singletons(stats.size, stats.centred, batch.rewards, singleton)
    signal = (batch.rewards if counted == "rewards" else centred) != 0
    total = segment_sum(trained, whole(centred))
    alpha = total / segment_sum(signal & trained, whole(centred)).clamp(min=1)
    return Estimate("row", (alpha * centred / f_norm)[batch.row_trajectory])
