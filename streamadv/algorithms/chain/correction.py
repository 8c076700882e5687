"""The chain's off-policy correction: weights, rejection and their diagnostics, in one pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..chain_metrics import Metric
from ..off_policy import importance_weights, m2po_mask, reject, veto
from ..off_policy_metrics import off_policy_metrics
from ..registry import Scope
from .config import CorrectionConfig
from .steps import ChainStep, State, known_tokens

PREFIX = "rollout_corr/"


def correction_step(config: CorrectionConfig) -> ChainStep:
    """Make rollout_is_weights and narrow response_mask from old_log_probs - rollout_log_probs."""

    def run(state: State) -> State:
        batch, tokens = state.batch, known_tokens(state)
        old, rollout = (batch.column(name) for name in ("old_log_probs", "rollout_log_probs"))
        log_ratio = old - rollout
        metrics: dict[str, Metric] = off_policy_metrics(old, rollout, tokens)
        kept = tokens.mask
        if config.rejections:
            rejections = [item.rejection() for item in config.rejections]
            kept, found = reject(log_ratio, tokens, rejections)
            metrics |= found
        if config.veto is not None or config.veto_upper is not None:
            kept = kept & veto(log_ratio, tokens, config.veto, config.veto_upper)
        if config.m2_threshold is not None:
            kept = kept & m2po_mask(log_ratio, tokens.mask, config.m2_threshold)
        if config.level is not None:
            weights, found = importance_weights(
                log_ratio,
                tokens,
                level=config.level,
                mode=config.mode,
                upper=config.upper,
                lower=config.lower,
                batch_normalize=config.batch_normalize,
                rows=(~batch.baseline)[batch.row_trajectory].sum() if by_all_rows else None,
            )
            metrics |= found
            state = replace(state, changed={**state.changed, "rollout_is_weights": weights})
        state = state.with_metrics({PREFIX + name: metric for name, metric in metrics.items()})
        if not narrows:
            return state
        if state.level == "token":
            advantages, returns = (
                None if values is None else torch.where(kept, values, 0.0)
                for values in (state.advantages, state.returns)
            )
            state = replace(state, advantages=advantages, returns=returns)
        return state.with_mask(kept.to(batch.column("response_mask").dtype))

    by_all_rows = config.batch_normalize_rows == "all"
    narrows = bool(config.rejections or config.veto or config.veto_upper or config.m2_threshold)
    makes = (("rollout_is_weights",) if config.level else ()) + (("response_mask",) if narrows else ())
    parts = [f"{config.mode} {config.level} weights at {config.upper}"] if config.level else []
    parts += (
        ["normalised over the batch" + (", all rows" if by_all_rows else "")]
        if config.batch_normalize
        else []
    )
    parts += [f"reject by {item.kind}" for item in config.rejections]
    parts += [f"veto below {config.veto}"] if config.veto else []
    parts += [f"veto above {config.veto_upper}"] if config.veto_upper else []
    parts += [f"mean squared log-ratio below {config.m2_threshold}"] if config.m2_threshold else []
    scope: Scope = "batch" if config.batch_normalize or config.m2_threshold else "row"
    needs = ("response_mask", "old_log_probs", "rollout_log_probs")
    return ChainStep("correction", needs, scope, ", ".join(parts), run, makes)
