"""GRPO among steps of the same number: compares the k-th steps of a prompt's trajectories (PipelineRL)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, NotNegative, Share, estimator
from ..segments import Moments, moments
from ..step_returns import discounted_returns, numbered_groups

if TYPE_CHECKING:
    from torch import Tensor

Baseline = Literal["mean", "others"]


@estimator("step_grpo", scope="group", level="step")
def step_grpo(
    batch: PackedBatch,
    *,
    gamma: Share = 1.0,
    baseline: Baseline = "mean",
    norm_by_std: bool = True,
    epsilon: NotNegative = 1e-6,
) -> Estimate:
    """A_k = (G_k - mean of the group's k-th returns) / (their std + epsilon), k counted within the trajectory.

    G_k are the step rewards discounted by `gamma`; std has ddof 1. A k-th step alone or among equals has exactly 0.

    Args:
      batch: with steps.
      gamma: 0 compares the step rewards alone.
      baseline: "others" leaves the step itself out of the mean (PipelineRL, with epsilon 1e-4).
      norm_by_std: False does not divide.

    Returns:
      One value per step [S] float64; the returns are G_k.

    A step weighs by how often others get as far, because it counts 0 alone. `step_rloo` is unbiased over turns.
    """
    steps = batch.steps
    order, offsets = numbered_groups(steps, batch.trajectory_group[steps.trajectory])
    returns = discounted_returns(batch, gamma)
    stats = moments(returns[order], offsets, (~batch.baseline)[steps.trajectory][order].double())
    advantages = against_group(stats, baseline, norm_by_std, epsilon)
    return Estimate("step", torch.empty_like(returns).scatter(0, order, advantages), returns)


def against_group(stats: Moments, baseline: Baseline, norm_by_std: bool, epsilon: float) -> Tensor:
    """[K]: values with these moments, against the mean of their segment or of its other values, over its std."""
    centred = stats.centred
    if baseline == "others":
        centred = centred * (stats.size / (stats.size - 1).clamp(min=1))
    if norm_by_std:
        centred = centred / (stats.std + epsilon)
    return torch.where((stats.size > 1) & (stats.centred != 0), centred, 0.0)
