"""The chain before the estimator: rewards are shaped, placed on tokens, charged with the KL, clipped and whitened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import TrajectoryError
from ...extras import torch
from ..chain_metrics import MEAN_KL, Metric, fraction, mean, summary
from ..kl import column_kl
from ..packed import PackedBatch, span_sum
from ..registry import Scope, get_estimator
from ..rewards import clip, credited, outcome_rewards, overlong_penalty, step_rewards, truncation_penalty
from ..segments import normalise, segment_sum, summarise, whiten, whole
from .config import ChainConfig, KLConfig, RewardConfig
from .step import ChainStep, State

if TYPE_CHECKING:
    from torch import Tensor


def shaping_steps(config: ChainConfig) -> Iterator[ChainStep]:
    """The steps before the estimator: shaping, placing on tokens, KL, clip, whitening."""
    definition = get_estimator(config.estimator)
    yield _reward_step(config.reward)
    by_token = "token_level_rewards" in definition.needs
    if by_token:
        yield _token_reward_step(config)
    if config.kl is not None and not config._charges_steps_late:
        yield _kl_step(config.kl, by_token, definition.level == "step", last_row=config.order == "verl")
    if config.token_reward_clip is not None:
        yield _token_reward_clip_step(config.token_reward_clip)
    if config.whiten_rewards:
        yield _whiten_rewards_step()


def _reward_step(config: RewardConfig) -> ChainStep:
    def run(state: State) -> State:
        batch = state.batch
        trained = ~batch.baseline
        state = state.with_metrics(summary("critic/score", summarise(pushed_rewards(config, batch), trained)))
        rewards = raw_rewards(config, batch)
        weight = trained.double()
        if config.statistics == "row":
            weight = weight * (batch.row_offsets[1:] - batch.row_offsets[:-1])
        rewards = normalise(
            rewards,
            batch.group_offsets,
            mean=config.mean,
            std=config.std,
            epsilon=config.epsilon,
            weight=weight,
            running=state.running,
        )
        if config.clip is not None:
            rewards, outside = clip(rewards, config.clip)
            state = state.with_metrics({"critic/reward_clip_frac": fraction(outside, trained)})
        return replace(state, batch=replace(batch, rewards=rewards))

    scopes = {config.mean, config.std}
    scope: Scope = "batch" if "batch" in scopes else "group" if "group" in scopes else "row"
    parts = [" + ".join(f"{weight} {name}" for name, weight in config.components.items())]
    parts += [f"truncated ones by {config.truncation}"] if config.truncation is not None else []
    parts += ["minus overlong penalty"] if config.overlong else []
    parts += [f"minus mean over {config.mean}"] if config.mean else []
    parts += [f"over std over {config.std}"] if config.std else []
    parts += [f"each {config.statistics} counted once"] if config.mean or config.std else []
    parts += [f"clip to {config.clip}"] if config.clip else []
    text = ", ".join(part for part in parts if part) or "as they came"
    return ChainStep("rewards", (), scope, text, run)


def raw_rewards(config: RewardConfig, batch: PackedBatch) -> Tensor:
    """[M] float64: rewards before normalisation; running moments are taken of these."""
    rewards = pushed_rewards(config, batch)
    if config.truncation is not None and batch.truncated is not None:
        rewards = truncation_penalty(rewards, batch.truncated, config.truncation)
    if config.overlong is None:
        return rewards
    lengths = segment_sum(batch.row_trainable, batch.row_offsets)
    return overlong_penalty(rewards, lengths, **config.overlong.model_dump())


def pushed_rewards(config: RewardConfig, batch: PackedBatch) -> Tensor:
    """[M] float64: the rewards as pushed, named ones summed by their weights, without any shaping."""
    if not config.components:
        return batch.rewards if batch.scores is None else batch.scores
    total = torch.zeros_like(batch.rewards)
    for name, weight in config.components.items():
        if name not in batch.components:
            present = ", ".join(batch.components) or "none"
            raise TrajectoryError(
                f"reward.components names {name!r}, the trajectories have {present}: give it to each, 0 if need be"
            )
        total = total + weight * batch.components[name]
    return total


def _token_reward_step(config: ChainConfig) -> ChainStep:
    make = {"outcome": outcome_rewards, "steps": step_rewards, "column": credited}[config.token_rewards]

    def run(state: State) -> State:
        return state.with_columns(token_level_rewards=make(state.batch))

    needs = ("response_mask", *(("token_level_rewards",) if config.token_rewards == "column" else ()))
    text = f"from {config.token_rewards}, on the last trainable token at or before its place"
    return ChainStep("token_rewards", needs, "row", text, run, ("token_level_rewards",))


def _kl_step(config: KLConfig, by_token: bool, by_step: bool, last_row: bool) -> ChainStep:
    """The KL counts tokens that a mask or a rejection has taken out: the policy has generated them.

    last_row: a trajectory's reward is charged the KL of its last row alone (verl).
    """

    def run(state: State) -> State:
        batch, coefficient = state.batch, state.kl_coefficient
        columns = (batch.column(config.log_probs), batch.column("ref_log_probs"), config.penalty)
        if by_token:
            rewards = batch.column("token_level_rewards")
            shaped, row_kl = column_kl(*columns, state.tokens, rewards, -coefficient)
            state = state.with_columns(token_level_rewards=shaped)
        generated = batch.generated_tokens
        if by_step or not by_token or batch.given_mask is not None:
            kl, row_kl = column_kl(*columns, generated)
        state = state.with_metrics(kl_metrics(row_kl, generated.counts, coefficient))
        whole_kl = row_kl[batch.row_offsets[1:] - 1] if last_row else segment_sum(row_kl, batch.row_offsets)
        state = replace(state, batch=replace(state.batch, rewards=batch.rewards - coefficient * whole_kl))
        if by_step:
            steps = batch.steps.rewards - coefficient * span_sum(batch, kl)
            state = replace(state, batch=state.batch.with_step_rewards(steps))
        return state

    makes = ("token_level_rewards",) if by_token else ()
    needs = ("response_mask", config.log_probs, "ref_log_probs", *makes)
    return ChainStep("kl", needs, "row", kl_text(config, ", off the rewards"), run, makes)


def kl_metrics(row_kl: Tensor, counts: Tensor, coefficient: float) -> dict[str, Metric]:
    """Of the KL [K] float64 summed over the tokens of rows, or of steps, of which there are `counts` [K]."""
    per_row, rows = row_kl / counts.clamp(min=1), (counts > 0).sum()
    return {
        MEAN_KL: Metric(segment_sum(per_row, whole(per_row))[0] / rows.clamp(min=1), rows),
        "critic/kl_coef": Metric(coefficient, rows),
    }


def kl_text(config: KLConfig, off: str) -> str:
    target = f", towards {config.target}" if config.target else ""
    return f"{config.penalty} of {config.log_probs} against ref_log_probs{off}{target}"


def _token_reward_clip_step(limit: float) -> ChainStep:
    def run(state: State) -> State:
        clipped, outside = clip(state.batch.column("token_level_rewards"), limit)
        share = mean(outside, state.tokens.mask)
        state = state.with_metrics({"critic/token_reward_clip_frac": share})
        return state.with_columns(token_level_rewards=clipped)

    needs = ("response_mask", "token_level_rewards")
    return ChainStep("token_reward_clip", needs, "row", f"clip to {limit}", run, ("token_level_rewards",))


def _whiten_rewards_step() -> ChainStep:
    def run(state: State) -> State:
        tokens = state.tokens
        whitened = whiten(state.batch.column("token_level_rewards"), tokens)
        return state.with_columns(token_level_rewards=whitened)

    needs = ("response_mask", "token_level_rewards")
    text = "token rewards to mean 0, std 1"
    return ChainStep("whiten_rewards", needs, "batch", text, run, ("token_level_rewards",))
