"""REINFORCE over steps: every token of a step gets the step's discounted return."""

from __future__ import annotations

from ..packed import PackedBatch, offsets_of
from ..registry import Estimate, NotNegative, Share, estimator
from ..rewards import normalise
from ..step_returns import discounted_returns


@estimator("step_reinforce", scope="group", level="step")
def step_reinforce(
    batch: PackedBatch,
    *,
    gamma: Share = 0.95,
    baseline: bool = False,
    norm_by_std: bool = False,
    epsilon: NotNegative = 1e-6,
) -> Estimate:
    """A_k = G_k = s_k + gamma * G_{k+1} over the steps of a trajectory.

    baseline subtracts the mean over all steps of the group, norm_by_std divides by their std + epsilon (ddof 1). One
    value per step [S] float64; the returns are G_k. The mean includes the trajectory's own steps. That biases it
    between turns; `step_rloo` leaves them out.
    """
    returns = discounted_returns(batch, gamma)
    group = batch.trajectory_group[batch.steps.trajectory]
    advantages = normalise(
        returns,
        offsets_of(group, batch.num_groups),
        mean="group" if baseline else None,
        std="group" if norm_by_std else None,
        epsilon=epsilon,
        weight=(~batch.baseline)[batch.steps.trajectory].double(),
    )
    return Estimate("step", advantages, returns)
