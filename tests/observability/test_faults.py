"""The boards and alerts on the real thing: a healthy run, then eleven faults, watched by a real Prometheus.

`make test-observability` (STREAMADV_OBSERVABILITY=1); the healthy run takes STREAMADV_OBSERVABILITY_MINUTES (10).
With STREAMADV_OBSERVABILITY_OUT=DIR the results are written there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import redis

from .lab import Lab, Shown, panels, until

pytestmark = [
    pytest.mark.skipif(
        "STREAMADV_OBSERVABILITY" not in os.environ, reason="takes half an hour: make test-observability"
    ),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus (Debian: prometheus) is not on PATH"
    ),
    pytest.mark.processes,
    pytest.mark.server,
    pytest.mark.slow,
]

MINUTES: Final = float(os.environ.get("STREAMADV_OBSERVABILITY_MINUTES", "10"))
#: Panels that draw nothing in a healthy run of this lab, and why.
EMPTY: Final = {
    "Firing alerts": "none fires",
    "Why nothing moves": "all moves",
    "Why nothing moves, over time": "all moves",
    "Evaluation": "nothing is evaluated",
    "Clipped": "the chain clips nothing",
    "Connection trouble": "there is none",
    "Dropped": "nothing is dropped",
    "Dead letters": "there are none",
    "annotation Trainer sessions": "none begins",
    "annotation Package versions": "none is new",
    "Turns": "the rollouts have no steps",
    "Processes that wait, by reason": "nobody waits for more than a second",
}
#: Panels that need the Redis exporter.
BY_REDIS_EXPORTER: Final = {"Processor of the server", "Connections", "Append-only file"}


class Fault(NamedTuple):
    """One thing that goes wrong: how, what repairs it, which panel shows it, which alert fires."""

    name: str
    induce: Callable[[Lab], None]
    repair: Callable[[Lab], None]
    board: str
    title: str
    shows: Callable[[list[Shown]], bool]
    alert: str


def writes(text: str) -> Callable[[Lab], None]:
    return lambda lab: void(lab.wrong.write_text(text))


def kills(*names: str) -> Callable[[Lab], None]:
    return lambda lab: lab.kill(*names)


def starts(*names: str) -> Callable[[Lab], None]:
    return lambda lab: [lab.start(name) for name in names] and None


def void(_: object) -> None:
    """Returns nothing: for lambdas, and as the repair of what ends by itself."""


def fill_the_server(lab: Lab) -> None:
    used = int(lab.client().info("memory")["used_memory"])  # type: ignore[index]
    lab.client().config_set("maxmemory", used - (1 << 16))


def empty_the_server(lab: Lab) -> None:
    lab.client().config_set("maxmemory", 256 << 20)


def spoil_payloads(lab: Lab) -> None:
    """Payloads that wait lose the end of a column, again and again for a while."""

    def spoil() -> None:
        client = lab.client()
        with contextlib.suppress(redis.exceptions.ConnectionError):  # the lab was closed
            for _ in range(60):
                for key in client.scan_iter("*:payload:*", count=500):
                    if client.hexists(key, "input_ids"):
                        client.hset(key, "input_ids", b"xxx")
                time.sleep(0.1)

    threading.Thread(target=spoil, daemon=True).start()


def value(**labels: str) -> Callable[[list[Shown]], float]:
    """Sum of the series of a panel with these labels; NaN without any."""

    def of(rows: list[Shown]) -> float:
        found = [row.value for row in rows if labels.items() <= row.labels.items()]
        return sum(found) if found else float("nan")

    return of


def named(label: str, *names: str) -> Callable[[list[Shown]], bool]:
    """Whether a panel shows a series of one of these names."""
    return lambda rows: any(row.labels.get(label) in names for row in rows)


FAULTS: Final = [
    Fault(
        "producers are killed",
        kills("producer1", "producer2"),
        starts("producer1", "producer2"),
        "flow",
        "Producers alive",
        lambda rows: value()(rows) == 0,
        "StreamadvNoProducer",
    ),
    Fault(
        "one rollout of each group never comes",
        writes("missing"),
        writes(""),
        "flow",
        "What open groups lack",
        lambda rows: value(rollouts="one")(rows) >= 20,
        "StreamadvIncompleteGroups",
    ),
    Fault(
        "all rewards of each group are equal",
        writes("equal"),
        writes(""),
        "training",
        "Groups kept",
        lambda rows: bool(rows) and min(row.value for row in rows) < 0.05,
        "StreamadvEverythingLost",
    ),
    Fault(
        "both advantage workers are killed",
        kills("advantage1", "advantage2"),
        starts("advantage1", "advantage2"),
        "processes",
        "Workers by stream",
        lambda rows: value(stream="work", state="alive")(rows) == 0,
        "StreamadvNoWorker",
    ),
    Fault(
        "rollouts are of an old version",
        writes("stale"),
        writes(""),
        "flow",
        "Groups by outcome",
        lambda rows: value(outcome="stale")(rows) > 0,
        "StreamadvTooStale",
    ),
    Fault(
        "the server is at its maxmemory",
        fill_the_server,
        empty_the_server,
        "flow",
        "Fullest memory",
        lambda rows: value()(rows) > 0.95,
        "StreamadvServerMemory",
    ),
    Fault(
        "rewards are -1 and the KL is 6.4",
        writes("reward"),
        writes(""),
        "training",
        "Reward, mean",
        lambda rows: any(row.value < -0.9 for row in rows),
        "StreamadvRewardFell",
    ),
    Fault(
        "payloads cannot be read",
        spoil_payloads,
        void,
        "flow",
        "Dead letters",
        lambda rows: value()(rows) > 0,
        "StreamadvDeadLetters",
    ),
    Fault(
        "the grouper is killed",
        kills("grouper"),
        starts("grouper"),
        "flow",
        "Run can be read",
        lambda rows: value()(rows) == 0,
        "StreamadvRunUnreadable",
    ),
    Fault(
        "the server hangs",
        lambda lab: lab.signal_server(signal.SIGSTOP),
        lambda lab: lab.signal_server(signal.SIGCONT),
        "flow",
        "Run can be read",
        lambda rows: value()(rows) == 0,
        "StreamadvServerUnreachable",
    ),
    Fault(
        "the trainer is killed",
        kills("trainer"),
        starts("trainer"),
        "flow",
        "Trainer",
        named("state", "lost"),
        "StreamadvTrainerLost",
    ),
]
#: Alerts that fire beside the one of their fault.
ALSO: Final = {
    "rewards are -1 and the KL is 6.4": {"StreamadvKLHigh"},
    "the server hangs": {"StreamadvTrainerStarved", "StreamadvRunUnreadable"},
    "one rollout of each group never comes": {"StreamadvStragglers", "StreamadvTrainerStarved"},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def results(lab: Lab) -> Iterator[list[dict[str, object]]]:
    """What was seen of each fault; written down with what the panels drew, if somebody asks for it."""
    began, seen = time.time(), list[dict[str, object]]()
    yield seen
    if folder := os.environ.get("STREAMADV_OBSERVABILITY_OUT"):
        drawn = {
            f"{board}/{title}": [lab.over_time(expr, began, time.time(), 4) for expr in exprs]
            for (board, title), exprs in panels().items()
        }
        out = {"began": began, "ended": time.time(), "faults": seen, "panels": drawn}
        Path(folder, "results.json").write_text(json.dumps(out))


@pytest.mark.timeout(300)
def test_every_query_is_answered_and_every_panel_of_a_healthy_run_draws(lab: Lab) -> None:
    time.sleep(20)  # rates and medians over a while
    empty = set()
    for (_, title), exprs in panels().items():
        rows = [row for expr in exprs for row in lab.ask(expr)]
        if not rows:
            empty.add(title)
    assert empty <= set(EMPTY) | (set() if lab.redis_exporter else BY_REDIS_EXPORTER)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_shown_within_a_minute_and_its_alert_fires(
    lab: Lab, results: list[dict[str, object]], fault: Fault
) -> None:
    expected = {fault.alert, *ALSO.get(fault.name, ())}
    until(
        lambda: not fault.shows(lab.panel(fault.board, fault.title)) and not lab.firing() & expected,
        "neither is so at first",
        150,
    )
    began = time.time()
    fault.induce(lab)
    try:
        shown = until(lambda: fault.shows(lab.panel(fault.board, fault.title)), f"{fault.title} shows it")
        fired = until(lambda: fault.alert in lab.firing(), f"{fault.alert} fires", 90) + shown
        until(lambda: expected <= lab.firing(), f"{expected} fire", 90)
        seen = {"name": fault.name, "began": began, "shown_s": shown, "fired_s": fired}
        results.append(
            {
                **seen,
                "panel": fault.title,
                "alert": fault.alert,
                "others": sorted(lab.firing() - {fault.alert}),
            }
        )
    finally:
        fault.repair(lab)
        if results and results[-1]["began"] == began:
            results[-1]["ended"] = time.time()


@pytest.mark.timeout(60 * MINUTES + 200)
def test_a_healthy_run_fires_no_alert(tmp_path: Path) -> None:
    """With the rules as they are shipped, and 10 s between scrapes."""
    with Lab(tmp_path, short=False) as lab:
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            time.sleep(5)
            assert lab.firing() == set()
        pending = {
            row["metric"]["alertname"] for row in lab.over_time("ALERTS", time.time() - 3600, time.time(), 10)
        }
        assert lab.ask("streamadv_run_version > 10")
        print("pending for a while:", pending)
