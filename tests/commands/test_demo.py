"""The demo from the command line, small: every process is real, the learning is not waited for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "streamadv", "demo"]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def started(output: str) -> list[int]:
    """Process ids of everything the demo said it started."""
    lines = [line for line in output.splitlines() if line.startswith("started ")]
    return [int(pid) for line in lines for pid in re.findall(r"\((\d+)\)", line)]


def test_small_run_with_kills_accounts_for_every_trajectory(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "demo.json"), "--picture", str(tmp_path / "curve.png")]
    ended = subprocess.run(
        [*COMMAND, "--maps", "random", "--updates", "5", "--seed", "3", *files],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    result: dict[str, Any] = json.loads((tmp_path / "demo.json").read_text())
    ledger = result["ledger"]
    accounted = ledger["trained"] + sum(ledger["dropped"].values()) + sum(ledger["dead"].values())
    assert result["balanced"] is True
    assert result["trajectories"] == ledger["pushed"] == accounted + ledger["queued"] + ledger["in_flight"]
    assert ledger["trained"] >= 5 * 8 * 16
    assert ledger["queued"] == ledger["in_flight"] == 0  # the run has ended: nothing is left under way
    assert result["kills"] == 3
    assert 0 <= result["success_rate_start"] <= 1
    assert 0 <= result["success_rate"] <= 1
    assert result["seed"] == 3
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "kill -9 of rollouts-0" in ended.stdout
    assert "balanced" in ended.stdout
    pids = started(ended.stdout)
    assert len(pids) == 10, ended.stdout  # seven processes, three of them twice
    assert all(gone(pid) for pid in pids)


def test_the_trainer_may_be_killed_too(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "demo.json"), "--picture", str(tmp_path / "curve.png")]
    command = [*COMMAND, "--no-kill", "--maps", "random", "--updates", "25", *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        output = ""
        while not re.search(r"  update [1-9]", output):
            line = demo.stdout.readline()
            assert line, demo.stderr.read() if demo.stderr else ""
            output += line
        found = re.search(r"trainer \((\d+)\)", output)
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        rest, errors = demo.communicate(timeout=110)
    assert demo.returncode == 0, output + rest + errors
    assert "trainer ended with exit status -9" in rest
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["balanced"] is True
    assert result["updates"] >= 25
    assert result["ledger"]["trained"] >= 25 * 8 * 16
    assert all(gone(pid) for pid in started(output + rest))


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    command = [*COMMAND, "--picture", str(tmp_path / "curve.png")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        output = ""
        while "started rollouts-0" not in output:
            line = demo.stdout.readline()
            assert line, demo.stderr.read() if demo.stderr else ""
            output += line
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, rest + errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert all(gone(pid) for pid in started(output + rest))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--updates", "0"], "--updates 0"),
        (["--max-staleness", "-1"], "--max-staleness -1"),
        (["--estimator", "nonsense"], "nonsense"),
        (["--json", "no/such/folder/demo.json"], "no/such/folder"),
    ],
)
def test_wrong_settings_are_one_line_before_anything_starts(arguments: list[str], message: str) -> None:
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stdout == ""
