"""Token-level rewards: on which token the reward of a trajectory, a step or an observation stands.

A reward always stands on a trainable token: the last one of its row at or before its position, because an action earns
what follows it. A reward without a trainable token before it is lost. ROLL uses the last attended token and loses the
reward if that is an observation; verl loses rewards on masked tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..extras import torch
from . import kernels
from .packed import PackedBatch
from .scan import ends_row, reverse_scan
from .segments import Trainable, keyed_sum

if TYPE_CHECKING:
    from torch import Tensor


def outcome_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: the trajectory's reward on the last trainable token of all its rows, else 0."""
    rewards = batch.rewards[batch.row_trajectory]
    return _place(batch.trainable_tokens, rewards, batch.cu_seqlens[:-1], batch.cu_seqlens[1:])


def step_rewards(batch: PackedBatch) -> Tensor:
    """[N] float32: a step's reward on the last trainable token before the end of its span, else 0."""
    steps = batch.steps
    return _place(batch.trainable_tokens, steps.rewards, batch.cu_seqlens[:-1][steps.row], steps.end)


def credited(batch: PackedBatch) -> Tensor:
    """[N]: the column token_level_rewards, with rewards on masked tokens moved to the action before; its dtype."""
    return credited_rewards(batch.column("token_level_rewards"), batch.trainable_tokens)


def credited_rewards(rewards: Tensor, tokens: Trainable) -> Tensor:
    """[N]: `rewards` [N], those at tokens that do not count moved to the previous one that does; NaN there is none."""
    if kernels.on_cpu(rewards):
        array, *others = map(kernels.as_array, (rewards, *tokens))
        moved = np.empty_like(array)
        kernels.credit(array, *others, moved)
        return torch.from_numpy(moved)
    without_nan = torch.where(tokens.mask | (rewards.abs() > 0), rewards, 0.0).to(torch.float64)
    all_tokens = tokens._replace(mask=torch.ones_like(tokens.mask))
    next_is_masked = (~tokens.mask.roll(-1) & ~ends_row(tokens)).to(torch.float64)
    return tokens.only(reverse_scan(without_nan, next_is_masked, all_tokens)).to(rewards.dtype)


def row_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B] float64: row sums of padded `rewards` [B, T] over all tokens; NaN is none where `mask` [B, T] is 0."""
    sums = rewards.sum(1, dtype=torch.float64)
    if not sums.isnan().any():
        return sums
    return torch.where((mask != 0) | ~rewards.isnan(), rewards, 0.0).sum(1, dtype=torch.float64)


def _place(tokens: Trainable, rewards: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """[N] float32: `rewards` [K] added at the last trainable token of their spans start .. end, if they have one."""
    before = tokens.before
    last = torch.searchsorted(before, before[end]) - 1  # the last that counts before `end`, -1 without any
    inside = torch.where(last >= start, rewards, 0.0)
    return keyed_sum(inside, last + 1, len(tokens.mask) + 1)[1:].to(torch.float32)
