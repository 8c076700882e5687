"""Response-level rewards: normalisation with separate scopes of mean and std, clipping, and moments of all so far.

And how a rollout's length, difficulty and truncation change its reward or its weight, and on which token it stands.
The moments are merged batch by batch (Chan, Golub, LeVeque 1979).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from ..errors import ArgumentError, SettingError
from ..extras import torch
from . import kernels
from .packed import PackedBatch
from .scan import ends_row, reverse_scan
from .segments import Trainable, keyed_sum, moments, whole

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import Count, Flags, Rows


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared deviations. Immutable: a batch record carries a snapshot.

    The trainer merges a batch once, when it names the batch, so a redelivered batch does not count twice. Raises
    ArgumentError for numbers that are not finite, or a negative count or sum of squares.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    def __post_init__(self) -> None:
        if not (
            self.count >= 0 and self.squares >= 0 and math.isfinite(self.count + self.mean + self.squares)
        ):
            raise ArgumentError(
                f"moments count {self.count}, mean {self.mean}, squares {self.squares}: finite numbers are needed, "
                "count and squares of 0 or more"
            )

    @classmethod
    def of(cls, values: Tensor) -> RunningMoments:
        """The moments of `values` [K] alone."""
        if not len(values):
            return cls()
        stats = moments(values, whole(values))
        squares = stats.std.square() * (stats.size - 1)
        return cls(len(values), stats.mean[0].item(), squares[0].item())

    def merged(self, other: RunningMoments) -> RunningMoments:
        """The moments of both samples together."""
        if not other.count:
            return self
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        squares = self.squares + other.squares + delta**2 * self.count * other.count / count
        return RunningMoments(count, mean, squares)

    def updated(self, values: Tensor) -> RunningMoments:
        """The moments with `values` [K] added."""
        return self.merged(RunningMoments.of(values))

    @property
    def var(self) -> float:
        """Population variance; 1 while the count is 0."""
        return self.squares / self.count if self.count else 1.0

    @property
    def std(self) -> float:
        """Sample standard deviation, ddof 1; 1 while the count is 0, infinite (no scale) after one value."""
        if self.count > 1:
            return math.sqrt(self.squares / (self.count - 1))
        return math.inf if self.count else 1.0


NormScope = Literal["batch", "group", "running"]


def normalise(
    values: Tensor,
    group_offsets: Tensor,
    *,
    mean: NormScope | None,
    std: NormScope | None,
    epsilon: float = 1e-6,
    std_floor: float | None = 0.0,
    weight: Tensor | None = None,
    running: RunningMoments | None = None,
) -> Tensor:
    """(x - mean) / (std + epsilon), [K] float64; std has ddof 1, epsilon stands outside the root.

    Args:
      values: [K], in contiguous groups.
      group_offsets: [G + 1].
      mean, std: over what they are taken: the group, the batch, or all batches so far; None = not at all.
      std_floor: where std is not above it, as with one element or equal ones, the result is exactly 0. None gives NaN,
        or rounding noise divided by epsilon, as ROLL's reward_norm.
      weight: [K], how often an element counts in the statistics; None = once.
      running: for the scope "running", the moments that the caller has updated with this batch.

    Raises SettingError for the scope "running" without `running`.
    """
    values = values.to(torch.float64)
    offsets = {"batch": whole(values), "group": group_offsets}
    if running is None and "running" in (mean, std):
        raise SettingError("reward mean or std is 'running', but no running moments were given")
    result, stats = values, None
    if mean == "running" and running is not None:
        result = values - running.mean
    elif mean is not None:
        stats = moments(values, offsets[mean], weight)
        result = stats.centred
    if std is None:
        return result
    if std == "running" and running is not None:
        divisor = torch.full_like(values, running.std)
    else:
        stats = stats if stats is not None and mean == std else moments(values, offsets[std], weight)
        divisor = stats.std if std_floor is not None else torch.where(stats.size > 1, stats.std, torch.nan)
    if std_floor is None:
        return result / (divisor + epsilon)
    return torch.where(divisor > std_floor, result / (divisor + epsilon), 0.0)


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
