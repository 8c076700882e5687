"""Estimators over the steps of trajectories: one number for each step or turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...extras import torch
from ..packed import PackedBatch, offsets_of
from ..registry import Estimate, NotNegative, Share, estimator
from ..scan import scan_segments, turn_returns
from ..segments import Moments, NormScope, moments, normalise, segment_sum, spread

if TYPE_CHECKING:
    from torch import Tensor


@estimator("agentic_reinforce", scope="row", level="token", needs=("response_mask", "token_level_rewards"))
def agentic_reinforce(batch: PackedBatch, *, gamma: Share = 1.0) -> Estimate:
    """G_k = R_k + gamma * G_{k+1} over the turns k of a row; A_t = G_k on all tokens of turn k.

    R_k is the token-level reward at the turn's last token. Reads response_mask and token_level_rewards [N], gives [N]
    in the dtype of the rewards. As ROLL's agentic_reinforce.
    """
    rewards = batch.column("token_level_rewards")
    return Estimate("token", turn_returns(rewards, batch.trainable_tokens, gamma))


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
    order, offsets = _comparable(batch, "number")
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
    # The runs of one trajectory within one set.
    compared = spread(torch.arange(len(offsets) - 1, device=trajectory.device), offsets, len(order))
    begins = torch.ones(len(order), dtype=torch.bool, device=trajectory.device)
    begins[1:] = (trajectory[1:] != trajectory[:-1]) | (compared[1:] != compared[:-1])
    own = offsets_of(torch.cumsum(begins, 0) - 1, len(order))
    own_sum = spread(segment_sum(stats.centred * counted, own), own, len(order))
    own_size = spread(segment_sum(counted, own), own, len(order))
    others = stats.size - own_size
    # The centred values of all trajectories sum to 0, so those of the others sum to minus the own ones.
    against_others = stats.centred + own_sum / others.clamp(min=1)
    advantages = torch.where(others > 0, against_others, returns[order])
    return Estimate("step", torch.empty_like(returns).scatter(0, order, advantages), returns)


def _comparable(batch: PackedBatch, compare: Compared) -> tuple[Tensor, Tensor]:
    """(order [S], offsets): the steps set by set of comparable ones, in a set trajectory by trajectory, in time order.

    Sets do not reach over groups; offsets may end with empty ones. ROLL's sets of a state ignore the group, so they
    pool equal states of different prompts.
    """
    steps, group = batch.steps, batch.trajectory_group[batch.steps.trajectory]
    index = torch.arange(len(steps), device=group.device)
    if compare == "group":
        return index, offsets_of(group, batch.num_groups)
    is_state = compare == "state"  # a step without one has a key below 0, and is alone
    key = steps.state if is_state else index - torch.searchsorted(steps.trajectory, steps.trajectory)
    order = torch.argsort(key, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    key, owner = key[order], group[order]
    begins = torch.ones(len(key), dtype=torch.bool, device=key.device)
    begins[1:] = (key[1:] != key[:-1]) | (owner[1:] != owner[:-1]) | (key[1:] < 0)
    return order, offsets_of(torch.cumsum(begins, 0) - 1, len(key))


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

    Feng et al., arXiv:2505.10978. G_k are the step rewards discounted by `gamma` along the trajectory. A state group is
    the steps of one group with equal state_key. norm(x) = (x - mean) / (std + epsilon), std with ddof 1; exactly 0 for
    a value alone or among equals.

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
    order, offsets = _comparable(batch, "state")
    counted = (~batch.baseline)[steps.trajectory][order]
    returns = discounted_returns(batch, gamma)
    sorted_step = normalise(
        returns[order], offsets, mean="group", std=std, epsilon=epsilon, weight=counted.double()
    )
    step = torch.empty_like(returns).scatter(0, order, sorted_step)
    return Estimate("step", episode_weight * episode[steps.trajectory] + step_weight * step)


def discounted_returns(batch: PackedBatch, gamma: float) -> Tensor:
    """[S] float64: G_k = s_k + gamma * G_{k+1} over a trajectory's steps, in time order."""
    steps = batch.steps
    offsets = offsets_of(steps.trajectory, batch.num_trajectories)
    return scan_segments(steps.rewards, gamma, offsets)
