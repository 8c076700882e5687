"""How ROLL computes the same numbers: loops over tokens, batches split by label.

Padded [B, T] float32 tensors, masks float32; `labels` [B] are objects, equal ones a group. Written anew from the
formulas (docs/reference/estimators.md names the files). Simplified in its favour: its containers drag all
columns of a batch along when they split it into groups, these carry only what the result needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
    """[B, T]: exp(-d) - 1 + d, held in -10 .. 10."""
    back = ref_log_probs - log_probs
    return torch.clamp(torch.exp(back) - back - 1, -10, 10) * mask


def reinforce(rewards: Tensor, *, gamma: float) -> Tensor:
    """A loop over columns, masked or not."""
    reversed_returns: list[Tensor] = []
    running: Tensor | float = 0.0
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        reversed_returns.append(running)
    return torch.stack(reversed_returns[::-1], dim=1)


def gae(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> Pair:
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


def grpo(scores: Tensor, mask: Tensor, labels: Array) -> Pair:
    """Scores [B] normalised group by group, put on the last token, and summed backwards token by token."""
    normed = _by_group({"scores": scores}, labels, lambda part: _normed(part["scores"]))
    placed = torch.zeros_like(mask)
    width = mask.shape[1]
    last = (torch.arange(width, device=mask.device) * mask).argmax(1, keepdim=True)
    placed.scatter_(1, last, normed[:, None])
    returns = reinforce(placed * mask, gamma=1.0)
    return returns * mask, returns


def discounted_returns(scores: Tensor, trajectory: Array, number: Array, gamma: float) -> Tensor:
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


def gigpo(
    scores: Tensor,
    episode_scores: Tensor,
    trajectory: Array,
    number: Array,
    group: Array,
    state: Array,
    gamma: float,
) -> Tensor:
    """[S]: episode score normalised over the group's steps, plus step return over steps of equal state."""
    returns = discounted_returns(scores, trajectory, number, gamma)
    episode = _by_group({"scores": episode_scores}, group, lambda part: _normed(part["scores"]))
    # It splits the batch by group and then by state to label rows, and groups by the label once more.
    _by_group(
        {"row": torch.arange(len(scores))},
        group,
        lambda part: _by_group(part, state[part["row"].numpy()], lambda rows: rows["row"]),
    )
    return episode + _by_group({"scores": returns}, state, lambda part: _normed(part["scores"]))


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
    """KL off the rewards, GAE over all tokens, whitening."""
    shaped = (rewards - kl_coef * k3(old, ref, mask)) * mask
    advantages, returns = gae(shaped, values, gamma=gamma, lam=lam)
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
