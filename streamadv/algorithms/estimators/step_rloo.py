"""Leave-one-trajectory-out baselines for steps: unbiased where the policy decides how many turns it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...extras import torch
from ..packed import PackedBatch, offsets_of
from ..registry import Estimate, Share, estimator
from ..segments import moments, segment_sum, spread
from ..step_returns import discounted_returns, numbered_groups, state_groups

if TYPE_CHECKING:
    from torch import Tensor

Compared = Literal["number", "state", "group"]


@estimator("step_rloo", scope="group", level="step")
def step_rloo(batch: PackedBatch, *, gamma: Share = 1.0, compare: Compared = "number") -> Estimate:
    """A_k = G_k - b_k, b_k the mean return of comparable steps of the group's other trajectories, 0 without any.

    G_k are the step rewards discounted by `gamma`. b_k depends on nothing that the trajectory does from step k on. So
    the gradient's expectation is that of REINFORCE, whatever decides how many steps a trajectory has (gamma 1).

    Args:
      batch: with steps.
      compare: which steps are comparable: those of the same "number" within their trajectories, those with the same
        state_key ("state"; a step without one is compared with none), or all of the "group".

    Returns:
      One value per step [S] float64; the returns are G_k. Steps whose comparable ones all have equal returns have
      exactly 0.

    The leave-one-out mean is that of RLOO (arXiv:2402.14740), step by step.
    """
    steps = batch.steps
    order, offsets = _comparable(batch, compare)
    returns = discounted_returns(batch, gamma)
    trajectory = steps.trajectory[order]
    counted = (~batch.baseline)[trajectory].double()
    stats = moments(returns[order], offsets, counted)
    own = _own_spans(trajectory, offsets)
    own_sum = spread(segment_sum(stats.centred * counted, own), own, len(order))
    own_size = spread(segment_sum(counted, own), own, len(order))
    others = stats.size - own_size
    # The centred values of all trajectories sum to 0, so those of the others sum to minus the own ones.
    compared = stats.centred + own_sum / others.clamp(min=1)
    advantages = torch.where(others > 0, compared, returns[order])
    return Estimate("step", torch.empty_like(returns).scatter(0, order, advantages), returns)


def _comparable(batch: PackedBatch, compare: Compared) -> tuple[Tensor, Tensor]:
    """(order [S], offsets): the steps set by set of comparable ones, inside a set trajectory by trajectory."""
    steps, group = batch.steps, batch.trajectory_group[batch.steps.trajectory]
    if compare == "number":
        return numbered_groups(steps, group)
    if compare == "state":
        return state_groups(steps, group)
    return torch.arange(len(steps), device=group.device), offsets_of(group, batch.num_groups)


def _own_spans(trajectory: Tensor, offsets: Tensor) -> Tensor:
    """Offsets of the runs of one trajectory within one set. trajectory [S]: of the ordered steps."""
    count = len(trajectory)
    compared = spread(torch.arange(len(offsets) - 1, device=trajectory.device), offsets, count)
    begins = torch.ones(count, dtype=torch.bool, device=trajectory.device)
    begins[1:] = (trajectory[1:] != trajectory[:-1]) | (compared[1:] != compared[:-1])
    return offsets_of(torch.cumsum(begins, 0) - 1, count)
