"""GRPO for pass@k: reinforces only the best rollout of a group (Tang et al., arXiv:2503.19595)."""

from __future__ import annotations

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, NotNegative, estimator
from ..segments import moments, segment_max, segment_min


@estimator("grpo_passk", scope="group")
def grpo_passk(batch: PackedBatch, *, norm_by_std: bool = True, epsilon: NotNegative = 1e-6) -> Estimate:
    """A_best = (r_best - r_second) / (std(r_g) + epsilon), 0 for all others; std with ddof 1.

    norm_by_std False: A_best = r_best - r_second. Ties for the best give 0, and so do groups of one (verl raises). One
    value per row [R] float64.
    """
    offsets, group, trained = batch.group_offsets, batch.trajectory_group, ~batch.baseline
    counted = torch.where(trained, batch.rewards, -torch.inf)
    best = counted == segment_max(counted, offsets)[group]
    index = torch.arange(len(counted), device=batch.device).double()
    first = segment_min(torch.where(best, index, torch.inf), offsets)[group] == index
    without_first = torch.where(first, -torch.inf, counted)
    lead = batch.rewards - segment_max(without_first, offsets)[group]
    stats = moments(batch.rewards, offsets, trained)
    if norm_by_std:  # after a tie the std may be 0
        lead = torch.where(lead > 0, lead / (stats.std + epsilon), 0.0)
    advantages = torch.where(first & (stats.size > 1), lead, 0.0)
    return Estimate("row", advantages[batch.row_trajectory])
