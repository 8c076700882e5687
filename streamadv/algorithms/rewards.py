"""How a rollout's length, difficulty and truncation change its reward or its weight, and on which token it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np

from ..extras import torch
from . import kernels
from .packed import PackedBatch
from .scan import ends_row, reverse_scan
from .segments import Trainable, keyed_sum

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import Count, Flags, Rows


def clip(values: Tensor, limit: float | tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(`values` [K] held in -limit .. limit, or in the two bounds; which of them were outside [K] bool)."""
    lower, upper = limit if isinstance(limit, tuple) else (-limit, limit)
    return values.clamp(lower, upper), (values < lower) | (values > upper)


def difficulty_factor(difficulty: Tensor) -> Tensor:
    """[B]: 0.5 + 1.5 d, with `difficulty` d [B] held in 0 .. 1."""
    return 0.5 + 1.5 * difficulty.clamp(0, 1)


def length_factor(lengths: Tensor, counted: Tensor) -> Tensor:
    """[B]: 1.5 - (len - min) / (max - min), min and max over rows where `counted` [B] > 0; 1.5 if all are equal."""
    if not len(lengths):
        return lengths
    least = torch.where(counted > 0, lengths, torch.inf).amin()
    span = torch.where(counted > 0, lengths, -torch.inf).amax() - least
    return 1.5 - (lengths - least) / span.clamp(min=1e-8)


def overlong_penalty(
    rewards: Rows,
    lengths: Rows,
    *,
    max_length: Count,
    buffer: Count,
    factor: float = 1.0,
    capped: bool = True,
) -> Tensor:
    """[B]: rewards minus factor * excess / buffer, excess = max(0, length - (max_length - buffer)).

    DAPO (arXiv:2503.14476, eq. 13). rewards and lengths [B], lengths in trainable tokens. capped: at most one `factor`
    (the paper, OpenRLHF); verl and AReaL let it grow.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0).to(rewards.dtype)
    if capped:
        excess = excess.clamp(max=buffer)
    return rewards - excess / buffer * factor


def truncation_penalty(
    rewards: Rows, truncated: Annotated[Tensor, Flags(("B",), counts=False)], coefficient: float
) -> Tensor:
    """[B]: rewards of `truncated` rows times coefficient, or replaced by a negative coefficient (OpenRLHF)."""
    changed = torch.full_like(rewards, coefficient) if coefficient < 0 else rewards * coefficient
    return torch.where(truncated != 0, changed, rewards)


# On which token the reward of a trajectory, a step or an observation stands: always on a trainable one, the last one of
# its row at or before its position, because an action earns what follows it. A reward without a trainable token before
# it is lost. ROLL uses the last attended token and loses the reward if that is an observation; verl loses rewards on
# masked tokens.


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
