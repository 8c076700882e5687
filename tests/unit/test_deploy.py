"""The files in deploy/ fit the code: metrics, labels, paths, flags. No Docker, Prometheus or Grafana needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamadv.cli import make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


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
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / mounts[provider["options"]["path"]] / Path(home).name).exists()


def test_prometheus_finds_its_rules() -> None:
    (pattern,) = load("prometheus/prometheus.yml")["rule_files"]
    assert list((DEPLOY / "prometheus").glob(pattern))


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
