"""The user's own code from the command line: estimators by --import and entry points, scorers, and their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

import streamadv as sa
from streamadv.algorithms import registry
from streamadv.cli import main
from streamadv.errors import NoBatchError
from streamadv.grouping.groups_log import read_log
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    ADVANTAGE,
    consumer_of,
    group_all,
    join,
    ledger,
    problems,
    producing,
    push_groups,
    references,
    unscored,
)

pytestmark = pytest.mark.processes

ESTIMATOR = """
import time
import streamadv as sa
from streamadv.algorithms import Estimate

@sa.estimator("mine", scope="row")
def mine(batch, *, scale: float = 2.0):
    return Estimate("row", scale * batch.rewards[batch.row_trajectory])

@sa.estimator("stuck", scope="row")
def stuck(batch):
    print("stuck", flush=True)
    time.sleep(1e9)
"""
SCORERS = """
def halves(trajectories):
    return [len(trajectory.columns["input_ids"]) / 2 for trajectory in trajectories]
def cannot(trajectories, other): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_estimators.py").write_text(ESTIMATOR)
    (tmp_path / "my_scorers.py").write_text(SCORERS)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\nlicence')")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    return tmp_path


def streamadv(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command, in that directory; the project itself is where Python's packages are."""
    source = str(Path(sa.__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    code = "import sys; sys.path.remove(''); from streamadv.cli import main; sys.exit(main())"
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True
    )


@pytest.fixture
def recorded(folder: Path) -> Path:
    file = folder / "in.jsonl"
    lines = [
        {
            "group_id": "g",
            "group_size": 2,
            "rollout_index": i,
            "input_ids": [1, 2],
            "response_mask": [0, 1],
            "reward": i,
        }
        for i in range(2)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_an_imported_estimator_computes_and_is_shown(
    folder: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for command in (["compute", "in.jsonl", "-o", "out.jsonl"], ["config"]):
        with monkeypatch.context() as forgotten:  # the estimator, so that each command has to import it
            forgotten.setattr(registry, "_REGISTRY", {**registry._REGISTRY})
            forgotten.setattr(sys, "path", [*sys.path])
            status = main([*command, "--import", "my_estimators", "--preset", "mine"])
            del sys.modules["my_estimators"]
        printed = capsys.readouterr()
        assert status == 0, printed.err
    advantages = [json.loads(line)["advantages"] for line in (folder / "out.jsonl").read_text().splitlines()]
    assert advantages == [[0, 0], [0, 2]]
    assert printed.err == ""
    assert "mine" in printed.out


@pytest.mark.release
@pytest.mark.slow
def test_an_entry_point_brings_an_estimator(folder: Path, recorded: Path) -> None:
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[streamadv.estimators]\nbad = broken\nmine = my_estimators:mine\n"
    )
    source = str(Path(sa.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "streamadv", "compute", "in.jsonl", "-o", "out.jsonl", "--preset", "mine"],
        **{"cwd": folder, "capture_output": True, "text": True, "check": False},
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{source}"},
    )
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert "entry point bad = broken of package mine cannot be loaded: RuntimeError: no" in warning


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--import", "nothing_there"], "--import nothing_there: cannot be imported: ModuleNotFoundError"),
        (["--import", "broken"], r"--import broken: cannot be imported: RuntimeError: no\nlicence"),
        (["--import", "leaves"], "--import leaves: cannot be imported: SystemExit: 3"),
        (
            ["--preset", "mine"],
            "bring it with --import MODULE, or by an entry point of the group streamadv.estimators",
        ),
        (["--config", "chain.json"], "estimator 'mine' is unknown: bring it with --import MODULE"),
    ],
)
@pytest.mark.parametrize("command", ["compute", "config"])
def test_what_cannot_be_brought_is_one_line(
    *,
    folder: Path,
    recorded: Path,
    command: str,
    words: Sequence[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "chain.json").write_text('{"estimator": "mine"}')
    files = ["in.jsonl", "-o", "out.jsonl"] if command == "compute" else []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main([command, *files, *words]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("streamadv: error: ")
    assert text in printed.err


def name_batch(
    url: str, run: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **chain: float | str
) -> TrainerQueue:
    """A queue of this chain whose first batch is named."""
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY})  # forgets it again
    monkeypatch.syspath_prepend(folder)
    __import__("my_estimators")
    del sys.modules["my_estimators"]
    with producing(url, run) as producer:
        push_groups(producer, 2)
    group_all(join(url, run))
    queue = TrainerQueue(url, run, batch_groups=2, prefetch=0, chain=chain, commit="each_batch")
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    return queue


@pytest.mark.release
@pytest.mark.slow
def test_a_worker_leaves_a_chain_that_it_does_not_know(
    redis_url: str, run: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has started before says why; at the start it is an error; one that imports the estimator computes."""
    words = ("worker", "advantage", "--device", "cpu", "--redis", redis_url, "--run", run)
    early = streamadv(folder, *words)
    assert early.stderr is not None
    while "/metrics" not in (line := early.stderr.readline()):
        assert line, "the worker has ended"
    pause = threading.Event()
    joined = join(redis_url, run)
    while not joined.connection.scripts.exists(
        joined.keys.home.work
    ) or not joined.connection.scripts.xinfo_consumers(joined.keys.home.work, "advantage"):
        pause.wait(0.02)
    queue = name_batch(redis_url, run, folder, monkeypatch, estimator="mine", scale=3.0)
    try:
        while "estimator 'mine' is unknown" not in (line := early.stderr.readline()):
            assert line, "the worker has ended"
        assert "--import" in line
        # batch 0 stays until it is committed
        knowing = streamadv(folder, *words, "--import", "my_estimators")
        try:
            late = streamadv(folder, *words)
            _, err = late.communicate(timeout=240)
            assert late.returncode == 1
            (error,) = [line for line in err.splitlines() if "error" in line]
            assert f"batch 0 of run {run}: estimator 'mine' is unknown: bring it with --import" in error
            batch = queue.next_batch(timeout=240)
        finally:
            knowing.terminate()
            _, log = knowing.communicate(timeout=240)
        assert knowing.returncode == 0, log
        assert batch is not None
        assert [mb.advantages.max().item() for mb in batch] == [3.0]
        assert early.poll() is None
    finally:
        early.terminate()
        _, log = early.communicate(timeout=240)
        queue.close()
    assert early.returncode == 0, log
    assert ledger(joined)["dead"] == {}


@pytest.mark.slow
def test_a_worker_in_a_computation_that_does_not_end_ends_on_a_signal(
    redis_url: str, run: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = name_batch(redis_url, run, folder, monkeypatch, estimator="stuck")
    words = ("worker", "advantage", "--device", "cpu", "--redis", redis_url, "--run", run)
    (folder / "impatient.py").write_text("from streamadv.run import hangs\nhangs.GRACE_S = 0.5\n")
    worker = streamadv(folder, *words, "--import", "my_estimators", "--import", "impatient")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "stuck\n"
    worker.terminate()
    _, log = worker.communicate(timeout=240)
    assert worker.returncode == 0, log
    assert "the chain (stuck) on batch 0-" in log
    assert "because this process ends" in log
    assert "advantage: stopping with 1 entry in hand, the oldest for " in log
    assert "advantage: stops, gives back 1 entry in hand, the oldest for " in log
    queue.close()
    other = consumer_of(join(redis_url, run), ADVANTAGE, lease_s=1e6)
    assert any(other.read(1) for _ in range(3))  # given back, whatever the lease


def test_a_scorer_from_the_command_line(redis_url: str, run: str, folder: Path) -> None:
    words = ("worker", "scorer", "my_scorers:halves", "--redis", redis_url, "--run", run)
    assert main(["runs", "create", "--redis", redis_url, "--run", run, "--scorers", "judge"]) == 0
    scorer = streamadv(folder, *words, "--columns", "input_ids")
    try:
        assert scorer.stderr is not None
        while "/metrics" not in (line := scorer.stderr.readline()):
            assert line, "the scorer has ended"
        joined = join(redis_url, run)
        with producing(redis_url, run) as producer:
            producer.push([unscored("g", index, 2, tokens=5 + index) for index in range(2)])
            pause = threading.Event()
            while not (log := read_log(joined, 0, "0-0", 10)):
                group_all(joined)
                pause.wait(0.02)
    finally:
        scorer.terminate()
        _, err = scorer.communicate(timeout=240)
    assert scorer.returncode == 0, err
    assert [member.reward for member in references(log[0])] == [2.5, 3.0]
    assert [member.rewards for member in references(log[0])] == [{"judge": 2.5}, {"judge": 3.0}]
    assert problems(joined) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["my_scorers"], "'my_scorers' is no function: write MODULE:FUNCTION"),
        (["my_scorers:thirds"], "module my_scorers has no function thirds"),
        (["nothing_there:f"], "module nothing_there: cannot be imported"),
        (["my_scorers:halves"], "has the scorers one, two, not 'halves': say which by --name"),
        (["my_scorers:halves", "--name", "three"], "(one, two): give one of these as its name"),
        (["my_scorers:cannot", "--name", "one"], "scorer one: cannot cannot be called with one argument"),
        (
            ["my_scorers:halves", "--name", "one", "--tries", "0"],
            "tries is 0, needs a whole number, 1 or more",
        ),
    ],
)
def test_a_scorer_that_cannot_start_says_why(
    *,
    redis_url: str,
    run: str,
    folder: Path,
    words: Sequence[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with producing(redis_url, run, {"scorers": ("one", "two")}):
        assert main(["worker", "scorer", *words, "--redis", redis_url, "--run", run]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("streamadv: error")]
    assert text in error
