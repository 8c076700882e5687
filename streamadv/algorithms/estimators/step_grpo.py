"""GRPO among steps of the same number: the k-th steps of a prompt's trajectories against each other (PipelineRL)."""

from __future__ import annotations

from typing import Literal

import torch

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..segments import moments, spread
from ..step_returns import discounted_returns, numbered_groups

Baseline = Literal["mean", "others"]


@estimator("step_grpo", scope="group", level="step")
def step_grpo(
    batch: PackedBatch,
    *,
    gamma: float = 1.0,
    baseline: Baseline = "mean",
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Estimate:
    """A_k = (G_k - mean of the group's k-th returns) / (their std + epsilon), k counted within the trajectory.

    G_k are the step rewards discounted by `gamma`; gamma 0 compares the rewards alone. baseline "others"
    leaves the step itself out of the mean (PipelineRL, which divides by std + 1e-4). std has ddof 1. A k-th
    step without another one, or among equals, has exactly 0. The returns are G_k.
    """
    steps = batch.steps
    order, offsets = numbered_groups(steps, batch.trajectory_group[steps.trajectory])
    returns = discounted_returns(batch, gamma)
    stats = moments(returns[order], offsets, (~batch.baseline)[steps.trajectory][order].double())
    size = spread(stats.size, offsets, len(order))
    centred = stats.centred * (size / (size - 1).clamp(min=1) if baseline == "others" else 1)
    if norm_by_std:
        centred = centred / (spread(stats.std, offsets, len(order)) + epsilon)
    known = torch.where((size > 1) & (stats.centred != 0), centred, 0.0)
    return Estimate("step", torch.empty_like(returns).scatter(0, order, known), returns)
