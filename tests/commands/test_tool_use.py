"""The example in examples/tool_use: a language model learns, synchronously and asynchronously, at the staleness set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_use"
pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'streamadv[examples]'"),
    *(pytest.mark.processes, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)),
]

Process = subprocess.Popen[str]


class Machine:
    """Programs that run in one folder, with one server and one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun: list[Process] = []
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "STREAMADV_RUN": "tool-use",
        }

    def run(self, *command: object) -> str:
        """Run a command to its end. Returns what it printed."""
        words = [sys.executable, *map(str, command)]
        done = subprocess.run(
            words, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    def begin(self, *command: object) -> Process:
        """Begin a command. It is killed at the end of the test."""
        words = [sys.executable, *map(str, command)]
        with (self.folder / f"output-{len(self.begun)}.txt").open("w") as errors:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.begun.append(process)
        return process

    def serve(self, *command: object) -> None:
        """Begin a command that prints the URL of its server first, for all commands after it."""
        server = self.begin(*command)
        assert server.stdout is not None
        self._environment["STREAMADV_REDIS_URL"] = server.stdout.readline().strip()

    def log(self) -> list[dict[str, Any]]:
        path = self.folder / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_version(self, version: int, *needed: Process) -> None:
        """Until the trainer has made this version. needed: what must not end before."""
        while not any(update["version"] >= version for update in self.log()):
            assert [process.poll() for process in needed] == [None] * len(needed), "see its output-N.txt"
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.begun:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.end()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that know some of the task."""
    folder = tmp_path_factory.mktemp("start")
    Machine(folder).run(EXAMPLE / "policy.py", "start.safetensors", "--skill", 0.7)
    return folder / "start.safetensors"


@pytest.mark.release
@pytest.mark.parametrize(("staleness", "correction"), [(0, "none"), (4, "clip")])
def test_a_language_model_learns(staleness: int, correction: str, start: Path, machine: Machine) -> None:
    machine.serve("-m", "streamadv", "up")
    rollouts = machine.begin(EXAMPLE / "rollouts.py", "--latency", 0.01)
    options = ["--max-staleness", staleness, "--correction", correction, "--updates", 30]
    machine.run(EXAMPLE / "train.py", "--start", start, *options)
    assert rollouts.wait() == 0, "rollouts end when the trainer ends the run"
    updates = machine.log()
    assert [update["version"] for update in updates] == list(range(1, 31))
    rewards = [update["reward"] for update in updates]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
    highest = max(update["staleness_max"] for update in updates)
    assert highest == 0 if staleness == 0 else 0 < highest <= staleness
    trained_on = [group for update in updates for group in update["groups"]]
    assert len(set(trained_on)) == len(trained_on) == 8 * 30
    machine.run(EXAMPLE / "evaluate.py", "--every", 20, "--questions", 32)
    shown = evaluations(machine, groups=3 * 32)
    assert [each["version"] for each in shown] == [0, 20, 30]
    assert all((each["groups"], each["trajectories"]) == (32, 4 * 32) for each in shown)
    assert shown[2]["mean"] > shown[0]["mean"] + 0.1
    status = json.loads(machine.run("-m", "streamadv", "status", "--json", "--check"))
    assert status["balanced"]
    assert status["ledger"]["dropped"]["eval"] == 3 * 4 * 32


def evaluations(machine: Machine, groups: int) -> list[dict[str, Any]]:
    """What `streamadv evals` shows once the grouper has ended so many groups."""
    while True:
        printed = json.loads(machine.run("-m", "streamadv", "evals", "--json"))
        shown: list[dict[str, Any]] = printed["evaluations"]
        if sum(each["groups"] for each in shown) >= groups:
            return shown
        time.sleep(0.1)


@pytest.mark.release
def test_rollouts_workers_and_the_trainer_come_and_go(start: Path, machine: Machine) -> None:
    """Each process but the server is killed or leaves, and another one takes over: what the last checkpoint holds are
    all batches once, each with groups of its own."""
    play = [EXAMPLE / "rollouts.py", "--latency", 0.01]
    options = ["--max-staleness", 4, "--updates", 16, "--checkpoint-every", 6]
    train = [EXAMPLE / "train.py", "--start", start, *options]
    grouper, worker = (("-m", "streamadv", "worker", stage) for stage in ("grouper", "advantage"))

    machine.serve("-m", "streamadv", "server")
    machine.run("-m", "streamadv", "runs", "create")
    first_grouper, first_worker = machine.begin(*grouper), machine.begin(*worker)
    first, second = machine.begin(*play), machine.begin(*play, "--seed", 1)
    trainer = machine.begin(*train)
    machine.until_version(7, trainer)  # behind the checkpoint of version 6
    for process in (trainer, first, first_grouper, first_worker):
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = machine.log()
    machine.begin(*grouper)
    machine.begin(*worker)
    third, trainer = machine.begin(*play, "--seed", 2), machine.begin(*train)
    machine.until_version(13, trainer, second, third)
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM, "it leaves"
    assert [trainer.wait(), third.wait()] == [0, 0]

    updates = machine.log()
    after = updates[len(before) :]
    assert after[0]["version"] % 6 == 1, "it goes on behind a checkpoint"
    for earlier, again in zip(before[after[0]["version"] - 1 :], after, strict=False):
        assert earlier["groups"] == again["groups"], "the same batches again"
    last = {update["version"]: update["groups"] for update in updates}
    assert list(last) == list(range(1, 17))
    groups = [group for of_version in last.values() for group in of_version]
    assert len(set(groups)) == len(groups) == 16 * 8
    status = json.loads(machine.run("-m", "streamadv", "status", "--json", "--check"))
    assert status["balanced"]
    assert status["ledger"]["trained"] == 16 * 8 * 16
