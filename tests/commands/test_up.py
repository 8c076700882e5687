"""`streamadv up`: everything it starts ends with it, however it ends, and with the status of its commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamadv.cli import main
from streamadv.cli.parser import split_commands
from streamadv.errors import ProcessEndedError
from streamadv.processes import machine, worker
from streamadv.processes.worker import LONGEST_S, MOST_ENDS, WORKED_S, Kept
from streamadv.store.connection import Connection
from streamadv.trajectory.interchange import write_trajectory
from tests.children import descendants, runs, worker_of
from tests.clusters import until
from tests.support import trajectory

DEADLINE_S = 240.0  # bounds a hang
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `streamadv up` with these words, without a server in the environment."""
    started: list[subprocess.Popen[str]] = []
    environment = {name: value for name, value in os.environ.items() if name != "STREAMADV_REDIS_URL"}

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamadv", "up", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OMP_NUM_THREADS": "1",
            },
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):  # what was left behind may still have them
            assert pipe is not None
            pipe.close()


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.processes
def test_a_file_goes_through_all_stages_of_a_run_with_settings(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    with (tmp_path / "in.jsonl").open("wb") as file:
        for index in range(4):
            write_trajectory(file, trajectory("g", index, 4, reward=float(index)))
        write_trajectory(file, trajectory("filtered", 0, 1))
    streamadv = (sys.executable, "-m", "streamadv")
    create = "{0} runs create --zero-variance-filter >&2 && {0} replay in.jsonl".format(" ".join(streamadv))
    words = ("--", "sh", "-c", create, "--", *streamadv, "consume", "-o", "out.jsonl")
    written, errors = up("--run", "whole", *words).communicate(timeout=DEADLINE_S)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(line["advantages"]) > 0 for line in lines] == [True] * 4, errors
    assert "sh | pushed 5, duplicates 0" in written
    assert "run whole, 1 grouper, 1 advantage worker, 2 commands" in errors


@linux
@pytest.mark.slow
@pytest.mark.processes
def test_a_script_without_its_interpreter_is_told(up: Callable[..., subprocess.Popen[str]]) -> None:
    process = up("--", "no_such_script.py")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 127
    assert "No such file or directory: write `python no_such_script.py`" in errors


@linux
@pytest.mark.slow
@pytest.mark.processes
def test_the_first_command_that_fails_ends_everything(up: Callable[..., subprocess.Popen[str]]) -> None:
    process = up("--", "sh", "-c", "sleep 1000", "--", "sh", "-c", "exit 3", "--", "sleep", "1000")
    assert process.wait(DEADLINE_S) == 3
    assert "up: sh-2 ended with status 3" in process.communicate()[1]


@linux
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(up: Callable[..., subprocess.Popen[str]], number: signal.Signals) -> None:
    process = up("--", "sh", "-c", "sleep 1000 & echo ready; wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    until(lambda: worker_of(process.pid, " worker grouper"), "no grouper")
    until(
        lambda: any(each.startswith("sleep 1000") for each in descendants(process.pid).values()), "no sleep"
    )
    started = descendants(process.pid)
    process.send_signal(number)
    status = process.wait(DEADLINE_S)
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: not any(map(runs, started)), "something runs on")


@linux
@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_worker_is_started_again(up: Callable[..., subprocess.Popen[str]]) -> None:
    process = up("--workers", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    url = process.stdout.readline().strip()
    with Connection(url) as connection:
        connection.wait_until_ready(DEADLINE_S)
    until(lambda: worker_of(process.pid, " worker grouper"), "no grouper")
    first = worker_of(process.pid, " worker grouper")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    while "up: grouper ended with status 137, is started again in" not in (line := process.stderr.readline()):
        assert line
    until(lambda: worker_of(process.pid, " worker grouper") not in (None, first), "no other grouper")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0  # it has run until Ctrl-C, as asked


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_refuses_to_start_ends_everything(up: Callable[..., subprocess.Popen[str]]) -> None:
    process = up("--import", "no_such_module", "--", "sleep", "1000")
    errors = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 1
    assert "no_such_module" in errors
    assert "streamadv: error: advantage ended with status 1" in errors


PROGRAMS = """
import sys
import threading
import streamadv as sa

run = sys.argv[1] or None
with sa.Producer(sa.redis_url(), run) as producer:
    print("producer is in", producer.run, flush=True)
    queue = sa.TrainerQueue(sa.redis_url(), run).open()
    threading.Event().wait()  # until it is ended
"""


@pytest.mark.release
@linux
@pytest.mark.slow
@pytest.mark.processes
def test_programs_in_another_run_than_the_workers_are_told(
    up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "programs.py").write_text(PROGRAMS)
    command = (sys.executable, "programs.py")
    process = up("--run", "served", "--", *command, "mine", "--", "sleep", "1000")
    assert process.stderr is not None
    told = " in run mine, workers in served: leave run= out of the programs"
    while told not in (line := process.stderr.readline()):
        assert line
    assert line.startswith(("up: producer is", "up: producer and trainer are"))
    assert line.endswith(" or use `streamadv up --run mine`\n")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    process = up("--run", "served", "--", *command, "", "--", "sleep", "1000")
    assert process.stdout is not None
    assert process.stdout.readline() == "programs | producer is in served\n"


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_that_is_there_is_used(
    up: Callable[..., subprocess.Popen[str]], redis_url: str, run: str
) -> None:
    process = up(
        "--redis", redis_url, "--run", run, "--", "sh", "-c", "echo $STREAMADV_REDIS_URL $STREAMADV_RUN"
    )
    written, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, written) == (0, f"{redis_url} {run}\n")
    with Connection(redis_url) as connection:
        connection.check()


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.processes
def test_commands_find_a_gateway_and_the_secret_of_its_keys(up: Callable[..., subprocess.Popen[str]]) -> None:
    code = """
import json, time, urllib.request
from streamadv.gateway import Gateway, Keys
from streamadv.gateway.access import post
url = Gateway().url
while True:
    try:
        urllib.request.urlopen(url + "/healthz").close()
        break
    except OSError:
        time.sleep(0.05)
begun = post(url + "/v1/groups", Keys.from_environment().sign("operator", "default", None), b"{}")
print(len(begun["rollouts"]), begun["rollouts"][0]["base_url"].startswith(url))
"""
    process = up("--gateway", "http://127.0.0.1:1", "--", sys.executable, "-c", code)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert out == "1 True\n"
    assert "a gateway" in err


def test_weights_are_loaded_by_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--load-weights"]) == 1
    assert "--gateway" in capsys.readouterr().err


def test_options_of_a_server_need_one_that_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--redis", "redis://localhost:1", "--maxmemory", "1gb", "--", "true"]) == 1
    assert "--maxmemory is for a server that `up` starts" in capsys.readouterr().err


def test_a_separator_needs_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--"]) == 1
    assert "there is no command behind `--`" in capsys.readouterr().err


def test_commands_are_split_and_named() -> None:
    assert split_commands(["up", "--run", "a"]) == (["up", "--run", "a"], [])
    assert split_commands(["up", "--", "a", "-b", "--", "c"]) == (["up"], [["a", "-b"], ["c"]])
    commands = [
        ["python3", "-u", "x/train.py", "a.py"],
        ["/bin/sh", "-c", "x"],
        ["python", "-m", "pkg.play"],
        ["sh"],
    ]
    kept = machine._kept_commands(machine.Plan({}, commands=commands))
    assert [each.name for each in kept] == ["train", "sh-1", "pkg.play", "sh-2"]


@pytest.mark.parametrize(("given", "ports"), [(0, {"0"}), (9100, {"9100", "9101", "9102"})])
def test_workers_serve_their_metrics_at_ports_that_follow_one_another(
    given: int, ports: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def refuse(name: str, command: list[str], environment: dict[str, str], *_: object, **__: object) -> None:
        started.append(environment["STREAMADV_METRICS_PORT"])
        if len(started) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(machine, "Kept", refuse)
    monkeypatch.setattr(machine.signal, "signal", lambda *_: None)
    plan = machine.Plan({}, workers=2, metrics_port=given)
    with pytest.raises(KeyboardInterrupt):
        machine.run_machine(plan, machine.Signals("up"), lambda _: None)
    assert set(started) == ports


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Kept]:
    """A worker that was started; calling it has it end, and the worker look after it."""
    statuses: list[int | None] = []

    def begin(*_: object, **__: object) -> SimpleNamespace:
        statuses.append(None)
        return SimpleNamespace(
            stdout=None, stderr=None, poll=lambda: statuses[-1], wait=lambda *_: statuses[-1]
        )

    monkeypatch.setattr(worker.subprocess, "Popen", begin)
    crashing = Kept("grouper", ["grouper"], {}, print)
    crashing.start()

    def crash() -> Kept:
        statuses.append(9)
        assert crashing.look_after() is not None
        return crashing

    return crash


def test_restarts_become_rarer_and_end(
    crashing: Callable[[], Kept], forward: Callable[[float], None]
) -> None:
    delays = []
    for _ in range(MOST_ENDS - 1):
        worker = crashing()
        delays.append(0.0)
        while worker.waits:
            forward(0.25)
            delays[-1] += 0.25
            worker.look_after()
    assert worker.starts == MOST_ENDS
    assert delays == sorted(delays)
    assert delays[-1] > 10 * delays[0]
    with pytest.raises(ProcessEndedError, match="grouper ended with status 9"):
        crashing()


def test_a_worker_that_has_worked_may_end_again(
    crashing: Callable[[], Kept], forward: Callable[[float], None]
) -> None:
    for _ in range(3 * MOST_ENDS):
        forward(WORKED_S)
        worker = crashing()
        forward(LONGEST_S)
        worker.look_after()
        assert not worker.waits
