"""The example in examples/tool_use: a language model learns, synchronously and asynchronously, at the staleness set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_use"
pytest.importorskip("transformers", reason="pip install 'streamadv[examples]'")
pytestmark = [pytest.mark.processes, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(400)]


def run(folder: Path, *command: object) -> str:
    """Run a command there, to its end. Returns what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
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
