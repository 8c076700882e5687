"""Turns of an agent: the longest stretches of consecutive trainable tokens in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..extras import torch
from . import kernels
from .scan import ends_row, reverse_scan
from .segments import keyed_sum
from .trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor


def turn_mean(values: Tensor, tokens: Trainable) -> Tensor:
    """[N] float64: the mean of `values` [N] over a turn, on all its tokens; 0 outside."""
    if kernels.on_cpu(values):
        mean = torch.empty(len(values), dtype=torch.float64)
        kernels.turn_mean(*map(kernels.as_array, (values, tokens.mask, tokens.offsets, mean)))
        return mean
    turn = torch.cumsum(_ends_turn(tokens), 0) - _ends_turn(tokens).to(torch.int64)  # number of turns before
    sums, counts = (keyed_sum(tokens.only(x), turn, len(values)) for x in (values, tokens.mask))
    return tokens.only((sums / counts.clamp(min=1))[turn])


def turn_returns(rewards: Tensor, tokens: Trainable, gamma: float) -> Tensor:
    """[N]: G = reward at the turn's last token + gamma * G of the row's next turn, on all its tokens; 0 outside.

    The return of ROLL's agentic_reinforce: time advances by one per turn. `rewards` [N] at other tokens do not count.
    Same dtype as the rewards.
    """
    if kernels.on_cpu(rewards):
        array, mask, offsets = map(kernels.as_array, (rewards, tokens.mask, tokens.offsets))
        returns = np.empty_like(array)
        kernels.turn_returns(array, mask, offsets, gamma, returns)
        return torch.from_numpy(returns)
    last = _ends_turn(tokens)
    step = torch.where(last, gamma, 1.0)
    return reverse_scan(torch.where(last, rewards, 0.0), step, tokens)


def _ends_turn(tokens: Trainable) -> Tensor:
    """[N] bool: tokens that count, and are the last of their row or stand before one that does not count."""
    return tokens.mask & (~tokens.mask.roll(-1) | ends_row(tokens))
