"""GRPO for pass@k: only the best of a group is reinforced (arXiv:2503.19595)."""

from __future__ import annotations

import torch

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments, segment_max, segment_min


@estimator("grpo_passk", scope="group")
def grpo_passk(batch: PackedBatch, *, norm_by_std: bool = True, epsilon: float = 1e-6) -> Estimate:
    """The best rollout of a group gets its lead over the second best, the others 0.

    norm_by_std divides by std(r_g) + epsilon, ddof 1. Ties for the best and groups of one give 0 (verl
    raises for a group of one).
    """
    offsets, group, trained = batch.group_offsets, batch.trajectory_group, ~batch.baseline
    counted = torch.where(trained, batch.rewards, -torch.inf)
    best = counted == segment_max(counted, offsets)[group]
    place = torch.arange(len(counted), device=batch.device).double()
    first = segment_min(torch.where(best, place, torch.inf), offsets)[group] == place
    others = torch.where(first, -torch.inf, counted)
    lead = batch.rewards - segment_max(others, offsets)[group]
    stats = moments(batch.rewards, offsets, trained)
    if norm_by_std:
        lead = torch.where(
            lead > 0, lead / (stats.std[group] + epsilon), 0.0
        )  # a tie may leave no std at all
    alone = stats.size[group] < 2
    advantages = torch.where(first & ~alone, lead, 0.0)
    return Estimate("row", advantages[batch.row_trajectory])
