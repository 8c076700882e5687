"""Grafana's boards and Prometheus' rules: what they ask for exists, and every alert says what to do."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from .metrics.exposed import label_names

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
RULES = ROOT / "deploy" / "prometheus" / "rules"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
#: Labels that are not the code's: of the process (`serve`) and of the scrape.
OUTER_LABELS = {"run", "job", "instance"}
#: Made by Prometheus itself, with their labels.
PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "run", "severity"}}
#: What of Debian's prometheus-redis-exporter is used; `make test-observability` asks it.
REDIS_EXPORTER = {
    f"redis_{name}": labels
    for name, labels in {
        "aof_enabled": set[str](),
        "aof_last_write_status": set[str](),
        "blocked_clients": set[str](),
        "connected_clients": set[str](),
        "cpu_sys_main_thread_seconds_total": set[str](),
        "cpu_user_main_thread_seconds_total": set[str](),
        "evicted_keys_total": set[str](),
        "instance_info": {"maxmemory_policy"},
        "rejected_connections_total": set[str](),
    }.items()
}

SELECTOR = re.compile(r"(?<![\w:])((?:streamadv|process|redis)_\w+|up|ALERTS)\b(?:\{(.*?)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not on PATH"
)


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Every sample name that exists, with its labels."""
    return label_names() | PROMETHEUS | REDIS_EXPORTER


def boards() -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in FILES]


def panels() -> list[dict[str, Any]]:
    return [panel for board in boards() for panel in board["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / "streamadv.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def filled_in(expression: str) -> str:
    for name, value in {"$__rate_interval": "1m", "$run": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@cache
def expressions() -> dict[str, str]:
    """PromQL of every panel, annotation and rule, with Grafana's variables filled in."""
    found = {}
    for board in boards():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found[f"{board['title']}: {panel['title']} {target['refId']}"] = filled_in(target["expr"])
        for annotation in board["annotations"]["list"]:
            found[f"{board['title']}: {annotation['name']}"] = filled_in(annotation["expr"])
    for rule in rules():
        found[rule.get("alert") or rule["record"]] = rule["expr"]
    return found


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Boards


def test_the_committed_boards_are_the_generated_ones() -> None:
    pytest.importorskip(
        "grafana_foundation_sdk", reason="building the boards needs grafana-foundation-sdk: extra dev"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(GRAFANA))
        made = importlib.import_module("boards.boards").render()
    assert {file.name: file.read_text() for file in FILES} == made, (
        "run: python deploy/grafana/build_dashboards.py"
    )


@pytest.mark.parametrize("where", expressions())
def test_every_metric_and_label_exists(where: str, exposed: dict[str, set[str]]) -> None:
    expression = expressions()[where]
    selectors = SELECTOR.findall(expression)
    assert selectors or "streamadv:" in expression
    available: set[str] = {"of"}  # made by label_replace
    for name, matchers in selectors:
        assert name in exposed, name
        assert set(MATCHER.findall(matchers)) <= exposed[name] | OUTER_LABELS, f"{name}{{{matchers}}}"
        available |= exposed[name]
    for labels in GROUPING.findall(expression):
        assert {label.strip() for label in labels.split(",")} <= available | OUTER_LABELS, labels


def test_facts_of_the_run_are_never_added_up_over_those_who_export_them() -> None:
    for where, expression in expressions().items():
        for aggregate in re.findall(r"(\w+)(?: by \([^)]*\))? \((?:rate\()?streamadv_run_", expression):
            assert aggregate in ("max", "min", "delta", "changes"), where


def test_every_label_in_a_legend_is_grouped_by() -> None:
    for panel in panels():
        for target in panel["targets"]:
            grouped = {
                label.strip() for labels in GROUPING.findall(target["expr"]) for label in labels.split(",")
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped | {"of"}, panel["title"]


def test_every_panel_says_what_it_shows_in_which_unit_and_what_to_do() -> None:
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["description"].count(". ") >= 1, panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_a_number_of_this_moment_is_asked_for_at_this_moment() -> None:
    """A range query with the last value would show what a dead process said."""
    shown = [panel for panel in panels() if panel["type"] == "stat"]
    assert shown
    for panel in shown:
        (target,) = panel["targets"]
        assert target["instant"] is True
        assert target["range"] is False
        says_none = "noValue" in panel["fieldConfig"]["defaults"]
        assert says_none or target["expr"].endswith("or vector(0)"), panel["title"]


def test_every_board_begins_with_the_health_of_the_run() -> None:
    heads = []
    for board in boards():
        first, *rest = board["panels"]
        assert first["title"] == "Is it healthy, and if not, why"
        ends = [number for number, panel in enumerate(rest) if panel["type"] == "row"]
        heads.append([panel["title"] for panel in rest[: ends[0]]])
        assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])
    assert heads[0] == heads[1] == heads[2]


def test_panels_do_not_overlap() -> None:
    for board in boards():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells


def test_boards_can_be_provisioned() -> None:
    assert {board["uid"] for board in boards()} == {
        "streamadv-training",
        "streamadv-flow",
        "streamadv-processes",
    }
    for board in boards():
        assert board.get("id") is None
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)


def test_the_choice_of_a_run_asks_for_a_label_that_exists(exposed: dict[str, set[str]]) -> None:
    for board in boards():
        variables = {variable["name"]: variable for variable in board["templating"]["list"]}
        assert set(variables) == {"datasource", "run"}
        assert variables["run"]["query"]["query"] == "label_values(streamadv_build_info, run)"
    assert "streamadv_build_info" in exposed


# Rules


def test_every_alert_has_a_summary_and_an_entry_in_the_runbooks() -> None:
    text = (ROOT / "docs" / "reference" / "alerts.md").read_text()
    entries = dict(re.findall(r"^### (Streamadv\w+)\n\n\*(page|warning)\.\*", text, flags=re.MULTILINE))
    assert entries == {rule["alert"]: rule["labels"]["severity"] for rule in alerts()}
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/reference/alerts.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]


@pytest.mark.parametrize("page", ["reference/alerts.md", "operate/troubleshooting.md"])
def test_pages_name_panels_and_boards_that_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    names = {" ".join(name.split()) for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", text)}
    assert names
    titles = {panel["title"] for panel in panels()} | {
        board["title"].removeprefix("streamadv: ") for board in boards()
    }
    assert names <= titles


def test_every_alert_has_a_case_that_fires_it() -> None:
    cases = yaml.safe_load((RULES / "tests" / "streamadv_test.yml").read_text())["tests"]
    fired = {
        name
        for case in cases
        for check in case.get("promql_expr_test", ())
        for sample in check["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert fired == {rule["alert"] for rule in alerts()}


@needs_promtool
def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    records = [
        {"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(expressions().values())
    ]
    file.write_text(json.dumps({"groups": [{"name": "boards", "rules": records}]}))
    promtool("check", "rules", str(file))


@needs_promtool
def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    promtool("check", "config", str(RULES.parent / "prometheus.yml"))


@needs_promtool
@pytest.mark.slow
def test_alerts_fire_when_they_should_and_not_before() -> None:
    promtool("test", "rules", str(RULES / "tests" / "streamadv_test.yml"))
