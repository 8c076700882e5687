"""The steps a chain is made of, in order: each a function from state to state with its needs and scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import SettingError
from .config import ChainConfig, KLConfig, RewardConfig
from .kl import approx_kl
from .metrics import Metric, fraction, summary
from .packed import Level, PackedBatch, expand, span_sum
from .registry import Estimator, Scope, get_estimator
from .rewards import clip, normalise
from .segments import segment_sum, whole
from .token_rewards import credited, outcome_rewards, step_rewards
from .whitening import whiten


@dataclass(frozen=True, slots=True)
class State:
    """What the steps hand on to each other."""

    batch: PackedBatch
    level: Level
    kl_coefficient: float
    advantages: Tensor | None = None  # [R], [S] or [N] float64
    returns: Tensor | None = None
    changed: Mapping[str, Tensor] = field(default_factory=dict)  # columns made or changed
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def with_metrics(self, metrics: Mapping[str, Metric]) -> State:
        return replace(self, metrics={**self.metrics, **metrics})

    def with_columns(self, **columns: Tensor) -> State:
        return replace(self, batch=self.batch.with_columns(**columns), changed={**self.changed, **columns})


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A function of the state, the columns it reads and makes, and how much of the batch it must see."""

    name: str
    needs: tuple[str, ...]
    scope: Scope
    text: str  # for people
    run: Callable[[State], State]
    makes: tuple[str, ...] = ()


def chain_steps(config: ChainConfig) -> Iterator[ChainStep]:
    """The steps of a configuration: rewards, KL, token rewards, estimator, whitening, clipping."""
    chosen = get_estimator(config.estimator)
    yield _reward_step(config.reward)
    by_token = "token_level_rewards" in chosen.needs
    if by_token:
        yield _token_reward_step(config)
    if config.kl is not None:
        yield _kl_step(config.kl, by_token, chosen.level == "step")
    if config.whiten_rewards:
        yield _whiten_rewards_step()
    yield _estimator_step(config, chosen)
    if config.whiten_advantages or config.advantage_clip:
        yield _finish_step(config, chosen.level)


def _reward_step(config: RewardConfig) -> ChainStep:
    def run(state: State) -> State:
        batch = state.batch
        trained = (~batch.baseline).double()
        state = state.with_metrics(summary("critic/score", batch.rewards, trained))
        weight = trained
        if config.statistics == "row":
            weight = trained * (batch.row_offsets[1:] - batch.row_offsets[:-1])
        rewards = normalise(
            batch.rewards,
            batch.group_offsets,
            mean=config.mean,
            std=config.std,
            epsilon=config.epsilon,
            weight=weight,
        )
        if config.clip is not None:
            rewards, outside = clip(rewards, config.clip)
            state = state.with_metrics({"critic/reward_clip_frac": fraction(outside, trained)})
        return replace(state, batch=replace(batch, rewards=rewards))

    scopes = {config.mean, config.std}
    scope: Scope = "batch" if "batch" in scopes else "group" if "group" in scopes else "row"
    parts = [f"minus mean over {config.mean}"] if config.mean else []
    parts += [f"over std over {config.std}"] if config.std else []
    parts += [f"each {config.statistics} counted once"] if parts else []
    parts += [f"clip to {config.clip}"] if config.clip else []
    text = ", ".join(parts) or "as they came"
    return ChainStep("rewards", (), scope, text, run)


def _token_reward_step(config: ChainConfig) -> ChainStep:
    make = {"outcome": outcome_rewards, "steps": step_rewards, "column": credited}[config.token_rewards]

    def run(state: State) -> State:
        return state.with_columns(token_level_rewards=make(state.batch))

    needs = ("response_mask", *(("token_level_rewards",) if config.token_rewards == "column" else ()))
    text = f"from {config.token_rewards}, on the last trainable token at or before its place"
    return ChainStep("token_rewards", needs, "row", text, run, ("token_level_rewards",))


def _kl_step(config: KLConfig, by_token: bool, by_step: bool) -> ChainStep:
    def run(state: State) -> State:
        batch, coefficient = state.batch, state.kl_coefficient
        mask = batch.column("response_mask").bool()
        kl = approx_kl(batch.column(config.log_probs), batch.column("ref_log_probs"), config.penalty)
        kl = torch.where(mask, kl, 0.0)
        row_kl = segment_sum(kl, batch.cu_seqlens)
        rewards = batch.rewards - coefficient * segment_sum(row_kl, batch.row_offsets)
        counted = batch.row_trainable > 0
        mean = torch.where(counted, row_kl / batch.row_trainable.clamp(min=1), 0.0)
        rows = counted.sum()
        state = state.with_metrics(
            {
                "critic/kl": Metric(segment_sum(mean, whole(mean))[0] / rows.clamp(min=1), rows),
                "critic/kl_coef": Metric(rewards.new_full((), coefficient), rows),
            }
        )
        state = replace(state, batch=replace(batch, rewards=rewards))
        if by_token:
            tokens = batch.column("token_level_rewards") - coefficient * kl
            state = state.with_columns(token_level_rewards=tokens)
        if by_step:
            steps = batch.steps
            step_kl = span_sum(batch, kl)
            state = replace(state, batch=state.batch.with_step_rewards(steps.rewards - coefficient * step_kl))
        return state

    needs = ("response_mask", config.log_probs, "ref_log_probs")
    text = f"{config.penalty} of {config.log_probs} against ref_log_probs, off the rewards"
    makes = ("token_level_rewards",) if by_token else ()
    return ChainStep("kl", (*needs, *makes), "row", text, run, makes)


def _whiten_rewards_step() -> ChainStep:
    def run(state: State) -> State:
        batch = state.batch
        mask = batch.column("response_mask")
        whitened = whiten(batch.column("token_level_rewards"), mask, batch.cu_seqlens)
        rewards = torch.where(mask.bool(), whitened, 0.0).to(torch.float32)
        return state.with_columns(token_level_rewards=rewards)

    needs = ("response_mask", "token_level_rewards")
    text = "token rewards to mean 0, std 1"
    return ChainStep("whiten_rewards", needs, "batch", text, run, ("token_level_rewards",))


def _estimator_step(config: ChainConfig, chosen: Estimator) -> ChainStep:
    options = {**chosen.options, **config.options}

    def run(state: State) -> State:
        estimate = chosen.function(state.batch, **options)
        if estimate.level != chosen.level:
            raise SettingError(
                f"estimator {chosen.name} returned level {estimate.level!r}, declared {chosen.level!r}: "
                f"register it with level={estimate.level!r}"
            )
        advantages, returns = estimate.advantages, estimate.returns
        if chosen.level == "token":
            mask = state.batch.column("response_mask").bool()
            advantages = torch.where(mask, advantages, 0.0)
            returns = None if returns is None else torch.where(mask, returns, 0.0)
        elif config.whiten_advantages or config.advantage_clip:
            returns = advantages if returns is None else returns
        weight = _weight(state.batch, chosen.level)
        metrics = {
            **summary("critic/rewards", state.batch.rewards, ~state.batch.baseline),
            **summary("critic/advantages", advantages, weight),
            **summary("critic/returns", advantages if returns is None else returns, weight),
        }
        return replace(state.with_metrics(metrics), advantages=advantages, returns=returns)

    needs = chosen.needs
    if chosen.level == "token" and "response_mask" not in needs:
        needs = (*needs, "response_mask")
    text = ", ".join([chosen.name, *(f"{name} {value}" for name, value in options.items())])
    return ChainStep("estimator", needs, chosen.scope, text, run)


def _finish_step(config: ChainConfig, level: Level) -> ChainStep:
    def run(state: State) -> State:
        batch, advantages = state.batch, state.advantages
        if advantages is None:
            raise SettingError("chain: whitening comes before the estimator")
        weight = _weight(batch, level)
        raw = advantages
        if config.whiten_advantages:
            segments = batch.cu_seqlens if level == "token" else whole(advantages)
            advantages = torch.where(weight > 0, whiten(advantages, weight, segments), 0.0)
        if config.advantage_clip is not None:
            advantages, outside = clip(advantages, config.advantage_clip)
            state = state.with_metrics({"critic/advantage_clip_frac": fraction(outside, weight)})
        state = state.with_metrics(summary("critic/advantages", advantages, weight))
        if config.raw_advantages:
            raw_column = expand(batch, level, raw)
            state = replace(state, changed={**state.changed, "raw_advantages": raw_column})
        return replace(state, advantages=advantages)

    parts = ["whiten over the batch"] if config.whiten_advantages else []
    parts += [f"clip to {config.advantage_clip}"] if config.advantage_clip else []
    needs_mask = level != "row" or config.raw_advantages
    return ChainStep(
        "advantages",
        ("response_mask",) if needs_mask else (),
        "batch" if config.whiten_advantages else "row",
        ", ".join(parts),
        run,
    )


def _weight(batch: PackedBatch, level: Level) -> Tensor:
    """How many trainable tokens each value of a level stands for.

    A step counts its span where the mask was not fetched: spans normally hold what the policy wrote.
    """
    if level == "row":
        return batch.row_trainable
    if level == "token":
        return batch.column("response_mask")
    steps = batch.steps
    if "response_mask" in batch.columns:
        return span_sum(batch, batch.column("response_mask"))
    return torch.where(batch.baseline[steps.trajectory], 0, steps.end - steps.start)
