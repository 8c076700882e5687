"""Token-level rewards: where a reward that belongs to a trajectory, a step or an observation is placed.

A reward always ends on a trainable token, the last one at or before its place in its row: what follows an
action is credited to it. (ROLL puts it on the last attended token and loses it when that is an observation,
verl loses rewards on masked tokens.) A reward with no trainable token before it reaches nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed import PackedBatch
from .scan import blocks, next_in_row, reverse_scan


def outcome_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: the trajectory's reward on the last trainable token of each of its rows, else 0."""
    return _place(batch, batch.rewards[batch.row_trajectory], batch.cu_seqlens[:-1], batch.cu_seqlens[1:])


def step_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: each step's reward on the last trainable token up to the end of its span, else 0."""
    steps = batch.steps
    return _place(batch, steps.rewards, batch.cu_seqlens[:-1][steps.row], steps.end)


def credited(batch: PackedBatch) -> Tensor:
    """[N] float32: the column token_level_rewards, rewards on masked tokens moved to the action before."""
    rewards, mask = batch.column("token_level_rewards"), batch.column("response_mask").bool()
    pending = torch.where(mask, 0.0, rewards)
    passes_on = (~mask).to(torch.float64)
    waiting = reverse_scan(pending, passes_on, blocks(batch.cu_seqlens, batch.num_tokens))
    moved = rewards.to(torch.float64) + next_in_row(waiting, batch.cu_seqlens)
    return torch.where(mask, moved, 0.0).to(torch.float32)


def last_trainable(mask: Tensor, end: Tensor) -> Tensor:
    """[K] int64: the last token before each `end` [K] whose mask is set, -1 if there is none. mask [N]."""
    rank = torch.cumsum(mask.to(torch.int64), 0)
    where = torch.arange(len(mask), device=mask.device)
    position = rank.new_full((len(mask) + 1,), -1)
    position = position.scatter(0, torch.where(mask.bool(), rank, 0), where)
    position[0] = -1  # every masked token was written here
    ranks = torch.cat([rank.new_zeros(1), rank])
    return position[ranks[end]]


def _place(batch: PackedBatch, rewards: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Add each of `rewards` [K] at the last trainable token of its range; nothing where there is none."""
    at = last_trainable(batch.column("response_mask"), end)
    kept = torch.where(at >= start, rewards, 0.0)
    tokens = rewards.new_zeros(batch.num_tokens, dtype=torch.float64)
    return tokens.index_add(0, at.clamp(min=0), kept).to(torch.float32)
