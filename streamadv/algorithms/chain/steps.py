"""The steps a chain is made of, in order: each a function from state to state with its needs and scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...errors import SettingError, TrajectoryError
from .. import kernels
from ..chain_metrics import Metric, fraction, mean, summary
from ..kernels import rewards as reward_kernels
from ..kl import column_kl
from ..length_penalties import overlong_penalty, truncation_penalty
from ..packed import Level, PackedBatch, expand, span_sum
from ..registry import Estimator, Scope, get_estimator
from ..rewards import clip, normalise
from ..running_moments import RunningMoments
from ..segments import segment_sum, whole
from ..token_rewards import credited, outcome_rewards, step_rewards
from ..trainable import Trainable
from ..whitening import whiten, whiten_weighted
from .config import ChainConfig, DistillConfig, KLConfig, RewardConfig
from .estimating import estimate


@dataclass(frozen=True, slots=True)
class State:
    """What the steps hand on to each other."""

    batch: PackedBatch
    level: Level
    kl_coefficient: float = 0.0
    running: RunningMoments | None = None
    tokens: Trainable | None = None  # where the mask was fetched
    advantages: Tensor | None = None  # [R] or [S] float64; at level token [N] float32, 0 where masked
    returns: Tensor | None = None
    changed: Mapping[str, Tensor] = field(default_factory=dict)  # columns made or changed
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    estimated: Mapping[str, Metric] = field(default_factory=dict)  # of the estimate itself; must be finite

    def with_metrics(self, metrics: Mapping[str, Metric]) -> State:
        return replace(self, metrics={**self.metrics, **metrics})

    def with_columns(self, **columns: Tensor) -> State:
        return replace(self, batch=self.batch.with_columns(**columns), changed={**self.changed, **columns})

    def with_mask(self, mask: Tensor) -> State:
        """The state with a narrowed response_mask [N]."""
        batch = self.batch
        if batch.given_mask is None:
            batch = replace(batch, given_mask=batch.column("response_mask"))
        return counted_anew(replace(self, batch=batch).with_columns(response_mask=mask))


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A function of the state, the columns it reads and makes, and how much of the batch it must see."""

    name: str
    needs: tuple[str, ...]
    scope: Scope
    text: str  # for people
    run: Callable[[State], State]
    makes: tuple[str, ...] = ()


def counted_anew(state: State) -> State:
    """The state with its trainable tokens taken from response_mask, if it has one: a step may narrow it."""
    batch = state.batch
    if "response_mask" not in batch.columns:
        return state
    tokens = batch.trainable_tokens
    return replace(state, batch=replace(batch, row_trainable=tokens.counts), tokens=tokens)


def known_tokens(state: State) -> Trainable:
    """The trainable tokens; TrajectoryError when the batch came without response_mask."""
    return state.tokens or state.batch.trainable_tokens


def shaping_steps(config: ChainConfig) -> Iterator[ChainStep]:
    """What happens to rewards before the estimator: shaping, placing on tokens, KL, clip, whitening."""
    chosen = get_estimator(config.estimator)
    yield _reward_step(config.reward)
    by_token = "token_level_rewards" in chosen.needs
    if by_token:
        yield _token_reward_step(config)
    if config.kl is not None:
        yield _kl_step(config.kl, by_token, chosen.level == "step")
    if config.token_reward_clip is not None:
        yield _token_reward_clip_step(config.token_reward_clip)
    if config.whiten_rewards:
        yield _whiten_rewards_step()


def estimating_steps(config: ChainConfig) -> Iterator[ChainStep]:
    """The estimator and what is done to its advantages."""
    chosen = get_estimator(config.estimator)
    yield _estimator_step(config, chosen)
    if config.distill is not None:
        yield _distill_step(config.distill, config.raw_advantages)
    if config.whiten_advantages or config.advantage_clip:
        yield _finish_step(config, "token" if config.distill else chosen.level)


def _reward_step(config: RewardConfig) -> ChainStep:
    def run(state: State) -> State:
        batch = state.batch
        trained = (~batch.baseline).double()
        state = state.with_metrics(summary("critic/score", given_rewards(config, batch), trained))
        rewards = raw_rewards(config, batch)
        weight = trained
        if config.statistics == "row":
            weight = trained * (batch.row_offsets[1:] - batch.row_offsets[:-1])
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
    """[M] float64: rewards before they are normalised, what running moments are taken of."""
    rewards = given_rewards(config, batch)
    if config.truncation is not None and batch.truncated is not None:
        rewards = truncation_penalty(rewards, batch.truncated, config.truncation)
    if config.overlong is None:
        return rewards
    lengths = segment_sum(batch.row_trainable, batch.row_offsets)
    return overlong_penalty(rewards, lengths, **config.overlong.model_dump())


def given_rewards(config: RewardConfig, batch: PackedBatch) -> Tensor:
    """[M] float64: the rewards as they came, named ones summed, whatever was done to them since."""
    if config.components:
        return _summed(batch, config.components)
    return batch.rewards if batch.scores is None else batch.scores


def _summed(batch: PackedBatch, weights: Mapping[str, float]) -> Tensor:
    """[M] float64: weighted sum of named rewards."""
    total = torch.zeros_like(batch.rewards)
    for name, weight in weights.items():
        if name not in batch.components:
            known = ", ".join(batch.components) or "none"
            raise TrajectoryError(f"reward.components names {name!r}, the trajectories have {known}")
        total = total + weight * batch.components[name]
    return total


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
        tokens = known_tokens(state)
        kl = column_kl(batch.column(config.log_probs), batch.column("ref_log_probs"), config.penalty)
        if by_token:
            shaped, row_kl = charged(batch.column("token_level_rewards"), kl, coefficient, tokens)
            state = state.with_columns(token_level_rewards=shaped)
        else:
            row_kl = tokens.row_sum(kl)
        rewards = batch.rewards - coefficient * segment_sum(row_kl, batch.row_offsets)
        counted = batch.row_trainable > 0
        per_row = torch.where(counted, row_kl / batch.row_trainable.clamp(min=1), 0.0)
        rows = counted.sum()
        state = state.with_metrics(
            {
                "critic/kl": Metric(segment_sum(per_row, whole(per_row))[0] / rows.clamp(min=1), rows),
                "critic/kl_coef": Metric(rewards.new_full((), coefficient), rows),
            }
        )
        state = replace(state, batch=replace(state.batch, rewards=rewards))
        if by_step:
            step_kl = span_sum(batch, tokens.only(kl))
            steps = batch.steps.rewards - coefficient * step_kl
            state = replace(state, batch=state.batch.with_step_rewards(steps))
        return state

    makes = ("token_level_rewards",) if by_token else ()
    needs = ("response_mask", config.log_probs, "ref_log_probs", *makes)
    adaptive = f", towards {config.target}" if config.target else ""
    text = f"{config.penalty} of {config.log_probs} against ref_log_probs, off the rewards{adaptive}"
    return ChainStep("kl", needs, "row", text, run, makes)


def _token_reward_clip_step(limit: float) -> ChainStep:
    def run(state: State) -> State:
        clipped, outside = clip(state.batch.column("token_level_rewards"), limit)
        share = mean(outside, known_tokens(state).mask)
        state = state.with_metrics({"critic/token_reward_clip_frac": share})
        return state.with_columns(token_level_rewards=clipped)

    needs = ("response_mask", "token_level_rewards")
    return ChainStep("token_reward_clip", needs, "row", f"clip to {limit}", run, ("token_level_rewards",))


def _whiten_rewards_step() -> ChainStep:
    def run(state: State) -> State:
        tokens = known_tokens(state)
        whitened = whiten(state.batch.column("token_level_rewards"), tokens)
        return state.with_columns(token_level_rewards=whitened)

    needs = ("response_mask", "token_level_rewards")
    text = "token rewards to mean 0, std 1"
    return ChainStep("whiten_rewards", needs, "batch", text, run, ("token_level_rewards",))


def _estimator_step(config: ChainConfig, chosen: Estimator) -> ChainStep:
    options = {**chosen.options, **config.options}
    changed_later = bool(config.whiten_advantages or config.advantage_clip or config.distill)
    level: Level = "token" if config.distill else chosen.level

    def run(state: State) -> State:
        batch = state.batch
        found = estimate(chosen, batch, options)
        weight = level_weight(state)

        def settled(values: Tensor) -> Tensor:
            if level == "token":
                return _on_tokens(state, chosen.level, values)
            return values.masked_fill((weight == 0) & ~values.isfinite(), 0)

        advantages = settled(found.advantages)
        returns = None if found.returns is None else settled(found.returns)
        estimated = summary("advantages", advantages, weight)
        of_returns = estimated
        if returns is not None:
            of_returns = summary("returns", returns, weight)
        metrics = {
            **summary("critic/rewards", batch.rewards, ~batch.baseline),
            **{f"critic/returns/{_ending(name)}": metric for name, metric in of_returns.items()},
        }
        if changed_later:  # what changes them tells of them
            returns = advantages if returns is None else returns
        else:
            metrics |= {f"critic/{name}": metric for name, metric in estimated.items()}
        state = replace(state.with_metrics(metrics), estimated={**estimated, **of_returns})
        return replace(state, advantages=advantages, returns=returns)

    needs = chosen.needs
    if level == "token" and "response_mask" not in needs:
        needs = (*needs, "response_mask")
    text = ", ".join([chosen.name, *(f"{name} {value}" for name, value in options.items())])
    return ChainStep("estimator", needs, chosen.scope, text, run)


def _distill_step(config: DistillConfig, keep_raw: bool) -> ChainStep:
    def run(state: State) -> State:
        batch, before = state.batch, state.advantages
        if before is None:
            raise SettingError("chain: distillation comes before the estimator")
        tokens = known_tokens(state)
        kl = tokens.only(
            column_kl(batch.column(config.log_probs), batch.column("teacher_log_probs"), config.penalty)
        )
        advantages = -config.coefficient * kl
        returns = state.returns
        if config.only:
            returns = advantages
        else:
            advantages = advantages + before
        metrics = {
            "critic/distill_kl": mean(kl, tokens.mask),
            **summary("critic/advantages", advantages, tokens.mask),
        }
        if keep_raw:
            state = replace(state, changed={**state.changed, "raw_advantages": before})
        return replace(state.with_metrics(metrics), advantages=advantages, returns=returns)

    needs = ("response_mask", config.log_probs, "teacher_log_probs")
    text = f"{'only ' if config.only else ''}minus {config.coefficient} {config.penalty} against teacher_log_probs"
    return ChainStep("distill", needs, "row", text, run)


def _finish_step(config: ChainConfig, level: Level) -> ChainStep:
    keep_raw = config.raw_advantages and config.distill is None

    def run(state: State) -> State:
        batch, advantages = state.batch, state.advantages
        if advantages is None:
            raise SettingError("chain: whitening comes before the estimator")
        weight, raw = level_weight(state), advantages
        if config.whiten_advantages and level == "token":
            advantages = whiten(advantages, known_tokens(state))
        elif config.whiten_advantages:
            advantages = torch.where(weight > 0, whiten_weighted(advantages, weight), 0.0)
        if config.advantage_clip is not None:
            advantages, outside = clip(advantages, config.advantage_clip)
            state = state.with_metrics({"critic/advantage_clip_frac": fraction(outside, weight)})
        state = state.with_metrics(summary("critic/advantages", advantages, weight))
        if keep_raw:
            column = raw if level == "token" else expand(batch, level, raw)
            state = replace(state, changed={**state.changed, "raw_advantages": column})
        return replace(state, advantages=advantages)

    parts = ["whiten over the batch"] if config.whiten_advantages else []
    parts += [f"clip to {config.advantage_clip}"] if config.advantage_clip else []
    needs = ("response_mask",) if level != "row" or keep_raw else ()
    scope: Scope = "batch" if config.whiten_advantages else "row"
    return ChainStep("advantages", needs, scope, ", ".join(parts), run)


def level_weight(state: State) -> Tensor:
    """How many trainable tokens each value of the state's level stands for; at level token the mask.

    A step counts its span where the mask was not fetched: spans normally hold what the policy wrote.
    """
    batch, steps = state.batch, state.batch.steps
    if state.level == "token":
        return known_tokens(state).mask
    if state.level == "row":
        return batch.row_trainable
    if "response_mask" in batch.columns:
        return span_sum(batch, batch.column("response_mask"))
    return torch.where(batch.baseline[steps.trajectory], 0, steps.end - steps.start)


def charged(rewards: Tensor, kl: Tensor, coefficient: float, tokens: Trainable) -> tuple[Tensor, Tensor]:
    """(`rewards` - coefficient * `kl` at the tokens that count, [N] float32; the row sums of kl, [R] float64)."""
    if not kernels.on_cpu(kl):
        return (rewards - coefficient * tokens.only(kl)).to(torch.float32), tokens.row_sum(kl)
    shaped, sums = np.empty(len(kl), np.float32), np.empty(len(tokens.offsets) - 1)
    reward, amount, mask, offsets = map(kernels.as_array, (rewards, kl, tokens.mask, tokens.offsets))
    reward_kernels.charge(reward, amount, float(coefficient), mask, offsets, shaped, sums)
    return torch.from_numpy(shaped), torch.from_numpy(sums)


def _ending(name: str) -> str:
    return name.rpartition("/")[2]


def _on_tokens(state: State, level: Level, values: Tensor) -> Tensor:
    """[N] float32: an estimate's values on the tokens they belong to, 0 where masked."""
    if level == "token":
        return known_tokens(state).only(values.to(torch.float32))
    return expand(state.batch, level, values)
