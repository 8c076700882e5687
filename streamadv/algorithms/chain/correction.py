"""The chain's off-policy correction: importance weights, rejection, and their diagnostics."""

from __future__ import annotations

from dataclasses import replace

from ...extras import torch
from ..chain_metrics import off_policy_metrics
from ..off_policy import importance_weights, m2po_mask, reject, veto
from ..registry import Scope
from .config import CorrectionConfig
from .step import ChainStep, State

PREFIX = "rollout_corr/"


def correction_step(config: CorrectionConfig) -> ChainStep:
    """Make rollout_is_weights and narrow response_mask, both from old_log_probs - rollout_log_probs."""
    narrows = bool(config.rejections or config.veto or config.veto_upper or config.m2_threshold)

    def run(state: State) -> State:
        batch, tokens = state.batch, state.tokens
        old, rollout = (batch.column(name) for name in ("old_log_probs", "rollout_log_probs"))
        log_ratio = old - rollout
        metrics = off_policy_metrics(old, rollout, tokens)
        passing = tokens.mask  # [N] bool: trainable tokens that pass rejections, veto and M2PO
        if config.rejections:
            rejections = [item.rejection() for item in config.rejections]
            passing, rejection_metrics = reject(log_ratio, tokens, rejections)
            metrics |= rejection_metrics
        if config.veto is not None or config.veto_upper is not None:
            passing = passing & veto(log_ratio, tokens, config.veto, config.veto_upper)
        if config.m2_threshold is not None:
            passing = passing & m2po_mask(log_ratio, tokens.mask, config.m2_threshold)
        if config.level is not None:
            all_rows = config.batch_normalize_rows == "all"  # those of baseline members left out
            weights, weight_metrics = importance_weights(
                log_ratio,
                tokens,
                level=config.level,
                mode=config.mode,
                upper=config.upper,
                lower=config.lower,
                batch_normalize=config.batch_normalize,
                rows=(~batch.baseline)[batch.row_trajectory].sum() if all_rows else None,
            )
            metrics |= weight_metrics
            state = state.with_columns(rollout_is_weights=weights)
        state = state.with_metrics({PREFIX + name: metric for name, metric in metrics.items()})
        if not narrows:
            return state
        if state.level == "token":
            advantages, returns = (
                None if values is None else torch.where(passing, values, 0.0)
                for values in (state.advantages, state.returns)
            )
            state = replace(state, advantages=advantages, returns=returns)
        return state.with_mask(passing.to(state.batch.column("response_mask").dtype))

    makes = (("rollout_is_weights",) if config.level else ()) + (("response_mask",) if narrows else ())
    scope: Scope = "batch" if config.batch_normalize or config.m2_threshold else "row"
    needs = ("response_mask", "old_log_probs", "rollout_log_probs")
    return ChainStep("correction", needs, scope, _text(config), run, makes)


def _text(config: CorrectionConfig) -> str:
    parts = [f"{config.mode} {config.level} weights at {config.upper}"] if config.level else []
    if config.batch_normalize:
        all_rows = ", all rows" if config.batch_normalize_rows == "all" else ""
        parts.append(f"normalised over the batch{all_rows}")
    parts += [f"reject by {item.kind}" for item in config.rejections]
    parts += [f"veto below {config.veto}"] if config.veto else []
    parts += [f"veto above {config.veto_upper}"] if config.veto_upper else []
    parts += [f"mean squared log-ratio below {config.m2_threshold}"] if config.m2_threshold else []
    return ", ".join(parts)
