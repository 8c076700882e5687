"""Token-level rewards: where a reward that belongs to a trajectory, a step or an observation is placed.

A reward always ends on a trainable token, the last one at or before its place in its row: what follows an
action is credited to it. (ROLL puts it on the last attended token and loses it when that is an observation,
verl loses rewards on masked tokens.) A reward with no trainable token before it reaches nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed import PackedBatch
from .trainable import Trainable, positions, trainable


def outcome_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: the trajectory's reward on the last trainable token of each of its rows, else 0."""
    rewards = batch.rewards[batch.row_trajectory]
    return _place(trainable(batch), rewards, batch.cu_seqlens[:-1], batch.cu_seqlens[1:])


def step_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: each step's reward on the last trainable token up to the end of its span, else 0."""
    steps = batch.steps
    return _place(trainable(batch), steps.rewards, batch.cu_seqlens[:-1][steps.row], steps.end)


def credited(batch: PackedBatch) -> Tensor:
    """[N] float32: the column token_level_rewards, rewards on masked tokens moved to the action before."""
    tokens = trainable(batch)
    rewards = batch.column("token_level_rewards")
    own = tokens.spread(tokens.pick(rewards))
    astray = positions((rewards.abs() > 0) & (batch.column("response_mask") == 0))
    row = torch.searchsorted(batch.cu_seqlens, astray, right=True) - 1
    moved = _place(tokens, rewards[astray].to(torch.float64), batch.cu_seqlens[row], astray)
    return own + moved


def _place(tokens: Trainable, rewards: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """[N] float32: each of `rewards` [K] added at the last trainable token of start .. end, if it has one."""
    at = tokens.last_before(end)
    kept = torch.where(at >= start, rewards, 0.0)
    placed = rewards.new_zeros(tokens.num_tokens)
    return placed.index_add_(0, at.clamp(min=0), kept).to(torch.float32)
