"""Small breakages of scripts and Python, each of which schedules of the world have to find.

    python -m tests.world.mutants [--schedules 10000] [NAME ...]

runs schedules on a copy of the package with one breakage after the other, until one breaks a promise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from .breakages import EQUIVALENT, MUTANTS

ROOT: Final = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.mutants", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", help="the first words of some of them")
    given = parser.parse_args()
    wanted = [name for name in MUTANTS if not given.names or name.startswith(tuple(given.names))]
    survived = [name for name in wanted if not _is_found(name, given.schedules, given.seed)]
    print(f"{len(wanted) - len(survived)} of {len(wanted)} were found")
    return int(bool(set(survived) - set(EQUIVALENT)))


def _is_found(name: str, schedules: int, seed: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        break_in(Path(folder), name)
        numbers = ["--schedules", str(schedules), "--seed", str(seed)]
        done = _run(folder, "-m", "streamadv.testing", "--until-one", "--folder", f"{folder}/world", *numbers)
    print(f"{name}: {(done.stdout or done.stderr[-300:]).strip().splitlines()[0][:160]}", flush=True)
    return done.returncode != 0


def broken_by(name: str, schedule: Path) -> str:
    """Which promise a kept schedule breaks in a copy with this breakage; '' for none."""
    with tempfile.TemporaryDirectory() as folder:
        break_in(Path(folder), name)
        return _run(folder, "-c", _REPLAY, str(schedule)).stdout.strip()


_REPLAY: Final = """
import json, logging, sys
from streamadv.testing.judge import run_schedule
logging.disable(logging.CRITICAL)
print(run_schedule(choices=json.load(open(sys.argv[1])))[1] or "")
"""


def break_in(folder: Path, name: str) -> None:
    """Copy the package into a folder, with one breakage."""
    mutant = MUTANTS[name]
    shutil.copytree(ROOT / "streamadv", folder / "streamadv")
    file = folder / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))


def _run(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    environment = {**os.environ, "PYTHONPATH": folder}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
