"""From rewards to advantages: the estimator, distillation, whitening and clipping.

An estimator may be a user's: what it raises is named, and what it returns is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import EstimatorError, SettingError, StreamadvError
from ...extras import torch
from ...messages import brief, one_line
from ..chain_metrics import fraction, mean, summary
from ..kl import column_kl
from ..packed import Level, PackedBatch, ends_of, expand, span_sum, token_step
from ..registry import Estimate, Estimator, Scope, get_estimator
from ..rewards import clip
from ..scan import scan_segments
from ..segments import Summary, summarise, whiten, whiten_weighted
from .config import ChainConfig, DistillConfig, KLConfig
from .rewards import kl_metrics, kl_text
from .step import ChainStep, State

if TYPE_CHECKING:
    from torch import Tensor


def estimating_steps(config: ChainConfig) -> Iterator[ChainStep]:
    """The estimator, and the steps that change its advantages."""
    definition = get_estimator(config.estimator)
    yield _estimator_step(config, definition)
    if config.kl is not None and config._charges_steps_late:
        yield _kl_to_go_step(config.kl)
    if config.distill is not None:
        yield _distill_step(config.distill, config.raw_advantages)
    if config.whiten_advantages or config.advantage_clip:
        yield _finish_step(config, config.level)


def _estimator_step(config: ChainConfig, definition: Estimator) -> ChainStep:
    options = {**definition.options, **config.options}
    level = config.level
    changed_later = bool(
        config.whiten_advantages or config.advantage_clip or config.distill or config._charges_steps_late
    )

    def run(state: State) -> State:
        batch = state.batch
        result = estimate(definition, batch, options)
        weight = level_weight(state)

        def at_level(values: Tensor) -> tuple[Tensor, Summary]:
            if level != "token":
                values = values.masked_fill((weight == 0) & ~values.isfinite(), 0)
            elif definition.level != "token":
                values = expand(batch, definition.level, values)
            else:
                values = values.to(torch.float32)
            known = summarise(values, weight)
            return values if level != "token" else state.tokens.only(values), known

        advantages, known = at_level(result.advantages)
        of_advantages = summary("advantages", known)
        returns, of_returns = None, of_advantages
        if result.returns is not None:
            returns, known_returns = at_level(result.returns)
            of_returns = summary("returns", known_returns)
        metrics = {
            **summary("critic/rewards", summarise(batch.rewards, ~batch.baseline)),
            **{f"critic/returns/{name.rpartition('/')[2]}": metric for name, metric in of_returns.items()},
        }
        if changed_later:  # the step that changes the advantages reports them
            returns = advantages if returns is None else returns
        else:
            metrics |= {f"critic/{name}": metric for name, metric in of_advantages.items()}
        return replace(
            state.with_metrics(metrics),
            advantages=advantages,
            returns=returns,
            summary=known,
            estimated={**of_advantages, **of_returns},
        )

    needs = definition.needs
    if level == "token" and "response_mask" not in needs:
        needs = (*needs, "response_mask")
    text = ", ".join([definition.name, *(f"{name} {value}" for name, value in options.items())])
    return ChainStep("estimator", needs, definition.scope, text, run)


def _kl_to_go_step(config: KLConfig) -> ChainStep:
    """Advantages and returns minus coefficient * KL of the token and of later ones in its step, undiscounted (ROLL)."""

    def run(state: State) -> State:
        batch, advantages, returns = state.batch, state.advantages, state.returns
        assert advantages is not None  # a chain is not cut between the estimator and this step
        mask, generated = state.tokens.mask, batch.generated_tokens
        log_probs, ref_log_probs = batch.column(config.log_probs), batch.column("ref_log_probs")
        kl, _ = column_kl(log_probs, ref_log_probs, config.penalty, generated)
        step = token_step(batch)
        offsets = ends_of(torch.unique_consecutive(step, return_counts=True)[1])
        term = state.kl_coefficient * scan_segments(kl, 1.0, offsets)
        term = torch.where(mask & (step >= 0), term, 0.0)
        advantages = advantages - term
        known = summarise(advantages, mask)
        of_steps = span_sum(batch, kl), span_sum(batch, generated.mask.double())
        metrics = {**kl_metrics(*of_steps, state.kl_coefficient), **summary("critic/advantages", known)}
        returns = None if returns is None else returns - term
        return replace(state.with_metrics(metrics), advantages=advantages, returns=returns, summary=known)

    needs = ("response_mask", config.log_probs, "ref_log_probs")
    text = kl_text(config, " to the end of the step, off the advantages")
    return ChainStep("kl_to_go", needs, "row", text, run)


def _distill_step(config: DistillConfig, keep_raw: bool) -> ChainStep:
    teachers = {f"teacher_log_probs_{name}": coefficient for name, coefficient in config.teachers.items()}
    teachers = teachers or {"teacher_log_probs": config.coefficient}

    def run(state: State) -> State:
        batch, before = state.batch, state.advantages
        assert before is not None  # a chain is not cut between the estimator and this step
        tokens, log_probs = state.tokens, batch.column(config.log_probs)
        kls = [column_kl(log_probs, batch.column(name), config.penalty, tokens)[0] for name in teachers]
        terms = [-coefficient * kl for coefficient, kl in zip(teachers.values(), kls, strict=True)]
        kl, term = (torch.stack(each).sum(0) if len(each) > 1 else each[0] for each in (kls, terms))
        advantages, returns = (term, term) if config.only else (term + before, state.returns)
        known = summarise(advantages, tokens.mask)
        metrics = {
            "critic/distill_kl": mean(kl, tokens.mask),
            **summary("critic/advantages", known),
        }
        if keep_raw:
            state = replace(state, changed={**state.changed, "raw_advantages": before})
        return replace(state.with_metrics(metrics), advantages=advantages, returns=returns, summary=known)

    needs = ("response_mask", config.log_probs, *teachers)
    parts = [f"minus {coefficient} {config.penalty} against {name}" for name, coefficient in teachers.items()]
    text = f"{'only ' if config.only else ''}{', '.join(parts)}"
    return ChainStep("distill", needs, "row", text, run)


def _finish_step(config: ChainConfig, level: Level) -> ChainStep:
    keep_raw = config.raw_advantages and config.distill is None

    def run(state: State) -> State:
        batch, advantages = state.batch, state.advantages
        assert advantages is not None  # as above
        weight, raw, known = level_weight(state), advantages, state.summary
        if config.whiten_advantages and level == "token":
            advantages = whiten(advantages, state.tokens, summary=known)
            known = None if known is None else known.whitened()
        elif config.whiten_advantages:
            advantages, known = torch.where(weight > 0, whiten_weighted(advantages, weight), 0.0), None
        if config.advantage_clip is not None:
            advantages, outside = clip(advantages, config.advantage_clip)
            known = None
            state = state.with_metrics({"critic/advantage_clip_frac": fraction(outside, weight)})
        known = summarise(advantages, weight) if known is None else known
        state = state.with_metrics(summary("critic/advantages", known))
        if keep_raw:
            column = raw if level == "token" else expand(batch, level, raw)
            state = replace(state, changed={**state.changed, "raw_advantages": column})
        return replace(state, advantages=advantages, summary=known)

    parts = ["whiten over the batch"] if config.whiten_advantages else []
    parts += [f"clip to {config.advantage_clip}"] if config.advantage_clip else []
    needs = ("response_mask",) if level != "row" or keep_raw else ()
    scope: Scope = "batch" if config.whiten_advantages else "row"
    return ChainStep("advantages", needs, scope, ", ".join(parts), run)


def level_weight(state: State) -> Tensor:
    """How many trainable tokens a value of the state's level stands for: [R], [S], or at level token the mask [N].

    A step counts its whole span if the mask was not fetched, because a span normally holds only the policy's tokens.
    """
    batch, steps = state.batch, state.batch.steps
    if state.level == "token":
        return state.tokens.mask
    if state.level == "row":
        return batch.row_trainable
    if "response_mask" in batch.columns:
        return span_sum(batch, batch.column("response_mask"))
    return torch.where(batch.baseline[steps.trajectory], 0, steps.end - steps.start)


def estimate(definition: Estimator, batch: PackedBatch, options: Mapping[str, Any]) -> Estimate:
    """The estimate of `definition` for `batch`: floating point, one value per row, step or token, no gradient.

    Raises EstimatorError if the function raises anything except an error of streamadv, or returns anything else;
    SettingError for another level than declared.
    """
    try:
        result: object = definition.function(batch, **options)
    except StreamadvError:
        raise
    except (Exception, SystemExit) as error:
        text = f"estimator {definition.name} raised {type(error).__name__}: {error}"
        raise EstimatorError(one_line(text.partition("\n")[0])) from error
    if not isinstance(result, Estimate):
        raise EstimatorError(
            f"estimator {definition.name} returned {_kind(result)}, needs Estimate({definition.level!r}, advantages)"
        )
    if result.level != definition.level:
        raise SettingError(
            f"estimator {definition.name} returned level {result.level!r}, declared {definition.level!r}: "
            f"register it with level={result.level!r}"
        )
    checked: dict[str, Any] = {}
    for name in ("advantages", "returns"):
        values: object = getattr(result, name)
        if name == "returns" and values is None:
            continue
        where = f"estimator {definition.name}: {name}"
        if not isinstance(values, torch.Tensor):
            raise EstimatorError(f"{where} is {_kind(values)}, needs a floating-point tensor")
        if not values.is_floating_point():
            raise EstimatorError(f"{where} has dtype {values.dtype}, needs float64 or float32")
        count = batch.count(definition.level)
        if values.shape != (count,):
            raise EstimatorError(
                f"{where} has shape {tuple(values.shape)}, needs ({count},): one value for each {definition.level}"
            )
        if values.device != batch.device:
            raise EstimatorError(f"{where} is on {values.device}, needs the batch's device {batch.device}")
        checked[name] = values.detach()
    return replace(result, **checked)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({brief(value)})"
