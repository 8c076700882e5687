"""Metrics of a chain: numbers or 0-d tensors, which are fetched in one transfer, then merged over a batch's parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import ArgumentError
from ..extras import torch
from .whitening import Summary, summarise

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
        values |= {
            name: value if name not in values else _merged(name, (values, metrics), (weights, counts))
            for name, value in metrics.items()
        }
        weights |= {name: weights.get(name, 0) + counts[name] for name in metrics}
        for name in (name for name in metrics if name.endswith("_eff_sample_size")):
            stem = name.removesuffix("_eff_sample_size")
            mean_square = values[_mean_name(f"{stem}_std", values)] ** 2
            values[name] = mean_square / (mean_square + values[f"{stem}_std"] ** 2)
    return values, weights


def _merged(
    name: str,
    metrics: tuple[Mapping[str, float], Mapping[str, float]],
    weights: tuple[Mapping[str, float], Mapping[str, float]],
) -> float:
    """The metric `name` over two parts, by what its name says."""
    first, second = (part[name] for part in metrics)
    counts = weights[0][name], weights[1][name]
    if name.endswith(GREATEST):
        return max(first, second)
    if name.endswith(LEAST):
        return min(first, second)
    if name.endswith("_std"):
        around = _mean_name(name, metrics[0])
        return _merged_std(name, (first, second), (metrics[0][around], metrics[1][around]), counts)
    return (first * counts[0] + second * counts[1]) / (counts[0] + counts[1])


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
