"""PromQL over the metrics of one run. `$run` is the board's variable."""

from __future__ import annotations

from typing import Final, NamedTuple

RUN: Final = 'run=~"$run"'
RATE: Final = "[$__rate_interval]"


class Target(NamedTuple):
    """A query of a panel and the name of its series."""

    expr: str
    legend: str


def selector(metric: str, *matchers: str) -> str:
    """The series of a metric of the runs chosen; metrics of processes keep their name, all others have a prefix."""
    name = metric if metric.startswith("process_") else f"streamadv_{metric}"
    return f"{name}{{{', '.join([RUN, *matchers])}}}"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Increase per second of a counter, summed over processes."""
    return aggregate("sum", f"rate({selector(metric, *matchers)}{RATE})", by)


def ratio(part: str, whole: str) -> str:
    """Part of a whole; no value while nothing happens."""
    return f"{part} / ({whole} > 0)"


def mean(metric: str, *matchers: str, by: str = "") -> str:
    """Mean of what a histogram without negative values has seen."""
    return ratio(rate(f"{metric}_sum", *matchers, by=by), rate(f"{metric}_count", *matchers, by=by))


def quantile(q: float, metric: str, *matchers: str, by: str = "le") -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', *matchers, by=by)})"


def quantiles(metric: str, *points: float) -> list[Target]:
    return [Target(quantile(point, metric), f"p{point * 100:g}") for point in points]


def greatest(metric: str, *matchers: str, by: str = "") -> str:
    """Greatest value over processes and runs."""
    return aggregate("max", selector(metric, *matchers), by)


def total(metric: str, *matchers: str, by: str = "") -> str:
    """A figure of the whole run: every process that exports it says the same, so max in a run, then sum over runs."""
    inner = greatest(metric, *matchers, by=f"run, {by}" if by else "run")
    return aggregate("sum", inner, by)


def run_rate(metric: str, *matchers: str, by: str = "") -> str:
    """`rate` of a counter of the whole run: max over the processes that export it, then sum over runs."""
    inner = aggregate("max", f"rate({selector(metric, *matchers)}{RATE})", f"run, {by}" if by else "run")
    return aggregate("sum", inner, by)


def aggregate(operator: str, expr: str, by: str = "") -> str:
    return f"{operator} by ({by}) ({expr})" if by else f"{operator} ({expr})"


def or_zero(expr: str) -> str:
    """0 where nobody exports it: for a stat that must not keep the value of a process that has died."""
    return f"({expr}) or vector(0)"
