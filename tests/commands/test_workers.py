"""Worker processes: they wait for the server, stop on a signal, and refuse what the run was not created with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer, free_port
from tests.support import producing, push_groups

pytestmark = [pytest.mark.server, pytest.mark.processes]


def start(url: str, run: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "streamadv", "worker", *words, "--redis", url, "--run", run],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def port() -> int:
    """A free one, that no outgoing connection is given meanwhile."""
    return free_port()


@pytest.fixture
def later(port: int) -> Iterator[EmbeddedServer]:
    """A server that is not started yet."""
    server = EmbeddedServer(port=port)
    yield server
    server.close()


@pytest.mark.release
@pytest.mark.slow
def test_workers_wait_for_the_server_work_and_stop(
    later: EmbeddedServer, port: int, run: str, tmp_path: Path
) -> None:
    url = f"redis://127.0.0.1:{port}/0"
    workers = [
        start(url, run, "grouper"),
        start(url, run, "advantage", "--device", "cpu"),
    ]
    for worker in workers:
        assert worker.stderr is not None
        while "waiting for the server" not in (line := worker.stderr.readline()):
            assert line
    later.start()
    command = [sys.executable, "-m", "streamadv", "consume", "-o", str(tmp_path / "out"), "--max-groups", "3"]
    with producing(later.url, run) as producer:
        push_groups(producer, 3)
        consumed = subprocess.run(
            [*command, "--timeout", "240", "--redis", url, "--run", run],
            check=False,
            capture_output=True,
            text=True,
        )
    assert consumed.returncode == 0, consumed.stderr
    assert len((tmp_path / "out").read_text().splitlines()) == 6
    for worker, number in zip(workers, (signal.SIGTERM, signal.SIGINT), strict=True):
        worker.send_signal(number)
        _, log = worker.communicate(timeout=240)
        assert worker.returncode == 0, log
        assert "finishing what is in hand" in log
        assert "Traceback" not in log


def test_a_second_signal_ends_a_worker_at_once() -> None:
    """In the middle of what it has in hand."""
    lines = ("from workers.process import stop_on_signals", "import threading", "stop_on_signals()")
    code = "\n".join([*lines, "print('begun', flush=True)", "threading.Event().wait()"])
    worker = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert worker.stderr is not None
    assert worker.stdout.readline() == "begun\n"
    worker.send_signal(signal.SIGTERM)
    assert "SIGTERM: finishing what is in hand" in worker.stderr.readline()
    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=240)
    assert worker.returncode == 128 + signal.SIGINT


def test_a_worker_waits_for_a_server_that_does_not_write(later: EmbeddedServer, run: str) -> None:
    later.start()
    with Connection(later.url) as connection:
        connection.scripts.config_set("min-replicas-to-write", 1)
        worker = start(later.url, run, "grouper")
        assert worker.stderr is not None
        while "waiting for the server: NOREPLICAS" not in (line := worker.stderr.readline()):
            assert line
        worker.terminate()
        _, log = worker.communicate(timeout=240)
    assert worker.returncode == 130, log
    assert "Traceback" not in log


def test_every_line_of_a_worker_that_logs_json_is_a_record(redis_url: str, run: str) -> None:
    with producing(redis_url, run):
        worker = start(redis_url, run, "grouper", "--log-format", "json")
        assert worker.stderr is not None
        first = worker.stderr.readline()
        worker.terminate()
        _, log = worker.communicate(timeout=240)
    records = [json.loads(line) for line in [first, *log.splitlines()]]
    assert {(record["run"], record["role"]) for record in records} == {(run, "grouper")}
    assert len({record["process"] for record in records}) == 1
    assert {"metrics_served", "stopping"} <= {record["event"] for record in records}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("scorer", "math:fabs", "--name", "nobody"), "'nobody' is not one of run"),
        *(
            pytest.param(*given, marks=pytest.mark.release)
            for given in (
                (("scorer", "os:getpid", "--name", "judge"), "cannot be called with one argument"),
                (("advantage", "--device", "cuda"), "this machine has none"),
            )
        ),
    ],
)
def test_a_worker_that_cannot_begin_never_says_that_it_is_ready(
    redis_url: str, run: str, words: tuple[str, ...], problem: str
) -> None:
    if words[0] == "advantage" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with producing(redis_url, run, {"scorers": ("judge",)}):
        worker = start(redis_url, run, *words)
        _, log = worker.communicate(timeout=240)
    assert worker.returncode == 1
    assert problem in log
    assert "ready" not in log


def asked(port: int, path: str) -> tuple[int, str]:
    """Status and text of an answer; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()
    except OSError:
        return 0, ""


def test_a_worker_is_alive_without_the_server_and_ready_with_it(
    later: EmbeddedServer, port: int, run: str
) -> None:
    probes = free_port()
    worker = start(f"redis://127.0.0.1:{port}/0", run, "grouper", "--metrics-port", str(probes))
    try:
        assert worker.stderr is not None
        while "waiting for the server" not in (line := worker.stderr.readline()):
            assert line
        assert asked(probes, "/livez") == (200, "alive\n")
        assert asked(probes, "/readyz")[0] == 503
        assert f'streamadv_run_readable{{run="{run}"}} 0.0' in asked(probes, "/metrics")[1]
        later.start()
        while "ready: run" not in (line := worker.stderr.readline()):
            assert line
        assert asked(probes, "/readyz") == (200, "ready\n")
        text = asked(probes, "/metrics")[1]
        assert f'streamadv_run_readable{{run="{run}"}} 1.0' in text
        assert f'streamadv_acked_total{{run="{run}",stage="grouper"}} 0.0' in text
        worker.terminate()
        assert worker.wait(240) == 0
    finally:
        worker.kill()
        worker.stderr.close() if worker.stderr else None


def test_an_exporter_tells_of_a_run_that_no_grouper_serves(redis_url: str, run: str) -> None:
    probes = free_port()
    command = [sys.executable, "-m", "streamadv", "exporter", "--redis", redis_url, "--run", run]
    with subprocess.Popen(
        [*command, "--metrics-port", str(probes)], stderr=subprocess.PIPE, text=True
    ) as exporter:
        assert exporter.stderr is not None
        while "metrics on port" not in (line := exporter.stderr.readline()):
            assert line
        # there is no such run
        assert f'streamadv_run_readable{{run="{run}"}} 0.0' in asked(probes, "/metrics")[1]
        with producing(redis_url, run) as producer:
            push_groups(producer, 1)
            text = asked(probes, "/metrics")[1]
        assert f'streamadv_run_blocked{{reason="no_grouper",run="{run}"}} 1.0' in text
        assert asked(probes, "/readyz") == (200, "ready\n")
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(240) == 0
