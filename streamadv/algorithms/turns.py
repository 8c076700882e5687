"""Runs: maximal stretches of consecutive trainable tokens in a row, i.e. the turns of an agent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .scan import ends_row, reverse_scan, scan_blocks
from .trainable import Trainable


def turn_mean(values: Tensor, tokens: Trainable) -> Tensor:
    """[N] float64: the mean of `values` [N] over each run, on all its tokens; 0 outside."""
    if kernels.on_cpu(values):
        mean = torch.empty(len(values), dtype=torch.float64)
        kernels.turn_mean(*map(kernels.as_array, (values, tokens.mask, tokens.offsets, mean)))
        return mean
    last = _ends_run(tokens)
    within = (~last).to(torch.float64)
    known = tokens.only(values.to(torch.float64))
    # A run's sum stands at its first token; from there on each token takes over that of the one before.
    sums, counts = (reverse_scan(each, within, tokens) for each in (known, tokens.mask.to(torch.float64)))
    begins = last.roll(1) | ~tokens.mask.roll(1)
    before = tokens._replace(mask=tokens.mask.flip(0), offsets=(len(values) - tokens.offsets).flip(0))
    carried = scan_blocks(
        torch.where(begins, sums / counts.clamp(min=1), 0.0).flip(0), (~begins).double().flip(0), before
    )
    return tokens.only(carried.flip(0))


def turn_returns(rewards: Tensor, tokens: Trainable, gamma: float) -> Tensor:
    """[N]: G = reward at the run's last token + gamma * G of the row's next run, on all its tokens; 0 outside.

    The return of ROLL's agentic_reinforce: time advances by one per turn. `rewards` [N]; those elsewhere do
    not count. Same dtype as the rewards.
    """
    if kernels.on_cpu(rewards):
        given, mask, offsets = map(kernels.as_array, (rewards, tokens.mask, tokens.offsets))
        returns = np.empty_like(given)
        kernels.turn_returns(given, mask, offsets, gamma, returns)
        return torch.from_numpy(returns)
    last = _ends_run(tokens)
    step = torch.where(last, gamma, 1.0)
    return reverse_scan(torch.where(last, rewards, 0.0), step, tokens)


def _ends_run(tokens: Trainable) -> Tensor:
    """[N] bool: tokens that count with none behind them, in their row, that does."""
    return tokens.mask & (~tokens.mask.roll(-1) | ends_row(tokens))
