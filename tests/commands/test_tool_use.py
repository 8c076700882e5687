"""The example in examples/tool_use: a language model learns, synchronously and asynchronously, at the staleness set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_use"
pytest.importorskip("transformers", reason="pip install 'streamadv[examples]'")
pytestmark = [pytest.mark.processes, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(400)]


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run(folder: Path, *command: object, **variables: str) -> str:
    """Run a command there, to its end. Returns what it printed."""
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(
        words, cwd=folder, env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that know some of the task."""
    folder = tmp_path_factory.mktemp("start")
    run(folder, EXAMPLE / "policy.py", "start.safetensors", "--skill", 0.7)
    return folder / "start.safetensors"


@pytest.mark.parametrize(("staleness", "correction"), [(0, "none"), (4, "clip")])
def test_a_language_model_learns(staleness: int, correction: str, start: Path, tmp_path: Path) -> None:
    rollouts = [sys.executable, EXAMPLE / "rollouts.py", "--latency", 0.01]
    options = ["--max-staleness", staleness, "--correction", correction, "--updates", 30]
    trainer = [sys.executable, EXAMPLE / "train.py", "--start", start, *options]
    run(tmp_path, "-m", "streamadv", "up", "--", *rollouts, "--", *trainer)
    updates: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "log.jsonl").open()]
    assert [update["version"] for update in updates] == list(range(1, 31))
    rewards = [update["reward"] for update in updates]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
    highest = max(update["staleness_max"] for update in updates)
    assert highest == 0 if staleness == 0 else 0 < highest <= staleness
    trained_on = [group for update in updates for group in update["groups"]]
    assert len(set(trained_on)) == len(trained_on) == 8 * 30


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Begins a command in the test's folder; what runs at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*command: object, **variables: str) -> subprocess.Popen[str]:
        words = [sys.executable, *map(str, command)]
        with (tmp_path / f"output-{len(begun)}.txt").open("w") as errors:
            process = subprocess.Popen(
                words,
                cwd=tmp_path,
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def log_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def until_version(folder: Path, version: int, trainer: subprocess.Popen[str]) -> None:
    while not any(update["version"] >= version for update in log_of(folder)):
        assert trainer.poll() is None, "the trainer has ended: see its output-N.txt"
        time.sleep(0.1)


def test_rollouts_workers_and_the_trainer_come_and_go(
    begin: Callable[..., subprocess.Popen[str]], start: Path, tmp_path: Path
) -> None:
    """The trainer is killed behind a checkpoint, rollouts and an advantage worker join and are killed: what the last
    checkpoint holds are all batches once, with groups of their own."""
    machine = begin("-m", "streamadv", "up", "--run", "elastic")
    assert machine.stdout is not None
    place = {"STREAMADV_REDIS_URL": machine.stdout.readline().strip(), "STREAMADV_RUN": "elastic"}
    play = [EXAMPLE / "rollouts.py", "--latency", 0.01]
    options = ["--max-staleness", 4, "--updates", 16, "--checkpoint-every", 4]
    train = [EXAMPLE / "train.py", "--start", start, *options]
    leaving, staying = begin(*play, **place), begin(*play, "--seed", 1, **place)
    trainer = begin(*train, **place)
    until_version(tmp_path, 6, trainer)
    for process in (trainer, leaving):
        process.send_signal(signal.SIGKILL)
        process.wait()
    worker = begin("-m", "streamadv", "worker", "advantage", **place)
    trainer, joining = begin(*train, **place), begin(*play, "--seed", 2, **place)
    until_version(tmp_path, 11, trainer)
    worker.send_signal(signal.SIGKILL)
    assert [process.wait() for process in (trainer, staying, joining)] == [0, 0, 0]

    updates = log_of(tmp_path)
    versions = [update["version"] for update in updates]
    restart = next(i for i in range(1, len(versions)) if versions[i] <= versions[i - 1])
    assert versions[restart] % 4 == 1  # it goes on behind a checkpoint
    again = versions[restart - 1] - versions[restart] + 1
    for before, after in zip(updates[restart - again : restart], updates[restart:], strict=False):
        assert before["groups"] == after["groups"]  # the same batches again
    last = {update["version"]: update["groups"] for update in updates}
    assert list(last) == list(range(1, 17))
    groups = [group for of_version in last.values() for group in of_version]
    assert len(set(groups)) == len(groups) == 16 * 8
    status = json.loads(run(tmp_path, "-m", "streamadv", "status", "--json", "--check", **place))
    assert status["balanced"]
    assert status["ledger"]["trained"] == 16 * 8 * 16
