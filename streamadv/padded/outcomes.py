"""Outcome estimators of other peers on one reward per row: [B] in, [B] float32 out.

Labels: one per row, equal labels belong together, in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from ..algorithms.arguments import (
    Each,
    Instance,
    Labels,
    Names,
    NotNegative,
    Number,
    NumberByName,
    Positive,
    Rows,
    Share,
    Values,
)
from ..algorithms.estimators.steps import Baseline, against_group
from ..algorithms.segments import moments, normalise, segment_max, spread
from .entrance import checked
from .layout import group_order, pair_numbers, ungrouped


@checked
def compute_step_grpo_advantage(
    rewards: Rows,
    index: Labels,
    step_index: Labels,
    baseline: Baseline = "mean",
    norm_by_std: bool = True,
    epsilon: NotNegative = 1e-6,
) -> Tensor:
    """(r - mean) / (std + epsilon) among the rows of a group with equal step_index; see `estimators.step_grpo`.

    baseline "others" takes the mean over the other rows (PipelineRL, with epsilon 1e-4). A row alone gives 0.
    """
    order, offsets = group_order(pair_numbers(index, step_index), rewards.device)
    stats = moments(rewards[order], offsets)
    return ungrouped(against_group(stats, baseline, norm_by_std, epsilon), order)


@checked
def compute_hierarchical_grpo_advantage(
    rewards: Rows,
    index: Labels,
    agents: Names,
    episodes: Labels,
    episode_agents: Annotated[Collection[Hashable], Instance((list, tuple, set, frozenset))],
) -> Tensor:
    """r - mean over the rows of the same agent: of its episode for `episode_agents`, else of its group (prime-rl)."""
    labels = [
        (group, agent, episode if agent in episode_agents else None)
        for group, agent, episode in zip(*map(_listed, (index, agents, episodes)), strict=True)
    ]
    order, offsets = group_order(labels, rewards.device)
    return ungrouped(moments(rewards[order], offsets).centred, order)


@checked
def compute_rae_advantage(
    rewards: Rows,
    agents: Names,
    baselines: Annotated[Mapping[Any, float], NumberByName()] | None = None,
    decay: Share = 0.95,
) -> tuple[Tensor, dict[Any, float]]:
    """Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119; prime-rl): a running baseline per agent.

    A_i = r_i - b, then b = decay * b + (1 - decay) * r_i, row after row; b is the baseline of the row's agent and
    starts at 0. Returns the advantages [B], and the baselines that the caller passes to the next call.
    """
    running = dict(baselines or {})
    advantages = []
    for reward, agent in zip(rewards.tolist(), _listed(agents), strict=True):
        before = running.get(agent, 0.0)
        advantages.append(reward - before)
        running[agent] = decay * before + (1 - decay) * reward
    return torch.tensor(advantages, dtype=torch.float32, device=rewards.device), running


@checked
def compute_normalize_then_sum_advantage(
    rewards: Annotated[Tensor, Values(("B", "K"), finite=False)],
    index: Labels,
    weights: Annotated[Tensor, Values(("K",))] | None = None,
    epsilon: Positive = 1e-4,
) -> Tensor:
    """z over the batch of sum_k w_k z_k, z_k = (r_k - mean(group)) / (std(group) + epsilon); see `estimators.gdpo`.

    rewards [B, K]: one column per reward function, NaN without a verdict, which counts as 0 and in no statistic; a row
    of NaN gives 0. weights [K], None = 1 for all. TRL's multi_objective_aggregation "normalize_then_sum";
    `compute_gdpo_outcome_advantage` is verl's form.
    """
    rows, kinds = rewards.shape
    order, offsets = group_order(index, rewards.device)
    total = torch.zeros(rows, dtype=torch.float64, device=rewards.device)
    for kind in range(kinds):
        values = rewards[order, kind].double()
        has_verdict = ~values.isnan()
        scaled = normalise(
            values, offsets, mean="group", std="group", epsilon=epsilon, weight=has_verdict.double()
        )
        weight = 1.0 if weights is None else float(weights[kind])
        total += weight * torch.where(has_verdict, scaled, 0.0)
    scorable = ~rewards.isnan().all(1)[order]
    whole = normalise(total, offsets, mean="batch", std="batch", epsilon=epsilon, weight=scorable.double())
    return ungrouped(torch.where(scorable, whole, 0.0), order)


@checked
def cost_penalty(
    rewards: Rows,
    index: Labels,
    costs: Annotated[Sequence[Tensor], Each(Values(("B",)), "K")],
    weights: Annotated[Sequence[float], Each(Number(), "K")],
) -> Tensor:
    """r - mean(r_g) * sum_j w_j c_j / max(c_j over the group): a group that solves its prompt pays for cost (prime-rl).

    costs: K tensors [B], e.g. tokens written, tokens read, turns; weights: K numbers. A cost that is 0 in the whole
    group takes nothing.
    """
    order, offsets = group_order(index, rewards.device)
    values = rewards.double()[order]
    share = torch.zeros_like(values)
    for cost, weight in zip(costs, weights, strict=True):
        ordered = cost.double()[order]
        greatest = spread(segment_max(ordered, offsets), offsets, len(order))
        share += torch.where(greatest > 0, weight * ordered / greatest, 0.0)
    return ungrouped(values - moments(values, offsets).mean * share, order)


def _listed(labels: Labels) -> list[Any]:
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)
