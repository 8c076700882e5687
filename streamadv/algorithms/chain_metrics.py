"""Metrics of a chain: numbers or 0-d tensors, which are fetched in one transfer, then merged over a batch's parts.

`off_policy_metrics` are diagnostics of the distance between rollout and training policy, under verl's names. Its values
are [N], of which trainable tokens count. Statistics over rows are over rows with trainable tokens; `all_rows` counts
the others too, as verl does (as 0, or as a perplexity of 1). Without any token all weights are 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import ArgumentError
from ..extras import torch
from .segments import Summary, Trainable, summarise

if TYPE_CHECKING:
    from torch import Tensor


GREATEST: Final = ("/max", "_max", "_max_deviation")  # endings of names that merge to the greatest
LEAST: Final = ("/min", "_min")
#: The mean KL to the reference policy, by which the KL coefficient adapts.
MEAN_KL: Final = "critic/kl"

Pair = tuple[float, float]


class Metric(NamedTuple):
    """A value and the weight behind it. By its name `merge_metrics` knows a maximum or minimum from a mean."""

    value: Any  # 0-d tensor, or a number
    weight: Any  # likewise: how many trajectories, rows or tokens are behind it


def mean(values: Tensor, weight: Tensor) -> Metric:
    """The mean of `values` [K] that count `weight` [K] times (0 = not at all, whatever the value)."""
    known = summarise(values, weight)
    return Metric(known.mean, known.size)


def summary(name: str, known: Summary) -> dict[str, Metric]:
    """`name`/mean, /max and /min."""
    ends = {"mean": known.mean, "max": known.greatest, "min": known.least}
    return {f"{name}/{end}": Metric(value, known.size) for end, value in ends.items()}


def fraction(hits: Tensor, weight: Tensor) -> Metric:
    """The share of `hits` [K] bool among elements that count `weight` [K] times."""
    weight = weight.to(torch.float64)
    total = weight.sum()
    return Metric(torch.where(hits, weight, 0.0).sum() / total.clamp(min=1), total)


def extreme(values: Tensor, where: Tensor, *, largest: bool) -> Metric:
    """The greatest or least of `values` [K] where `where` [K] bool is set."""
    if not len(values):
        return Metric(values.new_zeros(()), where.sum())
    candidates = torch.where(where, values, -torch.inf if largest else torch.inf)
    return Metric(candidates.amax() if largest else candidates.amin(), where.sum())


def fetch(metrics: Mapping[str, Metric]) -> tuple[dict[str, float], dict[str, float]]:
    """(values, weights) as plain numbers, by name, without metrics of weight 0."""
    flat = [number for metric in metrics.values() for number in metric]
    tensors = [number for number in flat if isinstance(number, torch.Tensor)]
    stacked = [number.to(tensors[0].device, torch.float64) for number in tensors]
    there = iter(torch.stack(stacked).tolist() if stacked else ())
    numbers = [next(there) if isinstance(number, torch.Tensor) else float(number) for number in flat]
    fetched = [
        (name, numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(metrics) if numbers[2 * i + 1] > 0
    ]
    return {name: value for name, value, _ in fetched}, {name: weight for name, _, weight in fetched}


def merge_metrics(
    parts: Iterable[tuple[Mapping[str, float], Mapping[str, float]]],
) -> tuple[dict[str, float], dict[str, float]]:
    """(metrics, weights) of a whole from the (metrics, weights) of its parts, as if computed from all at once.

    Means are weighted, maxima and minima are the extremes. Standard deviations merge with the means they were taken
    around (Chan, Golub, LeVeque 1979), and an effective sample size follows from both. Raises ArgumentError for a
    metric without a weight above 0.
    """
    values: dict[str, float] = {}
    weights: dict[str, float] = {}
    for metrics, counts in parts:
        for name in metrics:
            if not counts.get(name, 0.0) > 0:
                raise ArgumentError(
                    f"metric {name} has weight {counts.get(name)}, needs one above 0 in each part"
                )
        merged = dict(metrics)
        for name in (name for name in metrics if name in values):
            pair, pair_counts = (values[name], metrics[name]), (weights[name], counts[name])
            if name.endswith(GREATEST):
                merged[name] = max(pair)
            elif name.endswith(LEAST):
                merged[name] = min(pair)
            elif name.endswith("_std"):
                around = _mean_name(name, values)
                merged[name] = _merged_std(name, pair, (values[around], metrics[around]), pair_counts)
            else:
                merged[name] = (pair[0] * pair_counts[0] + pair[1] * pair_counts[1]) / sum(pair_counts)
        values |= merged
        weights |= {name: weights.get(name, 0) + counts[name] for name in metrics}
        for name in (name for name in metrics if name.endswith("_eff_sample_size")):
            stem = name.removesuffix("_eff_sample_size")
            mean_square = values[_mean_name(f"{stem}_std", values)] ** 2
            values[name] = mean_square / (mean_square + values[f"{stem}_std"] ** 2)
    return values, weights


def _mean_name(std_name: str, metrics: Mapping[str, float]) -> str:
    """The metric with the mean that a standard deviation was taken around."""
    stem = std_name.removesuffix("_std")
    return f"{stem}_clamped_mean" if f"{stem}_clamped_mean" in metrics else f"{stem}_mean"


def _merged_std(name: str, stds: Pair, means: Pair, counts: Pair) -> float:
    ddof = 1 if name.endswith("_seq_std") else 0
    squares = sum(std**2 * max(count - ddof, 0) for std, count in zip(stds, counts, strict=True))
    total = sum(counts)
    squares += (means[1] - means[0]) ** 2 * counts[0] * counts[1] / total
    return math.sqrt(squares / max(total - ddof, 1))


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
    held: Tensor,
    ratios: Tensor,
    log_weights: Tensor,
    tokens: Trainable,
    lower: float,
    upper: float,
    *,
    by_row: bool,
    all_rows: bool,
) -> dict[str, Metric]:
    """Distribution of importance weights [N]: of the bounded ones, as verl 0.9.1 reports it, or those before bounding.

    Standard deviation and effective sample size are those of the weights `held`. The shares above and below the bounds
    are those of `ratios`, the weights before bounding; `by_row`: all tokens of a row have one weight, and least and
    greatest weight are those before bounding too. Without any weight above 0 the effective sample size is 0 (verl
    raises).
    """
    rows = rows_that_count(tokens, all_rows)
    judged, counted, greatest, least = ratios, tokens.mask, weights, weights
    if by_row:
        # All tokens of a row have its log-weight; a row without tokens has 0.
        judged, counted = tokens.row_mean(log_weights).exp(), rows
        greatest, least = judged.clamp(max=math.exp(SAFETY_BOUND)), judged
    average, std = _mean_and_std(held, tokens.mask)
    relative = mean((held / (average.value + 1e-8)).square(), tokens.mask)
    size = torch.where(relative.value > 0, 1 / relative.value, 0.0)
    raw = tokens.row_mean(ratios)
    return {
        "rollout_is_mean": average if held is weights else mean(weights, tokens.mask),
        "rollout_is_max": extreme(greatest, counted, largest=True),
        "rollout_is_min": extreme(least, counted, largest=False),
        "rollout_is_ratio_fraction_high": fraction(judged > upper, counted),
        "rollout_is_ratio_fraction_low": fraction(judged < lower, counted),
        "rollout_is_std": std,
        "rollout_is_eff_sample_size": Metric(size, average.weight),
        **_row_metrics("rollout_is", tokens.row_mean(weights), rows, upper, lower, centre=1.0),
        "rollout_is_seq_fraction_high": fraction(raw > upper, rows),
        "rollout_is_seq_fraction_low": fraction(raw < lower, rows),
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
    clamped_mean, std = _mean_and_std(held, tokens.mask)
    metrics = {
        f"{name}_mean": mean(statistic, tokens.mask),
        f"{name}_max": extreme(statistic, tokens.mask, largest=True),
        f"{name}_min": extreme(statistic, tokens.mask, largest=False),
        f"{name}_fraction_high": fraction(judged > upper, counted),
        f"{name}_fraction_low": fraction(judged < lower, counted),
        f"{name}_clamped_mean": clamped_mean,
        f"{name}_std": std,
        f"{name}_masked_fraction": mean(~passes, tokens.mask),
        f"{name}_seq_masked_fraction": fraction(tokens.row_sum(~passes) > 0, rows),
    }
    row_metrics = _row_metrics(name, per_row, rows, upper, lower, centre=0.0)
    if not name.endswith("k1"):
        del row_metrics[f"{name}_seq_fraction_low"]
    return metrics | row_metrics


def _mean_and_std(values: Tensor, weight: Tensor) -> tuple[Metric, Metric]:
    """Of `values` [K] that count `weight` [K] times; ddof 0."""
    average = mean(values, weight)
    variance = (mean(values.square(), weight).value - average.value.square()).clamp(min=0)
    return average, Metric(variance.sqrt(), average.weight)


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
        f"{name}_seq_fraction_high": fraction(values > upper, rows),
        f"{name}_seq_fraction_low": fraction(values < lower, rows),
    }


def rows_that_count(tokens: Trainable, all_rows: bool) -> Tensor:
    """[R] bool: rows that count; none if no token counts."""
    has_tokens = tokens.counts > 0
    return has_tokens.any().expand_as(has_tokens) if all_rows else has_tokens
