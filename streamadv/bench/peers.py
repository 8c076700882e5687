"""The way verl and ROLL compute the same numbers: loops over tokens, dictionaries over rows.

Written anew from their formulas (docs/estimators.md names their files). Padded [B, T] float32 tensors, masks
float32; `labels` [B] are objects, equal ones a group. Simplified in the peers' favour: their containers drag
all columns of a batch along when they split it into groups, these carry only what the result needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..columns import Array

EPSILON: Final = 1e-6
Pair = tuple[Tensor, Tensor]


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Both: (x - mean) / sqrt(var + 1e-8) with masked mean and variance, ddof 1, in float32."""
    count = mask.sum()
    mean = (values * mask).sum() / (count + 1e-8)
    variance = ((values - mean).square() * mask).sum() / (count + 1e-8) * (count / (count - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, bound: float | None) -> Tensor:
    """[B, T]: exp(-d) - 1 + d, held in -10 .. 10; verl holds the exponent in -bound .. bound too."""
    back = ref_log_probs - log_probs
    if bound is not None:
        back = torch.clamp(back, -bound, bound)
    return torch.clamp(torch.exp(back) - back - 1, -10, 10) * mask


def verl_gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Pair:
    """A loop over columns; masked tokens carry value and advantage through. Not whitened yet."""
    following, running = values.new_zeros(len(values)), values.new_zeros(len(values))
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        candidate = delta + gamma * lam * running
        counted = mask[:, t]
        following = values[:, t] * counted + (1 - counted) * following
        running = candidate * counted + (1 - counted) * running
        reversed_advantages.append(running)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def verl_reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float) -> Pair:
    """A loop over columns, begun anew after every masked token, then whitened."""
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * mask[:, t]
    return masked_whiten(returns, mask) * mask, returns


def verl_grpo(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
    """Scores collected in a dictionary per label, one row at a time."""
    scores = rewards.sum(-1)
    members: dict[object, list[Tensor]] = defaultdict(list)
    for row in range(len(scores)):
        members[labels[row]].append(scores[row])
    mean, std = {}, {}
    for label, group in members.items():
        stacked = torch.stack(group)
        mean[label] = stacked.mean() if len(group) > 1 else torch.tensor(0.0)
        std[label] = stacked.std() if len(group) > 1 else torch.tensor(1.0)
    for row in range(len(scores)):
        scores[row] = (scores[row] - mean[labels[row]]) / (std[labels[row]] + EPSILON)
    advantages = scores[:, None] * mask
    return advantages, advantages


def verl_grpo_vectorized(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
    """Group moments from sums of values and squares, in float32, scattered over label numbers."""
    scores = rewards.sum(-1)
    number = _numbered(labels).to(scores.device)
    groups = int(number.max()) + 1
    count = torch.bincount(number, minlength=groups).to(scores.dtype)
    total = torch.zeros(groups, device=scores.device).index_add_(0, number, scores)
    squares = torch.zeros(groups, device=scores.device).index_add_(0, number, scores.square())
    mean = total / count
    variance = (squares - total.square() / count) / (count - 1).clamp(min=1)
    alone = count <= 1
    mean = torch.where(alone, 0.0, mean)
    std = torch.where(alone, 1.0, variance.clamp(min=EPSILON).sqrt())
    advantages = ((scores - mean[number]) / (std[number] + EPSILON))[:, None] * mask
    return advantages, advantages


def verl_rloo(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
    """As its GRPO, with the mean of the others."""
    scores = rewards.sum(-1)
    members: dict[object, list[Tensor]] = defaultdict(list)
    for row in range(len(scores)):
        members[labels[row]].append(scores[row])
    mean = {label: torch.stack(group).mean() for label, group in members.items()}
    for row in range(len(scores)):
        size = len(members[labels[row]])
        if size > 1:
            factor = size / (size - 1)
            scores[row] = scores[row] * factor - mean[labels[row]] * factor
    advantages = scores[:, None] * mask
    return advantages, advantages


def verl_rloo_vectorized(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
    scores = rewards.sum(-1)
    number = _numbered(labels).to(scores.device)
    size = torch.bincount(number)[number].to(scores.dtype)
    total = torch.bincount(number, weights=scores)[number].to(scores.dtype)
    advantages = ((size * scores - total) / (size - 1).clamp(min=1) * (size > 1))[:, None] * mask
    return advantages, advantages


def verl_opo(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
    """Dictionaries again; the baseline weighs each score with its length."""
    scores, lengths = rewards.sum(-1), mask.sum(-1)
    members: dict[object, list[int]] = defaultdict(list)
    for row in range(len(scores)):
        members[labels[row]].append(row)
    baseline = {}
    for label, rows in members.items():
        group, weight = (
            torch.stack([scores[row] for row in rows]),
            torch.stack([lengths[row] for row in rows]),
        )
        baseline[label] = (group * weight).sum() / weight.sum() if len(rows) > 1 else torch.tensor(0.0)
    for row in range(len(scores)):
        scores[row] = scores[row] - baseline[labels[row]]
    advantages = scores[:, None] * mask
    return advantages, advantages


def verl_chain(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    old: Tensor,
    ref: Tensor,
    *,
    kl_coef: float,
    gamma: float,
    lam: float,
) -> Pair:
    """KL off the rewards, GAE, whitening."""
    shaped = rewards - kl_coef * k3(old, ref, mask, bound=20.0)
    advantages, returns = verl_gae(shaped, values, mask, gamma=gamma, lam=lam)
    return masked_whiten(advantages, mask) * mask, returns


def roll_reinforce(rewards: Tensor, *, gamma: float) -> Tensor:
    """A loop over columns, masked or not."""
    reversed_returns: list[Tensor] = []
    running: Tensor | float = 0.0
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        reversed_returns.append(running)
    return torch.stack(reversed_returns[::-1], dim=1)


def roll_gae(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> Pair:
    """A loop over columns, masked or not."""
    reversed_advantages: list[Tensor] = []
    running: Tensor | float = 0.0
    width = values.shape[1]
    for t in reversed(range(width)):
        following = values[:, t + 1] if t < width - 1 else 0.0
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        reversed_advantages.append(running)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def roll_grpo(scores: Tensor, mask: Tensor, labels: Array) -> Pair:
    """Scores [B] normalised group by group, put on the last token, and summed backwards token by token."""
    normed = _by_group({"scores": scores}, labels, lambda part: _normed(part["scores"]))
    placed = torch.zeros_like(mask)
    width = mask.shape[1]
    last = (torch.arange(width, device=mask.device) * mask).argmax(1, keepdim=True)
    placed.scatter_(1, last, normed[:, None])
    returns = roll_reinforce(placed * mask, gamma=1.0)
    return returns * mask, returns


def roll_discounted_returns(scores: Tensor, trajectory: Array, number: Array, gamma: float) -> Tensor:
    """[S]: step scores discounted along each trajectory, one trajectory and one step at a time."""

    def returns(part: dict[str, Tensor]) -> Tensor:
        order = torch.argsort(part["number"])
        rewards = part["scores"][order]
        found = torch.empty_like(rewards)
        running: Tensor | float = 0.0
        for t in reversed(range(len(rewards))):
            running = rewards[t] + gamma * running
            found[t] = running
        return torch.empty_like(found).scatter_(0, order, found)

    columns = {"scores": scores, "number": torch.from_numpy(number)}
    return _by_group(columns, trajectory, returns)


def roll_gigpo(
    scores: Tensor,
    episode_scores: Tensor,
    trajectory: Array,
    number: Array,
    group: Array,
    state: Array,
    gamma: float,
) -> Tensor:
    """[S]: episode score normalised over the group's steps, plus step return over steps of equal state."""
    returns = roll_discounted_returns(scores, trajectory, number, gamma)
    episode = _by_group({"scores": episode_scores}, group, lambda part: _normed(part["scores"]))
    # It splits the batch by group and then by state to label rows, and groups by the label once more.
    _by_group(
        {"row": torch.arange(len(scores))},
        group,
        lambda part: _by_group(part, state[part["row"].numpy()], lambda rows: rows["row"]),
    )
    return episode + _by_group({"scores": returns}, state, lambda part: _normed(part["scores"]))


def roll_chain(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    old: Tensor,
    ref: Tensor,
    *,
    kl_coef: float,
    gamma: float,
    lam: float,
) -> Pair:
    """KL off the rewards, GAE over all tokens, whitening."""
    shaped = (rewards - kl_coef * k3(old, ref, mask, bound=None)) * mask
    advantages, returns = roll_gae(shaped, values, gamma=gamma, lam=lam)
    return masked_whiten(advantages, mask) * mask, returns


def _normed(scores: Tensor) -> Tensor:
    if len(scores) < 2 or not scores.std() > EPSILON:
        return torch.zeros_like(scores)
    return (scores - scores.mean()) / (scores.std() + EPSILON)


def _by_group(
    columns: dict[str, Tensor], labels: Array, function: Callable[[dict[str, Tensor]], Tensor]
) -> Tensor:
    """Split rows by label, apply `function` to each part, lay the parts end to end, restore the order."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row in range(len(labels)):
        rows[str(labels[row])].append(row)
    parts, places = [], []
    for chosen in rows.values():
        index = torch.tensor(chosen, device=next(iter(columns.values())).device)
        parts.append(function({name: column[index] for name, column in columns.items()}))
        places.append(index)
    return torch.cat(parts)[torch.argsort(torch.cat(places))]


def _numbered(labels: Array) -> Tensor:
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1])
