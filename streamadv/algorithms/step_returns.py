"""Returns over the steps of a trajectory, and groups of steps that are compared with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extras import torch
from .packed import PackedBatch, Steps, offsets_of
from .scan import scan_segments

if TYPE_CHECKING:
    from torch import Tensor


def discounted_returns(batch: PackedBatch, gamma: float) -> Tensor:
    """[S] float64: G_k = s_k + gamma * G_{k+1} over a trajectory's steps, in time order."""
    steps = batch.steps
    offsets = offsets_of(steps.trajectory, batch.num_trajectories)
    return scan_segments(steps.rewards, gamma, offsets)


def state_groups(steps: Steps, group: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of one group that acted in the same state: (order [S], offsets [S + 1]).

    `group` [S] is the group of a step. `order` lists the steps state group by state group, inside in time order;
    `offsets` are the ranges of the state groups in it, the empty ones last. A step without state_key is alone. ROLL's
    state groups ignore the prompt group, so they pool equal states of different prompts.
    """
    return _compared(steps.state, group)


def numbered_groups(steps: Steps, group: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of one group with the same number within their trajectories: (order [S], offsets [S + 1]).

    `group` [S] is the group of a step. As `state_groups`, with the number in place of the state.
    """
    index = torch.arange(len(steps), device=group.device)
    return _compared(index - torch.searchsorted(steps.trajectory, steps.trajectory), group)


def _compared(key: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(order, offsets) of the steps with equal `key` [S] and `group` [S]; one with a key below 0 is alone."""
    order = torch.argsort(key, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    key, owner = key[order], group[order]
    begins = torch.ones(len(key), dtype=torch.bool, device=key.device)
    begins[1:] = (key[1:] != key[:-1]) | (owner[1:] != owner[:-1]) | (key[1:] < 0)
    return order, offsets_of(torch.cumsum(begins, 0) - 1, len(key))
