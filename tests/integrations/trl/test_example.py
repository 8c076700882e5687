"""The example in examples/tool_use, trained by TRL: the same rollouts, and a policy that learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from streamadv import weights
from streamadv.integrations.trl import newest_checkpoint

EXAMPLE = Path(__file__).parents[3] / "examples" / "tool_use"


def program(name: str, *options: str) -> list[str]:
    return [sys.executable, str(EXAMPLE / name), *options]


def run(folder: Path, *command: str) -> None:
    """Run a command there, to its end; a server that it needs is its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("STREAMADV_REDIS_URL", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_language_model_learns(tmp_path: Path) -> None:
    run(tmp_path, *program("policy.py", "start.safetensors", "--skill", "0.7"))
    rollouts = program("rollouts.py", "--latency", "0.01")
    trainer = program("train_trl.py", "--updates", "30")
    run(tmp_path, sys.executable, "-m", "streamadv", "up", "--", *rollouts, "--", *trainer)
    checkpoint = Path(newest_checkpoint(tmp_path / "out") or "")
    assert json.loads((checkpoint / "streamadv.json").read_text())["version"] == 30
    updates = [
        update
        for update in json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
        if "critic/score/mean" in update
    ]
    assert [update["step"] for update in updates] == list(range(1, 31))
    rewards = [update["critic/score/mean"] for update in updates]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
    assert all(update["training/off_policy/trajectory_staleness_worst/max"] <= 2 for update in updates)
    assert {0, 10, 20, 30} <= set(weights.versions(tmp_path / "weights"))
