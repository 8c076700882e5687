"""Turns of an agent: the longest stretches of consecutive trainable tokens in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..extras import torch
from . import kernels
from .scan import ends_row, reverse_scan, scan_blocks
from .trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor


def turn_mean(values: Tensor, tokens: Trainable) -> Tensor:
    """[N] float64: the mean of `values` [N] over a turn, on all its tokens; 0 outside."""
    if kernels.on_cpu(values):
        mean = torch.empty(len(values), dtype=torch.float64)
        kernels.turn_mean(*map(kernels.as_array, (values, tokens.mask, tokens.offsets, mean)))
        return mean
    last = _ends_turn(tokens)
    within = (~last).to(torch.float64)
    counted = tokens.only(values.to(torch.float64))
    # A turn's sum is at its first token; a second scan, forward, carries its mean to the others.
    sums, counts = (reverse_scan(x, within, tokens) for x in (counted, tokens.mask.to(torch.float64)))
    begins = last.roll(1) | ~tokens.mask.roll(1)
    before = tokens._replace(mask=tokens.mask.flip(0), offsets=(len(values) - tokens.offsets).flip(0))
    carried = scan_blocks(
        torch.where(begins, sums / counts.clamp(min=1), 0.0).flip(0), (~begins).double().flip(0), before
    )
    return tokens.only(carried.flip(0))


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
