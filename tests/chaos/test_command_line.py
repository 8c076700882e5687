"""Black box: every role of the command line as a process, killed with SIGKILL at random and started again.

STREAMADV_CHAOS_SECONDS: how long to kill (default 2). STREAMADV_CHAOS_SEED: which process when (default random).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from streamadv.trajectory.interchange import write_trajectory
from tests.support import trajectory

GROUPS: Final = 60
SIZE: Final = 4
#: Bounds a hang: a dead worker costs its lease (15 s), and busy cores start processes slowly.
PATIENCE_S: Final = 300
# Read when the module is imported: the tests' environment is cleared of settings.
SECONDS: Final = float(os.environ.get("STREAMADV_CHAOS_SECONDS", "2"))
SEED: Final = int(os.environ.get("STREAMADV_CHAOS_SEED", random.randrange(10**6)))


class Processes:
    """The processes of a run by role; what has ended with 0 is not started again."""

    def __init__(self, url: str, run: str, folder: Path, roles: dict[str, list[str]]) -> None:
        self._options = ["--redis", url, "--run", run]
        self._folder = folder
        self.roles = roles
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.finished: set[str] = set()

    def start(self, role: str) -> None:
        command = [sys.executable, "-m", "streamadv", *self.roles[role], *self._options]
        with (self._folder / f"{role}.log").open("ab") as log:
            self.running[role] = subprocess.Popen(command, stdout=log, stderr=log)

    def look_after(self) -> None:
        """Start what is not running; fail if one has ended by itself with an error."""
        for role in self.roles:
            process = self.running.get(role)
            status = None if process is None else process.poll()
            if status == 0:
                self.finished.add(role)
            elif status is not None and status > 0:
                pytest.fail(
                    f"{role} ended with {status}:\n{(self._folder / f'{role}.log').read_text()[-3000:]}"
                )
            if role not in self.finished and (process is None or status is not None):
                self.start(role)

    def kill(self, role: str) -> None:
        process = self.running[role]
        process.kill()
        process.wait()

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for index in range(SIZE):
            for number in range(GROUPS):
                write_trajectory(file, trajectory(f"g{number}", index, SIZE, tokens=50))
    return path


@pytest.fixture
def processes(redis_url: str, run: str, tmp_path: Path, recording: Path) -> Iterator[Processes]:
    out = str(tmp_path / "out.jsonl")
    roles = {
        "consume": ["consume", "-o", out, "--max-groups", str(GROUPS), "--timeout", str(PATIENCE_S)],
        "replay": ["replay", str(recording)],
        **{f"grouper{number}": ["worker", "grouper"] for number in range(2)},
        **{f"worker{number}": ["worker", "advantage", "--device", "cpu"] for number in range(2)},
    }
    found = Processes(redis_url, run, tmp_path, roles)
    try:
        yield found
    finally:
        found.end()


@pytest.mark.timeout(PATIENCE_S + 60)
def test_kill_anything_at_any_moment(processes: Processes, redis_url: str, run: str, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    started = time.monotonic()
    kills = 0
    processes.look_after()
    while "consume" not in processes.finished:
        time.sleep(draw.uniform(0.1, 0.6))  # the moment of the next kill
        if time.monotonic() - started < SECONDS:
            role = draw.choice(sorted(processes.roles))
            if role not in processes.finished:
                processes.kill(role)
                kills += 1
        processes.look_after()
        assert time.monotonic() - started < PATIENCE_S, f"seed {SEED}: not finished, {kills} kills"

    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = sorted((line["group_id"], line["rollout_index"]) for line in lines)
    wanted = sorted((f"g{number}", index) for number in range(GROUPS) for index in range(SIZE))
    assert found == wanted, f"seed {SEED}, {kills} kills"
    processes.end()
    command = [sys.executable, "-m", "streamadv", "status", "--json", "--check", "--deep"]
    status = subprocess.run(
        [*command, "--redis", redis_url, "--run", run], capture_output=True, text=True, check=False
    )
    assert status.returncode == 0, f"seed {SEED}: {status.stdout}{status.stderr}"
    ledger = json.loads(status.stdout)["ledger"]
    assert (ledger["pushed"], ledger["trained"]) == (GROUPS * SIZE, GROUPS * SIZE)
