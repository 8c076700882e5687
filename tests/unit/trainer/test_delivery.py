"""Delivery: results find their trajectories again, in every layout the workers use."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.advantage.results import assign, counts_of, numbers_of, parse_result
from streamadv.batch.work import WorkItem
from streamadv.errors import NoBatchError
from streamadv.grouping.groups_log import LoggedGroup, Pointer, packets_of
from streamadv.grouping.layout import Layout
from streamadv.run.dead_letters import list_dead
from streamadv.store.connection import Connection
from streamadv.store.keys import ShardKeys
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.reference import Reference, StepSpan
from tests.support import compute_all, group_all, join, next_batch, producing, push_groups, trajectory


def member(group_id: str, index: int, rows: int, steps: int) -> Reference:
    span = StepSpan(0, 0, 1, 0.0, None)
    return Reference(
        **{"group_id": group_id, "rollout_index": index, "key": "k", "size": 1, "steps": [span] * steps},
        **{"row_lengths": [2] * rows, "row_trainable": [1] * rows},
    )


shapes = st.lists(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(found=shapes, level=st.sampled_from(["row", "step"]), split=st.integers(1, 3))
def test_every_number_goes_back_to_its_owner(found: Any, level: str, split: int) -> None:
    """Numbered consecutively where they are computed, they must come out so."""
    groups = [
        LoggedGroup(
            **{"shard": 0, "entry": f"1-{n}", "group_id": f"g{n}", "size": 1, "data_source": None},
            **{"outcome": "complete", "opened_ms": 0, "epoch": 1, "version": None, "payloads": ()},
            count=len(members),
            **packets_of([member(f"g{n}", i, rows, steps) for i, (rows, steps) in enumerate(members)]),
        )
        for n, members in enumerate(found)
    ]
    pointers = [Pointer(0, g.entry, g.group_id, len(g.members)) for g in groups]
    parts = [pointers[start : start + split] for start in range(0, len(pointers), split)]
    items = [
        WorkItem(batch="b", k=0, number=n, shard=0, groups=part, chain={}) for n, part in enumerate(parts)
    ]
    results = {}
    for item in items:
        own = [m for g in groups if g.group_id in {p.group_id for p in item.groups} for m in g.references]
        rows = [f"{m.group_id}{m.rollout_index}" for m in own for _ in m.row_lengths]
        steps = [f"{m.group_id}{m.rollout_index}" for m in own for _ in m.steps]
        code = {f"{m.group_id}{m.rollout_index}": float(n) for n, m in enumerate(own)}
        header = {
            "unit": item.number,
            "level": level,
            "columns": [],
            "metrics": {},
            "weights": {},
            "dead": {},
            "groups": counts_of(
                Layout.of([g for g in groups if g.group_id in {p.group_id for p in item.groups}])
            ),
        }
        numbers = np.array([code[each] for each in (rows if level == "row" else steps)], np.float32)
        results[item.number] = parse_result(
            ShardKeys("r:0:0"),
            {
                **{
                    b"batch": b"b",
                    b"header": json.dumps(header).encode(),
                    b"output": b"",
                    b"output_bytes": b"0",
                },
                b"rewards": np.arange(len(own), dtype=np.float64).tobytes(),
                b"step_rewards": np.array([code[each] for each in steps], np.float64).tobytes(),
                b"advantages": numbers.tobytes(),
            },
        )
    members = assign(items, results, groups)
    for each in members:
        (own_number,) = set(numbers_of([each], "rewards").tolist())
        assert set(numbers_of([each], "step_rewards").tolist()) <= {own_number}
        assert set(numbers_of([each], "advantages").tolist()) <= {own_number}
        wanted = each.reference.row_lengths if level == "row" else each.reference.steps
        assert len(numbers_of([each], "advantages")) == len(wanted)
    for chosen in (members, members[::-1], members[::2]):
        for name in ("rewards", "step_rewards", "advantages"):
            one_by_one = [number for each in chosen for number in numbers_of([each], name)]
            assert numbers_of(chosen, name).tolist() == one_by_one


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
