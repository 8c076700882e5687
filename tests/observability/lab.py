"""A pipeline under a real Prometheus: its processes, what to do to them, and what the boards then show.

Prometheus scrapes every two seconds, and `Lab.rules` shortens the durations in the rules, so that a fault takes
seconds to be told and not minutes. Expressions and labels are those that are shipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis
import yaml

from streamadv.store.embedded import EmbeddedServer

ROOT: Final = Path(__file__).parents[2]
BOARDS: Final = ROOT / "deploy" / "grafana" / "dashboards"
RULES: Final = ROOT / "deploy" / "prometheus" / "rules" / "streamadv.yml"
RUN: Final = "lab"
REDIS_EXPORTER: Final = "prometheus-redis-exporter"
SCRAPE_S: Final = 2
RATE: Final = "10s"
#: Durations of the rules and what stands for them here.
SHORT: Final = {"1h": "60s", "30m": "30s", "15m": "60s", "10m": "20s", "5m": "6s", "2m": "4s", "1m": "4s"}
SHORT_SECONDS: Final = {"> 120": "> 20", "), 60)": "), 15)"}


class Shown(NamedTuple):
    """One series of a panel."""

    labels: dict[str, str]
    value: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def shortened(rules: str) -> str:
    """The rules with short durations."""
    for long, short in SHORT_SECONDS.items():
        assert long in rules
        rules = rules.replace(long, short)
    return re.sub(
        r"(?<=for: )(\d+[mh])\b|(?<=\[)(\d+[mh])(?=\])|(?<=offset )(\d+[mh])\b",
        lambda match: SHORT[match[0]],
        rules,
    )


def until(true: Callable[[], object], what: str, within_s: float = 60.0) -> float:
    """Seconds until something is so, asked four times a second."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() < began + within_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.25)
    return time.monotonic() - began


class Lab:
    """A server, a grouper, two advantage workers, two producers, a trainer, and a Prometheus that watches them."""

    def __init__(self, folder: Path, *, short: bool = True) -> None:
        self.folder = folder
        self.short = short
        self.server = EmbeddedServer(folder / "server", maxmemory="256mb")
        self.wrong = folder / "wrong"
        self.wrong.write_text("")
        names = ("grouper", "advantage1", "advantage2", "producer1", "producer2", "trainer")
        self.ports = {name: free_port() for name in names}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.redis_exporter = shutil.which(REDIS_EXPORTER)
        self.redis_port = free_port()

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.server.start()
        for name in self.ports:
            self.start(name)
        if self.redis_exporter is not None:
            self._spawn(
                REDIS_EXPORTER,
                [
                    self.redis_exporter,
                    f"--redis.addr={self.server.open_url.removesuffix('/0')}",
                    f"--web.listen-address=127.0.0.1:{self.redis_port}",
                ],
            )
        self._start_prometheus()
        targets = len(self.ports) + (self.redis_exporter is not None)
        until(lambda: len(self.ask("up == 1")) == targets, "all targets are up", 180)
        until(lambda: self.ask("streamadv_batch_version > 3"), "the trainer trains", 90)

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.server.kill()
        self.server.close()

    def start(self, name: str) -> None:
        """Start a process, or start it again."""
        url, port = self.server.open_url, str(self.ports[name])
        role = name.rstrip("12")
        if role in ("producer", "trainer"):
            roles = {"producer": "produce", "trainer": "train"}
            command = ["tests.observability.roles", roles[role], url, RUN, port, str(self.wrong)]
        else:
            command = ["streamadv", "worker", role, "--redis", url, "--run", RUN, "--metrics-port", port]
        self._spawn(name, [sys.executable, "-m", *command])

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
            self.processes[name].wait()

    def signal_server(self, number: signal.Signals) -> None:
        os.kill(self.server.pid, number)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.server.open_url)

    def ask(self, expr: str) -> list[Shown]:
        """The value of an expression now, without NaN, which draws nothing; raises what Prometheus says against it."""
        answer = self._get("query", query=expr)
        rows = answer["result"] if answer["resultType"] == "vector" else []
        return [Shown(row["metric"], float(row["value"][1])) for row in rows if row["value"][1] != "NaN"]

    def over_time(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get("query_range", query=expr, start=start, end=end, step=step)[
            "result"
        ]
        return result

    def firing(self) -> set[str]:
        return {row.labels["alertname"] for row in self.ask('ALERTS{alertstate="firing"}')}

    def panel(self, board: str, title: str) -> list[Shown]:
        """What a panel shows now."""
        return [row for expr in expressions(board, title) for row in self.ask(expr)]

    def _get(self, what: str, **arguments: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments.get('query')}: {error.read().decode()}") from None

    def _start_prometheus(self) -> None:
        binary = shutil.which("prometheus")
        assert binary is not None
        rules = RULES.read_text()
        (self.folder / "rules.yml").write_text(shortened(rules) if self.short else rules)
        scrape = f"{SCRAPE_S if self.short else 10}s"
        config = {
            "global": {
                "scrape_interval": scrape,
                "scrape_timeout": scrape if self.short else "8s",
                "evaluation_interval": scrape,
            },
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {
                    "job_name": "streamadv",
                    "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in self.ports.values()]}],
                },
                {
                    "job_name": "redis",
                    "static_configs": [{"targets": [f"127.0.0.1:{self.redis_port}"]}]
                    if self.redis_exporter
                    else [],
                },
            ],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._spawn(
            "prometheus",
            [
                binary,
                f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
        )
        until(self._is_ready, "Prometheus is ready")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def panels() -> dict[tuple[str, str], list[str]]:
    """Expressions by board and title of the panel, with Grafana's variables filled in."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(BOARDS.glob("*.json")):
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            if panel["type"] != "row":
                found[file.stem, panel["title"]] = [_filled_in(target["expr"]) for target in panel["targets"]]
        for annotation in board["annotations"]["list"]:
            found[file.stem, f"annotation {annotation['name']}"] = [_filled_in(annotation["expr"])]
    return found


def expressions(board: str, title: str) -> list[str]:
    return panels()[board, title]


def _filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", RATE).replace("$run", RUN)
