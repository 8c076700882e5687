"""GiGPO: episode advantage plus a step's advantage among steps from the same state (Feng et al., arXiv:2505.10978)."""

from __future__ import annotations

from typing import Literal

from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, NotNegative, Share, estimator
from ..rewards import NormScope, normalise
from ..step_returns import discounted_returns, state_groups


@estimator("gigpo", scope="group", level="step")
def gigpo(
    batch: PackedBatch,
    *,
    gamma: Share = 0.95,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    norm_by_std: bool = True,
    epsilon: NotNegative = 1e-6,
    statistics: Literal["trajectory", "step"] = "trajectory",
) -> Estimate:
    """A_k = episode_weight * norm(r over the group) + step_weight * norm(G_k over the state group).

    G_k are the step rewards discounted by `gamma` along the trajectory. A state group is the steps of one group with
    equal state_key. norm(x) = (x - mean) / (std + epsilon), std with ddof 1; exactly 0 for a value alone or among
    equals.

    Args:
      batch: with steps.
      norm_by_std: False: norm(x) = x - mean.
      statistics: how often a trajectory counts in the episode statistics: once, or "step": once per step (ROLL).

    Returns:
      One value per step [S] float64. ROLL pools equal states of different groups.

    The step part's mean includes the trajectory's own steps. That biases it between turns; `step_rloo` leaves them out.
    """
    steps = batch.steps
    std: NormScope | None = "group" if norm_by_std else None
    weight = (~batch.baseline).double()
    if statistics == "step":
        weight = weight * torch.bincount(steps.trajectory, minlength=batch.num_trajectories)
    episode = normalise(
        batch.rewards, batch.group_offsets, mean="group", std=std, epsilon=epsilon, weight=weight
    )
    order, offsets = state_groups(steps, batch.trajectory_group[steps.trajectory])
    counted = (~batch.baseline)[steps.trajectory][order]
    returns = discounted_returns(batch, gamma)
    sorted_step = normalise(
        returns[order], offsets, mean="group", std=std, epsilon=epsilon, weight=counted.double()
    )
    step = torch.empty_like(returns).scatter(0, order, sorted_step)
    return Estimate("step", episode_weight * episode[steps.trajectory] + step_weight * step)
