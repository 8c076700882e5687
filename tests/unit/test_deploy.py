"""The files in deploy/ fit the code: metrics, labels, paths, flags. No Docker, Prometheus or Grafana needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamadv.cli import make_parser
from streamadv.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PORT = "STREAMADV_METRICS_PORT"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


# Prometheus and compose


def test_prometheus_scrapes_services_that_serve_metrics() -> None:
    services = load("compose.yaml")["services"]
    job, redis = load("prometheus/prometheus.yml")["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    serving = {name for name, service in services.items() if environment(service).get(PORT) == "9100"}
    assert set(discovery["names"]) == serving
    assert discovery["port"] == 9100
    assert redis["static_configs"] == [{"targets": ["redis-exporter:9121"]}]
    for name in (*serving, "redis-exporter"):
        assert "metrics" in services[name]["networks"]
    for pattern in job["file_sd_configs"][0]["files"]:
        files = list((DEPLOY / "prometheus").glob(pattern))
        assert files
        for file in files:
            assert isinstance(yaml.safe_load(file.read_text()), list)


@pytest.mark.parametrize("name", ["grouper", "advantage", "advantage-gpu", "exporter"])
def test_processes_start_with_arguments_and_settings_that_exist(name: str) -> None:
    service = load("compose.yaml")["services"][name]
    words = command(service)
    make_parser(words).parse_args(words)
    assert set(environment(service)) <= {f"STREAMADV_{field.upper()}" for field in Settings.model_fields}
    assert environment(service)["STREAMADV_LOG_FORMAT"] == "json"
    password = Path(environment(service)["STREAMADV_REDIS_PASSWORD_FILE"])
    assert password.parent == Path("/run/secrets")
    user = re.search(r"//streamadv-(\w+)@redis:6379/0$", environment(service)["STREAMADV_REDIS_URL"])
    assert user
    assert service["secrets"] == [password.name] == [f"{user[1]}.password"]


def test_alerts_go_to_a_service_that_is_there() -> None:
    compose = load("compose.yaml")
    ((target,),) = [
        configuration["targets"]
        for manager in load("prometheus/prometheus.yml")["alerting"]["alertmanagers"]
        for configuration in manager["static_configs"]
    ]
    host, port = target.split(":")
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    assert set(compose["services"][host]["networks"]) & set(compose["services"]["prometheus"]["networks"])
    routes = load("alertmanager/alertmanager.yml")
    assert routes["route"]["receiver"] in [receiver["name"] for receiver in routes["receivers"]]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")
def test_secrets_are_made_for_every_service_that_mounts_one(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "secrets.sh", tmp_path)
    (tmp_path / "streamadv").write_text(f'#!/bin/sh\nexec {sys.executable} -m streamadv "$@"\n')
    (tmp_path / "streamadv").chmod(0o755)
    outside = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    make = ["sh", str(tmp_path / "secrets.sh"), "exp1"]
    subprocess.run(make, env=outside, check=True)
    compose = load("compose.yaml")
    for secret in compose["secrets"].values():
        assert (tmp_path / secret["file"]).read_text()
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    users = (tmp_path / "secrets" / "users.acl").read_text().splitlines()
    assert [line.split()[1] for line in users] == [
        "default",
        "owner",
        "streamadv-producer",
        "streamadv-pipeline",
        "streamadv-observer",
    ]
    assert users[0] == "user default off ~* &* +@all", "the server reads its append-only file as default"
    address = environment(compose["services"]["redis-exporter"])["REDIS_ADDR"]
    passwords = json.loads((tmp_path / "secrets" / "redis-exporter.json").read_text())
    assert passwords == {address: (tmp_path / "secrets" / "observer.password").read_text().strip()}
    again = subprocess.run(make, env=outside, check=False, capture_output=True, text=True)
    assert again.returncode == 1
    assert "already" in again.stderr


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
    assert re.search(r":(local(-torch|-cuda)?|v?\d+\.\d+\.\d+[\w.-]*)$", service["image"])
    assert int(service["user"].split(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["healthcheck"]["test"]
    assert service["profiles"] in (["core"], ["gpu"], ["observability"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    assert set(service["networks"]) <= set(compose["networks"])
    assert set(service.get("secrets", [])) <= set(compose["secrets"])
    for other in service.get("depends_on", {}):
        assert compose["services"][other]["profiles"] == ["core"]
        assert set(compose["services"][other]["networks"]) & set(service["networks"])


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


@pytest.mark.parametrize("name", ["prometheus.yml", "demo.yml"])
def test_prometheus_finds_its_rules(name: str) -> None:
    (pattern,) = load(f"prometheus/{name}")["rule_files"]
    assert list((DEPLOY / "prometheus").glob(pattern))


@pytest.mark.parametrize("name", ["grouper", "advantage", "advantage-gpu"])
def test_images_are_built_from_files_that_exist(name: str) -> None:
    build = load("compose.yaml")["services"][name]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    dockerfile = (context / build["dockerfile"]).read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, flags=re.MULTILINE)
    assert build["target"] in stages
    for argument in build.get("args", {}):
        assert re.search(rf"^ARG {argument}=", dockerfile, flags=re.MULTILINE)
    allowed = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copies = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.*) \S+$", dockerfile, flags=re.MULTILINE)
    assert copies
    for source in " ".join(copies).split():
        assert (context / source).exists(), source
        assert source in allowed
    final = dockerfile.split("\nFROM ")[-2:]
    assert all(re.search(r"^USER [1-9]\d*:", stage, flags=re.MULTILINE) for stage in final)


def test_the_image_without_torch_is_built_without_it() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    stages = {stage.split()[2]: stage for stage in dockerfile.split("\nFROM ")[1:]}
    assert "--from=build " in stages["worker"]
    assert "torch" not in stages["build"]
    assert list(stages)[-1] == "worker", "what is built without --target"


def test_images_have_fixed_versions() -> None:
    """Every package that the images' installations name directly, and all that comes with them here."""
    text = (DEPLOY / "constraints.txt").read_text()
    pinned = {line.split("==")[0] for line in text.splitlines() if not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["dependencies"] + project["optional-dependencies"]["torch"]
    assert {re.split(r"[<>=]", requirement)[0] for requirement in named} <= pinned
    (torch,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert torch in text.splitlines()


@pytest.mark.processes
def test_the_entrypoint_gives_numba_a_copy_it_can_write_to(tmp_path: Path) -> None:
    kernels, copy = tmp_path / "kernels", tmp_path / "tmp" / "kernels"
    (kernels / "tokens").mkdir(parents=True)
    (kernels / "tokens" / "scan.nbi").write_text("loop")
    copy.parent.mkdir()
    script = (DEPLOY / "entrypoint.sh").read_text().replace("/opt/streamadv/kernels", str(kernels))
    (tmp_path / "streamadv").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "streamadv").chmod(0o755)
    outside = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NUMBA_CACHE_DIR": str(copy)}
    for _ in range(2):  # a container that is started again has the copy
        started = subprocess.run(
            ["sh", "-c", script, "entrypoint", "worker", "advantage"],
            env=outside,
            check=True,
            capture_output=True,
            text=True,
        )
        assert started.stdout == "worker advantage\n"
        assert (copy / "tokens" / "scan.nbi").read_text() == "loop"


def environment(service: dict[str, Any]) -> dict[str, str]:
    variables: dict[str, str] = service.get("environment", {})
    return variables


def command(service: dict[str, Any]) -> list[str]:
    words: list[str] = service.get("command", [])
    return words
