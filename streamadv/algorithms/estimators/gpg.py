"""GPG: centred rewards, scaled up for samples that carry no gradient (Chu et al., arXiv:2504.02546)."""

from __future__ import annotations

from typing import Literal

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments, segment_sum, whole
from .singleton import Singleton, settle_singletons


@estimator("gpg", scope="batch")
def gpg(
    batch: PackedBatch,
    *,
    f_norm: float = 1.0,
    counted: Literal["advantages", "rewards"] = "advantages",
    singleton: Singleton = "zero",
) -> Estimate:
    """A_i = alpha * (r_i - mean(r_g)) / f_norm with alpha = B / (number of samples with a signal).

    A sample has a signal if its centred reward is not 0; verl counts rewards that are not 0 instead
    (counted "rewards"). B is the number of trajectories in the batch.
    """
    trained = ~batch.baseline
    stats = moments(batch.rewards, batch.group_offsets, trained)
    centred = settle_singletons(batch, stats.size, stats.centred, batch.rewards, singleton)
    signal = (batch.rewards if counted == "rewards" else centred) != 0
    total = segment_sum(trained, whole(centred))
    alpha = total / segment_sum(signal & trained, whole(centred)).clamp(min=1)
    return Estimate("row", (alpha * centred / f_norm)[batch.row_trajectory])
