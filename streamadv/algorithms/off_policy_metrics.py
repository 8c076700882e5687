"""Diagnostics of the distance between rollout and training policy, under verl's names.

Statistics over rows leave out rows without trainable tokens; `all_rows` counts them as verl does (as 0, or
as a perplexity of 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .metrics import Metric
from .segments import segment_sum

BOUND = 20.0


def off_policy_metrics(
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    all_rows: bool = False,
) -> dict[str, Metric]:
    """Perplexities, KL (k1, k3) and chi-squared distances of packed [N] log-probs.

    kl = E[rollout - old]; k3_kl = E[exp(l) - l - 1], l = old - rollout; log_ppl_diff per row = its mean of
    rollout - old; chi2_token = E[exp(2 l)] - 1; chi2_seq = mean over rows of exp(2 sum l) - 1.
    """
    counted = mask != 0
    tokens = segment_sum(mask, cu_seqlens)
    rows = torch.ones_like(tokens, dtype=torch.bool) if all_rows else tokens > 0
    total = tokens.sum()

    def exp(values: Tensor) -> Tensor:  # verl's overflows in float32
        return values.float().exp().double() if all_rows else values.exp()

    def by_row(values: Tensor) -> Tensor:
        return segment_sum(torch.where(counted, values, 0.0), cu_seqlens) / tokens.clamp(min=1)

    def row_mean(values: Tensor) -> Metric:
        return Metric(torch.where(rows, values, 0.0).sum() / rows.sum().clamp(min=1), rows.sum())

    def token_mean(values: Tensor) -> Metric:
        return Metric(torch.where(counted, values, 0.0).sum() / total.clamp(min=1), total)

    rollout = rollout_log_probs.to(torch.float64)
    rollout_mean = by_row(rollout)
    metrics = {}
    if old_log_probs is not None:
        old = old_log_probs.to(torch.float64)
        old_mean = by_row(old)
        ratio = old - rollout
        difference = rollout_mean - old_mean
        ratio_sum = segment_sum(torch.where(counted, ratio, 0.0), cu_seqlens)
        metrics = {
            "training_ppl": row_mean(exp(-old_mean)),
            "training_log_ppl": row_mean(-old_mean),
            "kl": token_mean(-ratio),
            "k3_kl": token_mean((exp(ratio) - 1 if all_rows else torch.expm1(ratio)) - ratio),
            "log_ppl_diff": row_mean(difference),
            "log_ppl_abs_diff": row_mean(difference.abs()),
            "log_ppl_diff_max": _extreme(difference, rows, largest=True),
            "log_ppl_diff_min": _extreme(difference, rows, largest=False),
            "ppl_ratio": row_mean(exp(difference)),
            "chi2_token": token_mean(torch.expm1(2 * ratio.clamp(-BOUND, BOUND))),
            "chi2_seq": row_mean(torch.expm1(2 * ratio_sum.clamp(-BOUND, BOUND))),
        }
    metrics["rollout_ppl"] = row_mean(exp(-rollout_mean))
    metrics["rollout_log_ppl"] = row_mean(-rollout_mean)
    return metrics


def weight_metrics(
    weights: Tensor,
    log_weights: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    threshold: float,
    *,
    by_row: bool,
    all_rows: bool,
) -> dict[str, Metric]:
    """Distribution of importance weights before bounding; all [N], spread over rows if `by_row`.

    Standard deviation and effective sample size are taken of weights held in 1/threshold .. threshold.
    """
    counted = mask != 0
    tokens = segment_sum(mask, cu_seqlens)
    total = tokens.sum()
    has_tokens = tokens > 0
    rows = torch.ones_like(has_tokens) if all_rows else has_tokens
    row_mean = segment_sum(torch.where(counted, weights, 0.0), cu_seqlens) / tokens.clamp(min=1)

    def token_mean(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum() / total.clamp(min=1)

    if by_row:
        first = log_weights[cu_seqlens[:-1].clamp(max=len(log_weights) - 1)]
        shares = (first.exp(), rows)
        highest = first.clamp(max=BOUND).exp()
        high, low = _extreme(highest, rows, largest=True), _extreme(first.exp(), rows, largest=False)
    else:
        shares = (weights, counted)
        high, low = _extreme(weights, counted, largest=True), _extreme(weights, counted, largest=False)
    held = weights.clamp(1 / threshold, threshold)
    mean, square = token_mean(held), token_mean(held.square())
    spread = (square - mean.square()).clamp(min=0).sqrt()
    relative = token_mean((held / (mean + 1e-8)).square())
    metrics = {
        "rollout_is_mean": Metric(token_mean(weights), total),
        "rollout_is_max": high,
        "rollout_is_min": low,
        "rollout_is_ratio_fraction_high": _share(shares[0] > threshold, shares[1]),
        "rollout_is_ratio_fraction_low": _share(shares[0] < 1 / threshold, shares[1]),
        "rollout_is_std": Metric(torch.where(total > 1, spread, 0.0), total),
        "rollout_is_eff_sample_size": Metric(1 / relative.clamp(min=1e-300), total),
    }
    return metrics | _row_metrics("rollout_is", row_mean, rows, threshold, 1 / threshold, centre=1.0)


def rejection_metrics(
    name: str,
    statistic: Tensor,
    passes: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    lower: float,
    upper: float,
    by_token: bool,
) -> dict[str, Metric]:
    """What one rejection saw and did; `statistic` and `passes` [N]."""
    counted = mask != 0
    tokens = segment_sum(mask, cu_seqlens)
    total = tokens.sum()
    rows = tokens > 0
    row_mean = segment_sum(torch.where(counted, statistic, 0.0), cu_seqlens) / tokens.clamp(min=1)
    rejected = segment_sum(counted & ~passes, cu_seqlens)

    def token_mean(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum() / total.clamp(min=1)

    judged, where = (statistic, counted) if by_token else (row_mean, rows)
    held = statistic.clamp(max(lower, 0.0) if name.endswith(("k2", "k3")) else lower, upper)
    variance = (token_mean(held.square()) - token_mean(held).square()).clamp(min=0)
    metrics = {
        f"{name}_mean": Metric(token_mean(statistic), total),
        f"{name}_max": _extreme(statistic, counted, largest=True),
        f"{name}_min": _extreme(statistic, counted, largest=False),
        f"{name}_fraction_high": _share(judged > upper, where),
        f"{name}_fraction_low": _share(judged < lower, where),
        f"{name}_std": Metric(variance.sqrt(), total),
        f"{name}_masked_fraction": Metric(rejected.sum() / total.clamp(min=1), total),
        f"{name}_seq_masked_fraction": _share(rejected > 0, rows),
    }
    row_metrics = _row_metrics(name, row_mean, rows, upper, lower, centre=0.0)
    if not name.endswith("k1"):
        del row_metrics[f"{name}_seq_fraction_low"]
    return metrics | row_metrics


def _row_metrics(
    name: str, values: Tensor, rows: Tensor, upper: float, lower: float, centre: float
) -> dict[str, Metric]:
    count = rows.sum()
    mean = torch.where(rows, values, 0.0).sum() / count.clamp(min=1)
    squares = torch.where(rows, (values - mean).square(), 0.0).sum()
    return {
        f"{name}_seq_mean": Metric(mean, count),
        f"{name}_seq_std": Metric((squares / (count - 1).clamp(min=1)).sqrt(), count),
        f"{name}_seq_max": _extreme(values, rows, largest=True),
        f"{name}_seq_min": _extreme(values, rows, largest=False),
        f"{name}_seq_max_deviation": _extreme((values - centre).abs(), rows, largest=True),
        f"{name}_seq_fraction_high": _share(values > upper, rows),
        f"{name}_seq_fraction_low": _share(values < lower, rows),
    }


def _extreme(values: Tensor, where: Tensor, *, largest: bool) -> Metric:
    """The greatest or least of `values` where `where` is set, 0 of none."""
    nothing = -torch.inf if largest else torch.inf
    chosen = torch.where(where, values, nothing)
    found = chosen.amax() if largest else chosen.amin()
    return Metric(torch.where(where.any(), found, 0.0), where.sum())


def _share(hits: Tensor, where: Tensor) -> Metric:
    count = where.sum()
    return Metric((hits & where).sum() / count.clamp(min=1), count)
