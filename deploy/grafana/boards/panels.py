"""What the panels of all boards have in common: typed builders with this project's defaults.

A panel says what it shows and, apart from that, what a bad value means and what to do: both make its description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as prometheus_model

from .promql import Target, selector

SOURCE: Final = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")
#: Width of the board.
COLUMNS: Final = 24
#: ms without a sample that a line still joins: one lost scrape is no gap.
JOINED_MS: Final = 60_000

Panel = Builder[model.Panel]


def lines(
    title: str,
    unit: str,
    shows: str,
    bad: str,
    *targets: Target,
    stack: bool = False,
    low: float | None = 0,
    high: float | None = None,
) -> Panel:
    """Time series on an axis from `low` to `high` (None: as the data)."""
    panel = timeseries.Panel().title(title).description(f"{shows} {bad}").unit(unit).datasource(SOURCE)
    panel = panel.height(7).span(8).line_width(1).fill_opacity(40 if stack else 10)
    panel = panel.span_nulls(JOINED_MS).show_points(common_model.VisibilityMode.AUTO)
    legend = common.VizLegendOptions().show_legend(True).calcs(["lastNotNull"])
    legend = legend.display_mode(common_model.LegendDisplayMode.TABLE)
    panel = panel.legend(legend.placement(common_model.LegendPlacement.BOTTOM))
    tooltip = common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI)
    panel = panel.tooltip(tooltip.sort(common_model.SortOrder.DESCENDING))
    if stack:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if low is not None:
        panel = panel.min(low)
    if high is not None:
        panel = panel.max(high)
    for number, target in enumerate(targets):
        panel = panel.with_target(_query(target, number))
    return panel


def spread(title: str, unit: str, shows: str, bad: str, target: Target) -> Panel:
    """A heatmap of a histogram's buckets; the query sums by `le`."""
    panel = heatmap.Panel().title(title).description(f"{shows} {bad}").unit(unit).datasource(SOURCE)
    query = _query(target, 0).format(prometheus_model.PromQueryFormat.HEATMAP)
    return panel.height(7).span(8).calculate(False).with_target(query)


def now(
    title: str,
    unit: str,
    shows: str,
    bad: str,
    target: Target,
    *,
    width: int,
    steps: Sequence[tuple[float | None, str]] = ((None, "blue"),),
    words: Mapping[str, str] | None = None,
    none: str | None = None,
    names: bool = False,
) -> Panel:
    """One value of this moment, never of a process that has gone since.

    `steps`: (from this value on, colour), the first from None. `words`: text in place of a value. `none`: text in
    place of no series. `names`: show the names of the series, not their values.
    """
    panel = stat.Panel().title(title).description(f"{shows} {bad}").unit(unit).datasource(SOURCE)
    thresholds = [model.Threshold(value=value, color=colour) for value, colour in steps]
    panel = panel.thresholds(
        dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(thresholds)
    )
    panel = panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel = panel.color_mode(common_model.BigValueColorMode.BACKGROUND)
    panel = panel.graph_mode(common_model.BigValueGraphMode.NONE)
    panel = panel.text_mode(
        common_model.BigValueTextMode.NAME if names else common_model.BigValueTextMode.VALUE
    )
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["last"]).values(False))
    if words:
        options = {value: model.ValueMappingResult(text=text) for value, text in words.items()}
        panel = panel.mappings([model.ValueMap(options=options)])
    if none is not None:
        panel = panel.no_value(none)
    return panel.height(4).span(width).with_target(_query(target, 0).instant())


def board(title: str, uid: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> Any:
    """A board: its variables, links to its sisters, annotations, and the panels row by row from left to right."""
    made = dashboard.Dashboard(title).uid(uid).description(description).tags(["streamadv"]).editable()
    made = made.refresh("10s").time("now-30m", "now").timezone("browser")
    made = made.tooltip(model.DashboardCursorSync.CROSSHAIR)
    made = made.link(
        dashboard.DashboardLink("streamadv")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags(["streamadv"])
        .include_vars(True)
        .keep_time(True)
    )
    made = made.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    made = made.with_variable(_choice("run", "Run", "label_values(streamadv_build_info, run)"))
    for annotation in _annotations():
        made = made.annotation(annotation)
    number = 0
    for row_title, panels in rows:
        number += 1
        made = made.with_row(dashboard.Row(row_title).id(number))
        for panel in panels:
            number += 1
            made = made.with_panel(panel.id(number))  # type: ignore[attr-defined]
    return made.build()


def _annotations() -> list[Builder[model.AnnotationQuery]]:
    """Starts of processes, and versions: of the trainer session, of the package, of the policy (off at first)."""
    info = selector("build_info")
    return [
        _annotation(
            "Process starts",
            "blue",
            f"{selector('process_start_time_seconds')} * 1000 * on (instance, run) group_right () {info}",
            "{{stage}} starts, {{instance}}",
        ).use_value_for_time(True),
        _annotation(
            "Trainer sessions",
            "orange",
            f"max by (run) (changes({selector('run_trainer_epoch')}[1m])) > 0",
            "a trainer takes run {{run}}",
        ),
        _annotation(
            "Package versions",
            "purple",
            f"count by (run, version) ({info}) unless count by (run, version) ({info} offset 1m)",
            "streamadv {{version}} joins run {{run}}",
        ),
        _annotation(
            "Policy versions",
            "green",
            f"max by (run) (changes({selector('run_version')}[1m])) > 0",
            "new policy versions in run {{run}}",
        ).enable(False),
    ]


def _annotation(name: str, colour: str, expr: str, title: str) -> dashboard.AnnotationQuery:
    annotation = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True)
    return annotation.icon_color(colour).expr(expr).step("60s").title_format(title)


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A choice among the values of a label; All also takes series without it."""
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE)
    variable = variable.query({"query": query, "refId": f"variable-{name}"}).multi(True).include_all(True)
    variable = variable.all_value(".*").refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.current(model.VariableOption(text=["All"], value=["$__all"])).sort(
        model.VariableSort.ALPHABETICAL_ASC
    )


def _query(target: Target, number: int) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(target.expr).legend_format(target.legend)
    return query.ref_id(chr(ord("A") + number)).datasource(SOURCE)
