"""The same members give the same bits: for any number of workers, order of arrival and number of shards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from streamadv.advantage.compute import compute
from streamadv.advantage.prepare import prepare
from streamadv.advantage.worker import publish
from streamadv.producer import Producer
from streamadv.run.consumer import ADVANTAGE
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Trajectory
from tests.support import CPU, consumer_of, group_all, join, problems, trajectory

CHAINS: dict[str, Any] = {
    "group": {"estimator": "grpo"},
    "batch": {
        "estimator": "gae",
        "gamma": 0.9,
        "reward": {"mean": "batch", "std": "batch"},
        "whiten_advantages": True,
    },
}


def items(groups: int) -> list[Trajectory]:
    """Numbers whose sum depends on the order of the summands, in groups of a hundred or so trajectories."""
    rng = np.random.default_rng(7)
    made = []
    for group in range(groups):
        for index in range(40):
            tokens = int(rng.integers(3, 9))
            values = (rng.normal(size=tokens) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
            reward = float(rng.normal() * 10.0 ** rng.integers(-3, 4))
            made.append(trajectory(f"g{group}", index, 40, tokens, reward=reward, values=values))
    return made


ITEMS = items(6)


def advantages(
    url: str, name: str, chain: Any, order: int, workers: int, shards: int
) -> dict[tuple[str, int], bytes]:
    connection = Connection(url)
    wanted = RunSettings(shards=shards, max_trajectory_bytes=1 << 16)
    draw = random.Random(order)
    arrival = sorted(ITEMS, key=lambda item: draw.random()) if order else ITEMS
    with Producer(connection, name, settings=wanted) as producer:
        for item in arrival:
            producer.push([item])
        run = join(connection, name)
        group_all(run)
        queue = TrainerQueue(
            connection, name, batch_groups=6, prefetch=0, chain=chain, pushed=["values"], commit="each_batch"
        )
        consumers = [consumer_of(run, ADVANTAGE) for _ in range(workers)]
        with pytest.raises(Exception, match="no new group"):
            queue.next_batch(timeout=0)
        entries = []
        for _ in range(4 * shards):
            for consumer in consumers:
                entries += [(consumer, entry) for entry in consumer.read(1)]
        draw.shuffle(entries)
        assert entries
        for _, entry in entries:
            assert publish(run, compute(prepare(run, entry), CPU))
        batch = queue.next_batch(timeout=0)
        assert problems(run) == []
    assert batch is not None
    connection.close()
    return {
        (line.group_id, line.rollout_index): line.rows[0].advantages.tobytes()  # type: ignore[union-attr]
        for line in batch.trajectories()
    }


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.slow
def test_the_same_members_give_the_same_bits(redis_url: str, run: str, chain: Any) -> None:
    want = advantages(redis_url, run, chain, order=0, workers=1, shards=1)
    assert len(want) == len(ITEMS)
    assert len(set(want.values())) > 100
    for order, workers, shards in ((1, 5, 1), (2, 1, 3), (3, 5, 3)):
        assert advantages(redis_url, f"{run}-{order}", chain, order, workers, shards) == want
