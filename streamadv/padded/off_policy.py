"""Rollout correction on padded [B, T] tensors, with verl's names, arguments and metric names."""

from __future__ import annotations

from torch import Tensor

from ..algorithms.arguments import BoundOrText, Mask, NotNegative, PeerQuirks, Tokens
from ..algorithms.chain_metrics import fetch, off_policy_metrics
from ..algorithms.off_policy import (
    BoundMode,
    RatioLevel,
    Rejection,
    RejectionKind,
    importance_weights,
    reject,
)
from ..errors import OptionError
from ..messages import brief
from .entrance import checked, unchecked
from .layout import padded_tokens
from .rewards import Metrics

PREFIX = "rollout_corr/"


@checked
def compute_rollout_correction_weights(
    log_ratio: Tokens,
    response_mask: Mask,
    rollout_is: RatioLevel = "token",
    rollout_is_threshold: BoundOrText = 2.0,
    rollout_is_batch_normalize: bool = False,
    *,
    mode: BoundMode = "truncate",
    rollout_is_lower: NotNegative | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, Metrics]:
    """(importance weights [B, T], metrics) from log_ratio [B, T] = old - rollout log-probs.

    rollout_is_threshold is the upper bound, a number or text; the text "lower_upper" is mode "mask" (IcePop) with both.
    Levels and modes are those of `algorithms.off_policy.importance_weights`. verl has the levels token and sequence,
    its metrics describe the weights after bounding, and it counts rows without tokens in its row metrics; verl of
    January 2026 describes the weights before bounding and has no text.
    """
    if isinstance(rollout_is_threshold, str):
        lower, rollout_is_threshold = parse_bounds(rollout_is_threshold)
        if lower is not None:
            if mode != "truncate" or rollout_is_lower is not None:
                raise OptionError(
                    "rollout_is_threshold names lower and upper, which is mode 'mask': "
                    "leave out mode and rollout_is_lower"
                )
            mode, rollout_is_lower = "mask", lower
    if mode == "truncate":
        if rollout_is_lower is not None:
            raise OptionError(
                f"rollout_is_lower {rollout_is_lower} has no part in mode 'truncate': leave it out"
            )
    elif rollout_is_lower is None and rollout_is_threshold < 1:
        raise OptionError(
            f"rollout_is_lower is missing: with rollout_is_threshold {rollout_is_threshold} it is above it"
        )
    elif rollout_is_lower is not None and rollout_is_lower > rollout_is_threshold:
        raise OptionError(
            f"rollout_is_lower {rollout_is_lower} is above rollout_is_threshold {rollout_is_threshold}"
        )
    tokens = padded_tokens(response_mask)
    weights, metrics = importance_weights(
        log_ratio.reshape(-1),
        tokens,
        level=rollout_is,
        mode=mode,
        upper=rollout_is_threshold,
        lower=rollout_is_lower,
        batch_normalize=rollout_is_batch_normalize,
        peer_quirks=peer_quirks,
    )
    return weights.view(response_mask.shape), fetch(metrics)[0]


@checked
def compute_rollout_rejection_mask(
    log_ratio: Tokens,
    response_mask: Mask,
    rollout_rs: str,
    rollout_rs_threshold: str | float | None,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, Metrics]:
    """(`response_mask` [B, T] without rejected tokens, metrics).

    rollout_rs: kinds of `algorithms.off_policy.Rejection`, comma-separated. rollout_rs_threshold: one bound for all
    kinds or one per kind, comma-separated; "lower_upper", or the upper bound alone. A single bound of k1 below 1
    rejects everything (verl: raises).
    """
    kinds = list(dict.fromkeys(name.strip() for name in rollout_rs.split(",") if name.strip()))
    if not kinds:
        raise OptionError(f"rollout_rs {rollout_rs!r} names no rejection: leave it out or name one")
    if rollout_rs_threshold is None:
        raise OptionError(f"rollout_rs_threshold is missing: rollout_rs {rollout_rs!r} needs bounds")
    specs = [spec.strip() for spec in str(rollout_rs_threshold).split(",") if spec.strip()]
    if len(specs) == 1:
        specs *= len(kinds)
    if len(specs) != len(kinds):
        raise OptionError(
            f"rollout_rs_threshold {rollout_rs_threshold!r} has {len(specs)} bounds for {len(kinds)} kinds"
        )
    rejections = []
    for kind, spec in zip(kinds, specs, strict=True):
        bounds = _numbers(spec)
        if not bounds:
            raise OptionError(f"rollout_rs_threshold {spec!r}: needs upper or lower_upper, in numbers")
        name: RejectionKind = kind  # type: ignore[assignment]  # Rejection checks it
        rejections.append(Rejection(name, bounds[-1], bounds[0] if len(bounds) == 2 else None))
    for rejection in rejections if peer_quirks == "verl" else ():
        lower, upper = rejection.bounds
        if lower > upper:
            raise OptionError(
                f"rejection {rejection.kind}: upper {rejection.upper} alone has the lower bound "
                f"{1 / rejection.upper}, which is above it: give lower_upper"
            )
    tokens = padded_tokens(response_mask)
    passing, metrics = reject(log_ratio.reshape(-1), tokens, rejections, peer_quirks=peer_quirks)
    return passing.view(response_mask.shape) * response_mask, fetch(metrics)[0]


@checked
def compute_offpolicy_metrics(
    old_log_prob: Tokens | None,
    rollout_log_prob: Tokens | None,
    response_mask: Mask,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Metrics:
    """Perplexities, KL and chi-squared between rollout and training policy; [B, T] log-probs.

    Without rollout log-probs: the training policy's perplexity alone; without old log-probs: the rollout policy's.
    """
    tokens, all_rows = padded_tokens(response_mask), peer_quirks is not None
    old = None if old_log_prob is None else old_log_prob.reshape(-1)
    if rollout_log_prob is not None:
        return fetch(off_policy_metrics(old, rollout_log_prob.reshape(-1), tokens, all_rows))[0]
    if old is None:
        return {}
    metrics = fetch(off_policy_metrics(None, old, tokens, all_rows))[0]
    return {name.replace("rollout", "training"): value for name, value in metrics.items()}


@checked
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tokens,
    rollout_log_prob: Tokens,
    response_mask: Mask,
    rollout_is: RatioLevel | None = None,
    rollout_is_threshold: BoundOrText | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor | None, Tensor, Metrics]:
    """(weights or None, narrowed mask, metrics with the prefix rollout_corr/) from one pair of log-probs [B, T].

    The weights cover all tokens of `response_mask`, rejected ones too: multiply by the narrowed mask. They are None if
    rollout_is or its threshold is None.
    """
    if rollout_rs is None and rollout_rs_threshold is not None:
        raise OptionError(
            f"rollout_rs_threshold {rollout_rs_threshold!r} has no part without rollout_rs: name one"
        )
    if isinstance(rollout_is_threshold, str):
        parse_bounds(rollout_is_threshold)  # wrong text is an error without weights too
    log_ratio = old_log_prob - rollout_log_prob
    metrics = unchecked(compute_offpolicy_metrics)(
        old_log_prob, rollout_log_prob, response_mask, peer_quirks=peer_quirks
    )
    weights, mask = None, response_mask
    if rollout_rs is not None:
        mask, rejection_metrics = unchecked(compute_rollout_rejection_mask)(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold, peer_quirks=peer_quirks
        )
        metrics |= rejection_metrics
    if rollout_is is not None and rollout_is_threshold is not None:
        weights, weight_metrics = unchecked(compute_rollout_correction_weights)(
            log_ratio,
            response_mask,
            rollout_is,
            rollout_is_threshold,
            rollout_is_batch_normalize,
            peer_quirks=peer_quirks,
        )
        metrics |= weight_metrics
    return weights, mask, {PREFIX + name: value for name, value in metrics.items()}


def parse_bounds(threshold: str) -> tuple[float | None, float]:
    """(lower or None, upper) of the text "upper" or "lower_upper". Raises OptionError."""
    bounds = _numbers(threshold)
    if not bounds or not all(bound > 0 for bound in bounds):
        raise OptionError(
            f"rollout_is_threshold is {brief(threshold)}, needs upper or lower_upper, in numbers above 0"
        )
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]


def _numbers(bounds: str) -> list[float]:
    """The one or two numbers of the text "upper" or "lower_upper"; [] for any other."""
    try:
        numbers = [float(part) for part in bounds.split("_")]
    except ValueError:
        return []
    return numbers if len(numbers) <= 2 else []
