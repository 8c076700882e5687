"""verl trains on a run; its checkpoints decide what was trained."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamadv as sa
from tests.support import join, ledger, problems, working

from .jobs import TIMEOUT_S, run_job, train
from .settings import SIZE, WORDS

KILLED = -9
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.server]


def push(producer: sa.Producer, groups: int, prefix: str = "group") -> list[dict[str, Any]]:
    """Groups of random responses of different lengths, half of them with a tool's answer within; what was pushed."""
    random = np.random.default_rng(groups)
    pushed: list[dict[str, Any]] = []
    for number in range(groups):
        with producer.group(SIZE, group_id=f"{prefix}{number}", data_source="digits") as group:
            for rollout in group:
                response = int(random.integers(2, 8))
                ids = random.integers(3, len(WORDS), 3 + response)
                mask = np.r_[0, 0, 0, np.ones(response)]
                if response > 4:
                    mask[5] = 0
                fields = {
                    "input_ids": ids,
                    "response_mask": mask.astype(np.uint8),
                    "rollout_log_probs": (-random.random(len(ids)) * mask).astype(np.float32),
                    "routed_experts": random.integers(0, 9, (len(ids), 2, 3)).astype(np.int16),
                    "reward": float(random.random()),
                }
                rollout.push(**fields)
                pushed.append({"group_id": group.group_id, "rollout_index": rollout.rollout_index, **fields})
    return pushed


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_killed_trainer_goes_on_without_a_group_lost_or_trained_twice(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    """Two batches of two groups a step, a checkpoint every second step, eight steps."""
    log = tmp_path / "log"
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 32)
        producer.finish()
        with working(join(redis_url, run)):
            for die in (("before the commit", 2), ("in the step", 5), ("after the commit", 6)):
                assert run_job(train, tmp_path, redis_url, run, 8, die, log=log) == KILLED
                assert problems(join(redis_url, run), deep=False) == []
            assert run_job(train, tmp_path, redis_url, run, 8, log=log) == 0
    rows = json.loads((tmp_path / "checkpoints" / "global_step_8" / "actor" / "rows.json").read_text())
    trained = Counter(rows)
    assert len(trained) == 32 * SIZE
    assert set(trained.values()) == {1}
    joined = join(redis_url, run)
    counted = ledger(joined)
    assert counted["pushed"] == counted["trained"] == 32 * SIZE, counted
    assert problems(joined) == []
