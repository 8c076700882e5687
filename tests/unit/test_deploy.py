"""The files in deploy/ fit the code: metrics, labels, paths, flags. No Docker, Prometheus or Grafana needed."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from streamadv.cli import make_parser

from .metrics.exposed import label_names

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "streamadv.json"
#: Labels that are not the code's: of the process (`serve`) and of the scrape.
OUTER_LABELS = {"run", "job", "instance"}

METRIC = re.compile(r"\bstreamadv_\w+")
SELECTOR = re.compile(r"\b(streamadv_\w+)(?:\{(.*?)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
STRING = re.compile(r'"[^"]*"')
FUNCTIONS = {"sum", "avg", "min", "max", "rate", "deriv", "time", "histogram_quantile", "by"}


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Every sample name that `/metrics` can show, with its labels."""
    return label_names()


@pytest.fixture(scope="module")
def builder() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEPLOY / "grafana"))
        yield importlib.import_module("build_dashboard")


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return board


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[Any]:
    """(panel, PromQL with Grafana's variables filled in) of every target."""
    return [
        pytest.param(panel["title"], filled_in(target["expr"]), id=f"{panel['title']} {target['refId']}")
        for panel in panels()
        for target in panel["targets"]
    ]


def every_expression() -> list[str]:
    return [filled_in(target["expr"]) for panel in panels() for target in panel["targets"]]


def filled_in(expression: str) -> str:
    for name, value in {"$__rate_interval": "1m", "$run": ".*", "$stage": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


# Grafana


def test_the_committed_dashboard_is_the_generated_one(builder: ModuleType) -> None:
    assert DASHBOARD.read_text() == builder.render(), "run: python deploy/grafana/build_dashboard.py"


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_metric_and_label_of_a_panel_exists(
    title: str, expression: str, exposed: dict[str, set[str]]
) -> None:
    selectors = SELECTOR.findall(expression)
    assert selectors, title
    available: set[str] = set()
    for name, matchers in selectors:
        assert name in exposed, f"{title}: {name}"
        assert set(MATCHER.findall(matchers)) <= exposed[name] | OUTER_LABELS, (
            f"{title}: {name}{{{matchers}}}"
        )
        available |= exposed[name]
    for labels in GROUPING.findall(expression):
        assert {label.strip() for label in labels.split(",")} <= available | OUTER_LABELS, (
            f"{title}: {labels}"
        )


def test_every_metric_label_in_a_legend_is_grouped_by(exposed: dict[str, set[str]]) -> None:
    for panel in panels():
        for target in panel["targets"]:
            grouped = {
                label.strip() for labels in GROUPING.findall(target["expr"]) for label in labels.split(",")
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped, panel["title"]


def test_variables_ask_for_labels_that_exist(exposed: dict[str, set[str]]) -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert set(variables) == {"datasource", "run", "stage"}
    for variable in (variables["run"], variables["stage"]):
        match = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"]["query"])
        assert match
        assert match[1] in exposed
        assert match[2] in exposed[match[1]] | OUTER_LABELS


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_expressions_are_built_of_what_promql_has(title: str, expression: str) -> None:
    """Brackets close in order, and nothing but known functions, metrics and labels stands outside strings."""
    plain = STRING.sub('""', expression)
    opened = []
    for character in plain:
        if character in "([{":
            opened.append(character)
        elif character in ")]}":
            assert opened, title
            assert opened.pop() + character in ("()", "[]", "{}"), title
    assert not opened, title
    outside = re.sub(r"\{[^}]*\}|\[\d+m\]|(by \([^)]*\))", "", plain)
    assert set(re.findall(r"[a-z_]+", METRIC.sub("", outside))) <= FUNCTIONS, title


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not on PATH")
def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(every_expression())]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    check = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_rates_use_the_interval_of_the_data_source() -> None:
    for panel in panels():
        for target in panel["targets"]:
            assert set(re.findall(r"\[(.*?)\]", target["expr"])) <= {"$__rate_interval"}, panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_can_be_provisioned() -> None:
    board = dashboard()
    assert board["id"] is None
    assert board["uid"] == "streamadv"
    assert board["editable"] is True
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_board_answers_the_four_questions_first_asked() -> None:
    text = " ".join(every_expression())
    for metric in ("rewards_total", "kl_sum_total", "policy_lag_versions_bucket", "run_stream_entries"):
        assert f"streamadv_{metric}" in text


# Prometheus and compose


def test_prometheus_scrapes_services_that_serve_metrics() -> None:
    services = load("compose.yaml")["services"]
    (job,) = load("prometheus/prometheus.yml")["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    serving = {name for name, service in services.items() if "--metrics-port=9100" in command(service)}
    assert set(discovery["names"]) == serving
    assert discovery["port"] == 9100
    for pattern in job["file_sd_configs"][0]["files"]:
        files = list((DEPLOY / "prometheus").glob(pattern))
        assert files
        for file in files:
            assert isinstance(yaml.safe_load(file.read_text()), list)


@pytest.mark.parametrize("service", ["grouper", "advantage"])
def test_workers_start_with_flags_that_exist(service: str) -> None:
    words = [
        re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word)
        for word in command(load("compose.yaml")["services"][service])
    ]
    arguments = make_parser(words).parse_args(words)
    assert arguments.redis_url == "redis://redis:6379/0"
    assert arguments.run_name == "default"
    assert arguments.metrics_port == 9100


def test_the_server_keeps_everything_and_evicts_nothing() -> None:
    text = (DEPLOY / "redis" / "redis.conf").read_text()
    settings = dict(line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert "--maxmemory" in command(load("compose.yaml")["services"]["redis"])


@pytest.mark.parametrize("name", load("compose.yaml")["services"])
def test_every_service_is_pinned_confined_and_checked(name: str) -> None:
    compose = load("compose.yaml")
    service = compose["services"][name]
    assert re.search(r":(local|v?\d+\.\d+\.\d+[\w.-]*)$", service["image"])
    assert int(service["user"].split(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["healthcheck"]["test"]
    assert service["profiles"] in (["core"], ["observability"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for other in service.get("depends_on", {}):
        assert compose["services"][other]["profiles"] == service["profiles"]


@pytest.mark.parametrize("name", load("compose.yaml")["services"])
def test_mounted_files_and_volumes_exist(name: str) -> None:
    compose = load("compose.yaml")
    for volume in compose["services"][name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
            assert volume.endswith(":ro"), volume
        else:
            assert source in compose["volumes"]


def test_grafana_finds_its_data_source_and_dashboards() -> None:
    compose = load("compose.yaml")
    (source,) = load("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    interval = load("prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = load("grafana/provisioning/dashboards/streamadv.yml")["providers"]
    mounts = dict(volume.split(":")[1::-1] for volume in compose["services"]["grafana"]["volumes"])
    assert (DEPLOY / mounts[provider["options"]["path"]] / DASHBOARD.name).exists()


def test_the_image_is_built_from_files_that_exist() -> None:
    build = load("compose.yaml")["services"]["grouper"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    dockerfile = (context / build["dockerfile"]).read_text()
    allowed = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for line in re.findall(r"^COPY (.*) \S+$", dockerfile, flags=re.MULTILINE):
        for source in line.split():
            assert (context / source).exists(), source
            assert source in allowed
    assert re.search(r"^USER [1-9]\d*:", dockerfile, flags=re.MULTILINE)


def command(service: dict[str, Any]) -> list[str]:
    words: list[str] = service.get("command", [])
    return words
