"""Delivery: results find their trajectories again, in every layout the workers use."""

from __future__ import annotations

import pytest

from streamadv.errors import NoBatchError
from streamadv.run.dead_letters import list_dead
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import compute_all, group_all, join, next_batch, producing, push_groups, trajectory


def test_a_group_whose_output_has_the_wrong_size_is_dead(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 1)
    run = join(fake, "r")
    queue = TrainerQueue(fake, "r", batch_groups=1, prefetch=0, chain={"estimator": "reinforce"})
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(run)
    (key,) = [key for key in fake.scripts.keys("*") if b":output:" in key]
    fake.scripts.hset(key.decode(), "advantages", b"123")
    batch = queue.next_batch(timeout=0)
    assert batch is not None
    assert batch.num_trajectories == 0
    (dead,) = list_dead(run)
    assert dead.detail == "output column advantages of rollout 0 has the wrong size or is missing"


def test_numbers_per_step_land_on_the_tokens_of_the_step(fake: Connection) -> None:
    """GiGPO: two rows, spans in both, a gap between them."""
    rows = [
        {"input_ids": [1, 2, 3, 4], "response_mask": [0, 1, 1, 1]},
        {"input_ids": [5, 6, 7], "response_mask": [0, 1, 1]},
    ]
    spans = [(0, 1, 2), (0, 2, 4), (1, 1, 3)]
    with producing(fake, "r") as producer:
        for index in range(3):
            steps = [
                {
                    "row": row,
                    "start": start,
                    "end": end,
                    "reward": float((index - n) ** 2),
                    "state_key": f"s{n}",
                }
                for n, (row, start, end) in enumerate(spans)
            ]
            producer.push([trajectory("g", index, 3, rows=rows, steps=steps)])
    run = join(fake, "r")
    chain = {"estimator": "gigpo"}
    batch = next_batch(TrainerQueue(fake, "r", batch_groups=1, prefetch=0, chain=chain), run)
    assert batch is not None
    (mb,) = batch
    for row in range(0, mb.num_rows, 2):
        start = int(mb.cu_seqlens[row])
        first = mb.advantages[start : start + 7].tolist()
        assert first[0] == first[4] == 0
        assert first[2] == first[3]
        assert first[5] == first[6]
        assert len({first[1], first[2], first[5]}) == 3
