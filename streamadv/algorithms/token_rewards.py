"""Token-level rewards: where a reward that belongs to a trajectory, a step or an observation is placed.

A reward always ends on a trainable token, the last one at or before its place in its row: what follows an
action is credited to it. (ROLL puts it on the last attended token and loses it when that is an observation,
verl loses rewards on masked tokens.) A reward with no trainable token before it reaches nobody.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .kernels import rewards as reward_kernels
from .packed import PackedBatch
from .scan import ends_row, reverse_scan
from .trainable import Trainable


def outcome_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: the trajectory's reward on the last trainable token of each of its rows, else 0."""
    rewards = batch.rewards[batch.row_trajectory]
    return _place(batch.trainable_tokens, rewards, batch.cu_seqlens[:-1], batch.cu_seqlens[1:])


def step_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: each step's reward on the last trainable token up to the end of its span, else 0."""
    steps = batch.steps
    return _place(batch.trainable_tokens, steps.rewards, batch.cu_seqlens[:-1][steps.row], steps.end)


def credited(batch: PackedBatch) -> Tensor:
    """[N]: the column token_level_rewards, rewards on masked tokens moved to the action before; its dtype."""
    return credited_rewards(batch.column("token_level_rewards"), batch.trainable_tokens)


def credited_rewards(rewards: Tensor, tokens: Trainable) -> Tensor:
    """[N]: `rewards` [N], those at tokens that do not count added to the one that counts before; NaN there is none."""
    if kernels.on_cpu(rewards):
        given, mask, offsets = map(kernels.as_array, (rewards, tokens.mask, tokens.offsets))
        if not kernels.has_values_outside(given, mask):
            return torch.from_numpy(given)
        found = np.empty_like(given)
        reward_kernels.credit(given, mask, offsets, found)
        return torch.from_numpy(found)
    known = torch.where(tokens.mask | (rewards.abs() > 0), rewards, 0.0).to(torch.float64)
    everything = tokens._replace(mask=torch.ones_like(tokens.mask))
    taken_over = (~tokens.mask.roll(-1) & ~ends_row(tokens)).to(torch.float64)
    return tokens.only(reverse_scan(known, taken_over, everything)).to(rewards.dtype)


def row_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B] float64: row sums of padded `rewards` [B, T], of every token; NaN is none where `mask` [B, T] is 0."""
    if not kernels.on_cpu(rewards):
        return torch.where((mask != 0) | ~rewards.isnan(), rewards, 0.0).sum(1, dtype=torch.float64)
    sums = torch.empty(len(rewards), dtype=torch.float64)
    reward_kernels.row_rewards(*map(kernels.as_array, (rewards, mask, sums)))
    return sums


def _place(tokens: Trainable, rewards: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """[N] float32: each of `rewards` [K] added at the last trainable token of start .. end, if it has one."""
    size = len(tokens.mask)
    if kernels.on_cpu(rewards):
        found = np.empty(size, np.float32)
        reward_kernels.place(*map(kernels.as_array, (rewards, start, end, tokens.mask)), found)
        return torch.from_numpy(found)
    placed = rewards.new_zeros(size)
    position = torch.arange(size, device=placed.device)
    last = torch.cummax(torch.where(tokens.mask, position, -1), 0).values  # at or before each token
    at = torch.cat([last.new_full((1,), -1), last])[end]
    kept = torch.where(at >= start, rewards, 0.0)
    return placed.index_put_((at.clamp(min=0),), kept, accumulate=True).to(torch.float32)
