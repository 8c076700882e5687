"""However trajectories were cut into packets, and whatever rank has them: their rows are the same, bit by bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from streamadv.run.manifest import RunSettings
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Trajectory
from tests.support import OneClient, delivered_batch, identities, join, problems, producing, trajectory

CHAIN: dict[str, Any] = {"estimator": "gae", "gamma": 0.9, "lam": 0.95, "kl": {"coefficient": 0.1}}

Row = tuple[str, int, dict[str, bytes], dict[str, bytes]]  # columns and extras


def random_groups() -> list[list[Trajectory]]:
    """Trajectories of several rows, with extra columns of both kinds, some of them baselines."""
    rng = np.random.default_rng(3)

    def row() -> dict[str, Any]:
        tokens = int(rng.integers(3, 20))
        mask = rng.integers(0, 2, tokens)
        mask[-1] = 1
        names = ("rollout_log_probs", "ref_log_probs", "values")
        pictures = rng.random((int(rng.integers(0, 3)), 2)).astype(np.float32)
        return {
            **{"input_ids": rng.integers(0, 99, tokens), "response_mask": mask},
            **{name: -rng.random(tokens) for name in names},
            **{"experts": rng.integers(0, 9, (tokens, 2)).astype(np.int16)},
            **{"pictures": {"data": pictures, "per_token": False}},
        }

    def member(group: int, index: int, size: int) -> Trajectory:
        rows = [row() for _ in range(rng.integers(1, 4))]
        role = "baseline" if index == 1 and size > 3 else "train"
        return trajectory(f"g{group}", index, size, rows=rows, reward=float(rng.normal()), role=role)

    sizes = rng.integers(2, 8, 5).tolist()
    return [[member(group, index, size) for index in range(size)] for group, size in enumerate(sizes)]


GROUPS = random_groups()


def rows_of(world_size: int, at_once: int, shards: int, budget: int | None) -> list[Row]:
    """The rows of all micro-batches of all ranks, sorted. at_once: trajectories of a push."""
    connection = OneClient()
    pushes = [group[i : i + at_once] for group in GROUPS for i in range(0, len(group), at_once)]
    random.Random(at_once).shuffle(pushes)
    with producing(connection, "r", RunSettings(shards=shards).model_dump()) as producer:
        for push in pushes:
            producer.push(push)
        producer.finish()
    run = join(connection, "r")
    ranks: list[TrainerQueue] = []
    for rank in range(world_size):
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "tokens_per_micro_batch": budget}
        options |= {"job": "first", "chain": CHAIN, "pushed": ["values"]}
        ranks.append(TrainerQueue(connection, "r", batch_groups=len(GROUPS), commit="each_batch", **options))
    rows: list[Row] = []
    for queue in ranks:
        batch = delivered_batch(queue, run)
        own = []
        for mb in batch:
            bounds = mb.cu_seqlens.tolist()
            for number, reference in enumerate(mb.references):
                span = slice(bounds[number], bounds[number + 1])
                columns = {name: values[span].numpy().tobytes() for name, values in mb.columns.items()}
                extras = {name: arrays[number].tobytes() for name, arrays in mb.extras.items()}
                own.append((reference.group_id, reference.rollout_index, columns, extras))
        lines = list(batch.trajectories())
        assert sorted(set(identities(lines))) == sorted({row[:2] for row in own})
        rows += own
    assert problems(run, deep=False) == []
    return sorted(rows, key=lambda row: (*row[:2], row[2]["input_ids"]))


@pytest.mark.parametrize("budget", [None, 40])
def test_packets_and_ranks_do_not_change_a_bit(budget: int | None) -> None:
    want = rows_of(1, 1, 1, budget)
    assert {"advantages", "returns", "experts"} <= want[0][2].keys()
    assert list(want[0][3]) == ["pictures"]
    for world_size, at_once, shards in ((1, 8, 1), (2, 8, 1), (3, 2, 2), (7, 3, 3)):
        assert rows_of(world_size, at_once, shards, budget) == want
