"""How verl computes the same numbers: loops over tokens, dictionaries over rows.

Padded [B, T] float32 tensors, masks float32; `labels` [B] are objects, equal ones a group. Written anew from the
formulas (docs/reference/estimators.md names the files).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Pair = tuple[Tensor, Tensor]
EPSILON: Final = 1e-6


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with masked mean and variance, ddof 1, in float32."""
    count = mask.sum()
    mean = (values * mask).sum() / (count + 1e-8)
    variance = ((values - mean).square() * mask).sum() / (count + 1e-8) * (count / (count - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: exp(-d) - 1 + d, held in -10 .. 10, the exponent in -20 .. 20."""
    back = torch.clamp(ref_log_probs - log_probs, -20, 20)
    return torch.clamp(torch.exp(back) - back - 1, -10, 10) * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Pair:
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


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float) -> Pair:
    """A loop over columns, begun anew after every masked token, then whitened."""
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * mask[:, t]
    return masked_whiten(returns, mask) * mask, returns


def grpo(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
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


def grpo_vectorized(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
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


def rloo(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
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


def rloo_vectorized(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
    scores = rewards.sum(-1)
    number = _numbered(labels).to(scores.device)
    size = torch.bincount(number)[number].to(scores.dtype)
    total = torch.bincount(number, weights=scores)[number].to(scores.dtype)
    advantages = ((size * scores - total) / (size - 1).clamp(min=1) * (size > 1))[:, None] * mask
    return advantages, advantages


def opo(rewards: Tensor, mask: Tensor, labels: Array) -> Pair:
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


def chain(
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
    shaped = rewards - kl_coef * k3(old, ref, mask)
    advantages, returns = gae(shaped, values, mask, gamma=gamma, lam=lam)
    return masked_whiten(advantages, mask) * mask, returns


def _numbered(labels: Array) -> Tensor:
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1])
