"""Runs: maximal stretches of consecutive trainable tokens in a row, i.e. the turns of an agent."""

from __future__ import annotations

import torch
from torch import Tensor

from .scan import blocks, next_in_row, reverse_scan
from .segments import segment_sum


def run_numbers(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] int64: runs counted from 1 along the packed batch on trainable tokens, 0 elsewhere. mask [N]."""
    counted = mask != 0
    previous = torch.cat([counted.new_zeros(1), counted[:-1]])
    row_start = torch.zeros(len(mask) + 1, dtype=torch.bool, device=mask.device)
    row_start[cu_seqlens] = True
    begins = counted & (~previous | row_start[:-1])
    return torch.where(counted, torch.cumsum(begins, 0), 0)


def run_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] float64: on trainable tokens the mean of `values` over their run, 0 elsewhere."""
    counted = mask != 0
    number = run_numbers(mask, cu_seqlens)
    passed = torch.cummax(number, 0).values  # ascending also across the gaps
    offsets = torch.searchsorted(passed, torch.arange(len(mask) + 2, device=mask.device))
    total = segment_sum(torch.where(counted, values, 0.0), offsets)
    length = segment_sum(counted, offsets)
    return torch.where(counted, (total / length.clamp(min=1))[passed], 0.0)


def run_returns(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """[N] float64: G = reward at the run's last token + gamma * G of the row's next run, on all its tokens.

    The return of ROLL's agentic_reinforce: time advances by one per turn. Rewards elsewhere do not count.
    """
    counted = mask != 0
    following = next_in_row(counted.to(torch.float64), cu_seqlens) != 0
    last = counted & ~following
    # At a run's last token the reward enters and what comes later is discounted once; all else passes on.
    entering = torch.where(last, rewards.to(torch.float64), 0.0)
    discount = torch.where(last, gamma, torch.ones_like(entering))
    returns = reverse_scan(entering, discount, blocks(cu_seqlens, len(mask)))
    return torch.where(counted, returns, 0.0)
