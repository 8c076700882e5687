"""examples/any_agent: an unchanged agent learns with a real engine, gateway, queue and trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from .serving import EXAMPLE

pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
UPDATES = 30


def test_the_agent_learns_to_use_its_tool(vllm_url: str, model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    log = tmp_path / "log.jsonl"
    words = ["--model", model, "--weights", tmp_path / "weights", "--log", log, "--updates", UPDATES]
    words += ["--max-staleness", 0]  # all tokens are of the trainer's weights
    command = ["-m", "streamadv", "up", "--gateway", vllm_url, "--load-weights"]
    command += ["--", sys.executable, "rollouts.py", "--", sys.executable, "train.py", *words]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=EXAMPLE, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2, rewards
    assert max(line["furthest"] for line in lines) < 1e-3  # and the engine has sampled by them
