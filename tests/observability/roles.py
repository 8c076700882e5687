"""A producer and a trainer under watch.

    python -m tests.observability.roles ROLE URL RUN PORT FILE

Before each group the producer reads from FILE what is to be wrong with it: nothing when it is empty.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from streamadv import metrics
from streamadv.errors import Busy
from streamadv.producer import Producer
from streamadv.run.manifest import RunSettings
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Trajectory, parse_trajectory

SIZE: Final = 4
BATCH_GROUPS: Final = 8
SETTINGS: Final = RunSettings(zero_variance_filter=True, max_trajectory_bytes=1 << 14, max_bytes=1 << 26)
CHAIN: Final = {"estimator": "grpo", "kl": {"coefficient": 0.01}, "correction": {"level": "token"}}
PUSHED: Final = ("ref_log_probs", "old_log_probs")
TOKENS: Final = 64
PACE_S: Final = 0.2
STEP_S: Final = 0.4

chance = random.Random(0)


def member(group_id: str, index: int, version: int | None, wrong: str) -> Trajectory:
    """One rollout, with what is wrong with it."""
    log_probs = np.linspace(-1, -0.1, TOKENS, dtype=np.float32)
    reward = {"equal": 1.0, "reward": -1.0 - 0.01 * index}.get(wrong, chance.random())
    return parse_trajectory(
        {
            "group_id": group_id,
            "group_size": SIZE,
            "rollout_index": index,
            "reward": reward,
            "model_version": 0 if wrong == "stale" else version,
            "input_ids": np.arange(TOKENS, dtype=np.int32),
            "response_mask": np.array([0] * 8 + [1] * (TOKENS - 8), dtype=np.uint8),
            "rollout_log_probs": log_probs,
            "old_log_probs": log_probs - np.float32(0.01),
            "ref_log_probs": log_probs - np.float32(6.4 if wrong == "reward" else 0.02),
        }
    )


def produce(url: str, run: str, port: int, file: Path) -> None:
    """Push groups for ever, at a pace that the others keep up with."""
    metrics.serve(port, run=run)
    with Producer(url, run, settings=SETTINGS) as producer:
        late: list[tuple[Any, Trajectory]] = []
        while True:
            wrong = file.read_text().strip()
            if wrong != "missing":
                for group, item in late:
                    group.push([item])
                late = []
            try:
                group = producer.begin_group(SIZE, timeout=1.0, data_source="math")
            except Busy:
                continue
            items = [member(group.group_id, index, group.model_version, wrong) for index in range(SIZE)]
            if wrong == "missing":
                late.append((group, items.pop()))
            group.push(items)
            time.sleep(PACE_S)


def train(url: str, run: str, port: int, _: Path) -> None:
    """Train on batches for ever."""
    torch.set_num_threads(1)
    metrics.serve(port, run=run)
    queue = TrainerQueue(
        url,
        run,
        batch_groups=BATCH_GROUPS,
        chain=CHAIN,
        pushed=PUSHED,
        max_filtered_batches=None,
        durability_window=1.0,
        commit="each_batch",
        settings=SETTINGS,
    )
    for _batch in queue:
        time.sleep(STEP_S)


ROLES: Final[dict[str, Callable[[str, str, int, Path], None]]] = {"produce": produce, "train": train}

if __name__ == "__main__":
    threading.current_thread().name = sys.argv[1]
    ROLES[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
