"""Diagnostics of the distance between rollout and training policy, under verl's names.

All values are [N], of which trainable tokens count. Statistics over rows are over rows with trainable tokens;
`all_rows` counts the others too, as verl does (as 0, or as a perplexity of 1). Without any token all weights are 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ..extras import torch
from .chain_metrics import Metric, extreme, mean
from .trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor

SAFETY_BOUND: Final = 20.0


def off_policy_metrics(
    old_log_probs: Tensor | None, rollout_log_probs: Tensor, tokens: Trainable, all_rows: bool = False
) -> dict[str, Metric]:
    """Perplexities, KL (k1, k3) and chi-squared distances of log-probs [N].

    kl = E[rollout - old]; k3_kl = E[exp(l) - l - 1], l = old - rollout; log_ppl_diff per row = its mean of
    rollout - old; chi2_token = E[exp(2 l)] - 1; chi2_seq = mean over rows of exp(2 sum l) - 1.
    """
    rows = rows_that_count(tokens, all_rows)

    def exp(values: Tensor) -> Tensor:  # verl's overflows in float32
        return values.float().exp().double() if all_rows else values.exp()

    def over_rows(values: Tensor) -> Metric:
        return Metric(torch.where(rows, values, 0.0).sum() / rows.sum().clamp(min=1), rows.sum())

    rollout = rollout_log_probs.to(torch.float64)
    rollout_mean = tokens.row_mean(rollout)
    metrics = {}
    if old_log_probs is not None:
        old = old_log_probs.to(torch.float64)
        old_mean = tokens.row_mean(old)
        ratio = old - rollout
        difference = rollout_mean - old_mean
        ratio_sum = tokens.row_sum(ratio)
        metrics = {
            "training_ppl": over_rows(exp(-old_mean)),
            "training_log_ppl": over_rows(-old_mean),
            "kl": mean(-ratio, tokens.mask),
            "k3_kl": mean((exp(ratio) - 1 if all_rows else torch.expm1(ratio)) - ratio, tokens.mask),
            "log_ppl_diff": over_rows(difference),
            "log_ppl_abs_diff": over_rows(difference.abs()),
            "log_ppl_diff_max": extreme(difference, rows, largest=True),
            "log_ppl_diff_min": extreme(difference, rows, largest=False),
            "ppl_ratio": over_rows(exp(difference)),
            "chi2_token": mean(torch.expm1(2 * ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)), tokens.mask),
            "chi2_seq": over_rows(torch.expm1(2 * ratio_sum.clamp(-SAFETY_BOUND, SAFETY_BOUND))),
        }
    metrics["rollout_ppl"] = over_rows(exp(-rollout_mean))
    metrics["rollout_log_ppl"] = over_rows(-rollout_mean)
    return metrics


def weight_metrics(
    weights: Tensor,
    log_weights: Tensor,
    tokens: Trainable,
    threshold: float,
    *,
    by_row: bool,
    all_rows: bool,
) -> dict[str, Metric]:
    """Distribution of importance weights [N] before bounding, as verl of January 2026 reports it.

    Standard deviation and effective sample size are those of weights held in 1 / threshold .. threshold. `by_row`: all
    tokens of a row have one weight.
    """
    rows = rows_that_count(tokens, all_rows)
    if by_row:
        # All tokens of a row have its log-weight; a row without tokens has 0.
        log_row = tokens.row_mean(log_weights)
        judged, counted, highest = log_row.exp(), rows, log_row.clamp(max=SAFETY_BOUND).exp()
    else:
        judged, counted, highest = weights, tokens.mask, weights
    held = weights.clamp(1 / threshold, threshold)
    average = mean(held, tokens.mask).value
    variance = (mean(held.square(), tokens.mask).value - average.square()).clamp(min=0)
    relative = mean((held / (average + 1e-8)).square(), tokens.mask)
    metrics = {
        "rollout_is_mean": mean(weights, tokens.mask),
        "rollout_is_max": extreme(highest, counted, largest=True),
        "rollout_is_min": extreme(judged, counted, largest=False),
        "rollout_is_ratio_fraction_high": _share(judged > threshold, counted),
        "rollout_is_ratio_fraction_low": _share(judged < 1 / threshold, counted),
        "rollout_is_std": Metric(variance.sqrt(), relative.weight),
        "rollout_is_eff_sample_size": Metric(1 / relative.value, relative.weight),
    }
    per_row = tokens.row_mean(weights)
    return metrics | _row_metrics("rollout_is", per_row, rows, threshold, 1 / threshold, centre=1.0)


def bounded_weight_metrics(
    weights: Tensor,
    ratios: Tensor,
    log_weights: Tensor,
    tokens: Trainable,
    lower: float,
    upper: float,
    *,
    by_row: bool,
    all_rows: bool,
) -> dict[str, Metric]:
    """Distribution of importance weights [N] as verl 0.9.1 reports it: of the bounded `weights`.

    The shares above and below the bounds are those of `ratios`, the weights before bounding; `by_row`: all tokens of a
    row have one weight, and least and greatest weight are those before bounding too. Without any weight above 0 the
    effective sample size is 0 (verl raises).
    """
    rows = rows_that_count(tokens, all_rows)
    judged, counted, greatest, least = ratios, tokens.mask, weights, weights
    if by_row:
        judged, counted = tokens.row_mean(log_weights).exp(), rows
        greatest, least = judged.clamp(max=math.exp(SAFETY_BOUND)), judged
    average = mean(weights, tokens.mask)
    variance = (mean(weights.square(), tokens.mask).value - average.value.square()).clamp(min=0)
    relative = mean((weights / (average.value + 1e-8)).square(), tokens.mask)
    size = torch.where(relative.value > 0, 1 / relative.value, 0.0)
    raw = tokens.row_mean(ratios)
    return {
        "rollout_is_mean": average,
        "rollout_is_max": extreme(greatest, counted, largest=True),
        "rollout_is_min": extreme(least, counted, largest=False),
        "rollout_is_ratio_fraction_high": _share(judged > upper, counted),
        "rollout_is_ratio_fraction_low": _share(judged < lower, counted),
        "rollout_is_std": Metric(variance.sqrt(), average.weight),
        "rollout_is_eff_sample_size": Metric(size, average.weight),
        **_row_metrics("rollout_is", tokens.row_mean(weights), rows, upper, lower, centre=1.0),
        "rollout_is_seq_fraction_high": _share(raw > upper, rows),
        "rollout_is_seq_fraction_low": _share(raw < lower, rows),
    }


def rejection_metrics(
    name: str,
    statistic: Tensor,
    passes: Tensor,
    tokens: Trainable,
    lower: float,
    upper: float,
    by_token: bool,
) -> dict[str, Metric]:
    """Distribution of one rejection's `statistic` [N], and the share that it masks; `passes` [N] bool."""
    rows = tokens.counts > 0
    per_row = tokens.row_mean(statistic)
    judged, counted = (statistic, tokens.mask) if by_token else (per_row, rows)
    held = statistic.clamp(max(lower, 0.0) if name.endswith(("k2", "k3")) else lower, upper)
    clamped_mean = mean(held, tokens.mask)
    average = clamped_mean.value
    variance = (mean(held.square(), tokens.mask).value - average.square()).clamp(min=0)
    metrics = {
        f"{name}_mean": mean(statistic, tokens.mask),
        f"{name}_max": extreme(statistic, tokens.mask, largest=True),
        f"{name}_min": extreme(statistic, tokens.mask, largest=False),
        f"{name}_fraction_high": _share(judged > upper, counted),
        f"{name}_fraction_low": _share(judged < lower, counted),
        f"{name}_clamped_mean": clamped_mean,
        f"{name}_std": Metric(variance.sqrt(), clamped_mean.weight),
        f"{name}_masked_fraction": mean(~passes, tokens.mask),
        f"{name}_seq_masked_fraction": _share(tokens.row_sum(~passes) > 0, rows),
    }
    row_metrics = _row_metrics(name, per_row, rows, upper, lower, centre=0.0)
    if not name.endswith("k1"):
        del row_metrics[f"{name}_seq_fraction_low"]
    return metrics | row_metrics


def _row_metrics(
    name: str, values: Tensor, rows: Tensor, upper: float, lower: float, centre: float
) -> dict[str, Metric]:
    count = rows.sum()
    average = torch.where(rows, values, 0.0).sum() / count.clamp(min=1)
    squares = torch.where(rows, (values - average).square(), 0.0).sum()
    return {
        f"{name}_seq_mean": Metric(average, count),
        f"{name}_seq_std": Metric((squares / (count - 1).clamp(min=1)).sqrt(), count),
        f"{name}_seq_max": extreme(values, rows, largest=True),
        f"{name}_seq_min": extreme(values, rows, largest=False),
        f"{name}_seq_max_deviation": extreme((values - centre).abs(), rows, largest=True),
        f"{name}_seq_fraction_high": _share(values > upper, rows),
        f"{name}_seq_fraction_low": _share(values < lower, rows),
    }


def rows_that_count(tokens: Trainable, all_rows: bool) -> Tensor:
    """[R] bool: rows that count; none if no token counts."""
    has_tokens = tokens.counts > 0
    return has_tokens.any().expand_as(has_tokens) if all_rows else has_tokens


def _share(hits: Tensor, where: Tensor) -> Metric:
    count = where.sum()
    return Metric((hits & where).sum().double() / count.clamp(min=1), count)
