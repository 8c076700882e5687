"""Pieces of a Grafana dashboard: PromQL over one run's metrics, panels, variables, the board around them.

Classic dashboard model, which Grafana 11 loads as it is and later ones migrate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

COLUMNS: Final = 24
WIDTH: Final = 8
HEIGHT: Final = 7
RUN: Final = 'run=~"$run"'
RATE: Final = "[$__rate_interval]"

Json = dict[str, Any]
Target = tuple[str, str]  # expression, legend


def selector(metric: str, *matchers: str) -> str:
    return f"streamadv_{metric}{{{', '.join([RUN, *matchers])}}}"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Increase per second of a counter, summed over processes."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({selector(metric, *matchers)}{RATE}))"


def ratio(part: str, whole: str) -> str:
    """Part of a whole; no value while nothing happens."""
    return f"{part} / ({whole} > 0)"


def mean(metric: str) -> str:
    """Mean of what a histogram without negative values has seen."""
    return ratio(rate(f"{metric}_sum"), rate(f"{metric}_count"))


def quantile(q: float, metric: str, *matchers: str, by: str = "le") -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', *matchers, by=by)})"


def quantiles(metric: str, *points: float) -> list[Target]:
    return [(quantile(point, metric), f"p{point * 100:g}") for point in points]


def average(metric: str, *matchers: str, by: str = "") -> str:
    """Mean over processes of a gauge."""
    grouping = f" by ({by})" if by else ""
    return f"avg{grouping} ({selector(metric, *matchers)})"


def greatest(metric: str, *matchers: str, by: str = "") -> str:
    """Greatest value over processes and runs."""
    grouping = f" by ({by})" if by else ""
    return f"max{grouping} ({selector(metric, *matchers)})"


def total(metric: str, *matchers: str, by: str = "") -> str:
    """A number of the whole run, exported by one process (during a restart perhaps two), summed over runs."""
    inner = greatest(metric, *matchers, by=f"run, {by}" if by else "run")
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({inner})"


def panel(
    title: str,
    unit: str,
    description: str,
    *targets: Target,
    stack: bool = False,
    low: float | None = 0,
    high: float | None = None,
) -> Json:
    """Time series on an axis from `low` to `high` (None: as the data)."""
    custom: Json = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "auto"}
    custom["spanNulls"] = 60_000  # ms without a sample that still join: one lost scrape is no gap
    if stack:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults: Json = {"unit": unit, "custom": custom}
    if low is not None:
        defaults["min"] = low
    if high is not None:
        defaults["max"] = high
    options: Json = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel("timeseries", title, description, targets, defaults, options)


def stat(title: str, unit: str, description: str, target: Target, *, good_is_one: bool = False) -> Json:
    """One number now; with `good_is_one` yes or no, in green or red."""
    defaults: Json = {"unit": unit, "color": {"mode": "thresholds"}}
    defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": "blue", "value": None}]}
    if good_is_one:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": 1}]
        defaults["thresholds"]["steps"] = steps
        words = {"0": {"text": "no", "index": 0}, "1": {"text": "yes", "index": 1}}
        defaults["mappings"] = [{"type": "value", "options": words}]
    options: Json = {
        "colorMode": "background" if good_is_one else "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return _panel("stat", title, description, (target,), defaults, options)


def _panel(
    kind: str, title: str, description: str, targets: tuple[Target, ...], defaults: Json, options: Json
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "expr": expr,
                "legendFormat": legend,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
            }
            for i, (expr, legend) in enumerate(targets)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def variable(name: str, label: str, metric: str) -> Json:
    """A choice among the values of a label; All also takes series without it."""
    query = f"label_values({metric}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard(rows: Sequence[tuple[str, Sequence[Json]]], variables: Sequence[Json]) -> Json:
    """The board: panels row by row from left to right, three in a line."""
    panels: list[Json] = []
    top = 0
    for title, members in rows:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": []})
        panels[-1]["gridPos"] = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        top += 1
        for i, member in enumerate(members):
            across, down = i % (COLUMNS // WIDTH), i // (COLUMNS // WIDTH)
            place = {"x": across * WIDTH, "y": top + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(member | {"gridPos": place})
        top += -(-len(members) * WIDTH // COLUMNS) * HEIGHT
    return {
        "id": None,
        "uid": "streamadv",
        "title": "streamadv",
        "description": "Rollouts in, advantages out: one run of streamadv.",
        "tags": ["streamadv", "reinforcement-learning"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
                *variables,
            ]
        },
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }
