"""Steps about whole trajectories: which ones give gradient, and how much they count in the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...extras import torch
from ..chain_metrics import fraction, summary
from ..packed import PackedBatch, expand
from ..registry import Scope
from ..rewards import difficulty_factor, length_factor
from ..segments import Moments, moments, segment_sum, spread, summarise
from .config import ChainConfig, MaskConfig, RewardConfig, SampleWeightConfig
from .rewards import pushed_rewards
from .step import ChainStep, State

if TYPE_CHECKING:
    from torch import Tensor


def sample_steps(config: ChainConfig) -> Iterator[ChainStep]:
    """The steps about whole trajectories; they stand between the rewards and the estimator."""
    if config.masks is not None:
        yield _mask_step(config.masks, config.reward)
    if config.sample_weights is not None:
        yield _weight_step(config.sample_weights, config.reward)


def _mask_step(config: MaskConfig, reward: RewardConfig) -> ChainStep:
    by_group = config.difficulty_low is not None or config.difficulty_high is not None

    def run(state: State) -> State:
        batch = state.batch
        scores = pushed_rewards(reward, batch)
        passing = torch.ones_like(batch.baseline)
        if by_group:
            groups = _group_moments(batch, scores)
            low = -torch.inf if config.difficulty_low is None else config.difficulty_low
            high = torch.inf if config.difficulty_high is None else config.difficulty_high
            passing = passing & (((groups.mean > low) & (groups.mean < high)) | (groups.size < 2))
        lengths = segment_sum(batch.row_trainable, batch.row_offsets)
        if config.max_length is not None:
            passing = passing & (lengths < config.max_length)
        if config.wrong_max_length is not None:
            passing = passing & ((scores > 0) | (lengths < config.wrong_max_length))
        if config.truncated and batch.truncated is not None:
            passing = passing & ~batch.truncated
        metrics = {"actor/final_mask_ratio": fraction(passing, (~batch.baseline).double())}
        mask = batch.column("response_mask")
        row_passing = passing[batch.row_trajectory]
        mask = torch.where(spread(row_passing, batch.cu_seqlens, len(mask)), mask, torch.zeros_like(mask))
        return state.with_metrics(metrics).with_mask(mask)

    settings = config.model_dump(exclude_defaults=True)
    text = ", ".join(f"{name} {value}" for name, value in settings.items())
    scope: Scope = "group" if by_group else "row"
    return ChainStep("masks", ("response_mask",), scope, text, run, ("response_mask",))


def _weight_step(config: SampleWeightConfig, reward: RewardConfig) -> ChainStep:
    def run(state: State) -> State:
        batch = state.batch
        lengths = segment_sum(batch.row_trainable, batch.row_offsets)
        counted = lengths > 0
        weights = torch.ones_like(lengths)
        if config.difficulty:
            mean = _group_moments(batch, pushed_rewards(reward, batch)).mean
            weights = weights * difficulty_factor(1 - mean)
        if config.length:
            weights = weights * length_factor(lengths, counted)
        weights = torch.where(counted, weights, 0.0)
        weights = weights * counted.sum() / weights.sum().clamp(min=1e-8)
        column = expand(batch, "row", weights[batch.row_trajectory])
        state = state.with_metrics(summary("actor/sample_weights", summarise(weights, counted)))
        return state.with_columns(sample_weights=column)

    factors = [name for name, used in config.model_dump().items() if used]
    text = f"by {', '.join(factors)}, of mean 1 over the batch"
    return ChainStep("sample_weights", ("response_mask",), "batch", text, run, ("sample_weights",))


def _group_moments(batch: PackedBatch, scores: Tensor) -> Moments:
    """Of the `scores` [M], group by group; baselines do not count."""
    return moments(scores, batch.group_offsets, ~batch.baseline)
