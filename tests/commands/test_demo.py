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

pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "streamadv", "demo"]
#: The groups of a killed process end soon: the demo stands still at its end until they do.
IMPATIENT = """
import sys
from streamadv.cli import main
from streamadv.demo import supervisor

supervisor.GROUP_DEADLINE_S = 5.0
sys.exit(main(sys.argv[1:]))
"""


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


@pytest.mark.release
def test_a_small_run_with_kills_accounts_for_every_trajectory(tmp_path: Path) -> None:
    """The demo kills three of its processes, and here somebody kills its trainer as well."""
    files = ["--json", str(tmp_path / "demo.json"), "--picture", str(tmp_path / "curve.png")]
    words = ["demo", "--maps", "random", "--updates", "10", "--seed", "3"]
    command = [sys.executable, "-c", IMPATIENT, *words, *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        output = ""
        while not re.search(r"  update [1-9]", output):
            line = demo.stdout.readline()
            assert line, demo.stderr.read() if demo.stderr else ""
            output += line
        trainer = re.search(r"trainer \((\d+)\)", output)
        assert trainer is not None
        os.kill(int(trainer[1]), signal.SIGKILL)
        rest, errors = demo.communicate(timeout=240)
    output += rest
    assert demo.returncode == 0, output + errors
    assert "trainer ended with status 137" in output
    assert "kill -9 of rollouts-0" in output
    assert "balanced" in output
    pids = started(output)
    assert len(pids) == 11, output  # seven processes, four of them twice
    assert all(gone(pid) for pid in pids)
    result: dict[str, Any] = json.loads((tmp_path / "demo.json").read_text())
    ledger = result["ledger"]
    accounted = ledger["trained"] + sum(ledger["dropped"].values()) + sum(ledger["dead"].values())
    assert result["balanced"] is True
    assert result["trajectories"] == ledger["pushed"] == accounted + ledger["queued"] + ledger["in_flight"]
    assert result["updates"] >= 10
    assert ledger["trained"] >= 10 * 8 * 16
    assert ledger["queued"] == ledger["in_flight"] == 0  # the run has ended: nothing is left under way
    assert result["kills"] == 3
    assert 0 <= result["success_rate_start"] <= 1
    assert 0 <= result["success_rate"] <= 1
    assert result["seed"] == 3
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    command = [*COMMAND, "--picture", str(tmp_path / "curve.png")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        output = ""
        while "started " not in output:
            line = demo.stdout.readline()
            assert line, demo.stderr.read() if demo.stderr else ""
            output += line
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=240)
    assert demo.returncode == 130, rest + errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert all(gone(pid) for pid in started(output + rest))


def test_a_wrong_setting_is_one_line_before_anything_starts() -> None:
    command = [*COMMAND, "--json", "no/such/folder/demo.json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert "no/such/folder" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stdout == ""
