"""Delivery: results find their trajectories again, in every layout the workers use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamadv.algorithms.packed import PackedBatch
from streamadv.algorithms.registry import Estimate, estimator
from streamadv.errors import NoBatchError
from streamadv.run.dead_letters import list_dead
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    compute_all,
    delivered_batch,
    group_all,
    join,
    ledger,
    producing,
    push_groups,
    pushed_run,
    trajectory,
)

VETO = {"estimator": "grpo", "correction": {"veto": 1e-4}}


@pytest.mark.parametrize(
    ("chain", "column", "value", "detail"),
    [
        ("reinforce", "advantages", b"123", "advantages of rollout 0 has the wrong size or is missing"),
        (VETO, "response_mask", b"\1" * 10, "response_mask of rollout 0 has more ones than what was pushed"),
        (
            VETO,
            "response_mask",
            b"\0\0\2\2\2" * 2,
            "response_mask of rollout 0 holds values other than 0 and 1",
        ),
    ],
)
def test_a_group_whose_output_is_wrong_is_dead(
    chain: Any, column: str, value: bytes, detail: str, fake: Connection
) -> None:
    run = pushed_run(fake, "r", 1, old_log_probs=[-0.5] * 5, rollout_log_probs=[-0.5] * 5)
    queue = TrainerQueue(
        fake, "r", batch_groups=1, prefetch=0, chain=chain, pushed=["old_log_probs"], commit="each_batch"
    )
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(run)
    (key,) = [key.decode() for key in fake.scripts.keys("*") if b":output:" in key]
    assert fake.scripts.hexists(key, column)
    fake.scripts.hset(key, column, value)
    batch = queue.next_batch(timeout=0)
    assert batch is not None
    assert batch.num_trajectories == 0
    (dead,) = list_dead(run)
    assert dead.detail == f"output column {detail}"


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
    batch = delivered_batch(
        TrainerQueue(fake, "r", batch_groups=1, prefetch=0, chain=chain, commit="each_batch"), run
    )
    (mb,) = batch
    for row in range(0, mb.num_rows, 2):
        start = int(mb.cu_seqlens[row])
        first = mb.advantages[start : start + 7].tolist()
        assert first[0] == first[4] == 0
        assert first[2] == first[3]
        assert first[5] == first[6]
        assert len({first[1], first[2], first[5]}) == 3


@estimator("test_weighted", scope="row", needs=["old_log_probs", "weight"], level="token")
def weighted(batch: PackedBatch) -> Estimate:
    return Estimate("token", batch.column("weight") + batch.column("old_log_probs").double())


def test_an_extra_column_supplies_a_step_after_a_late_one(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        weight = {"data": np.arange(5, dtype=np.float32), "per_token": True}
        producer.push([trajectory("g", index, 2, weight=weight) for index in range(2)])
    late = {"old_log_probs": lambda mb: mb.weight * 10}
    queue = TrainerQueue(
        fake,
        "r",
        batch_groups=1,
        prefetch=0,
        chain={"estimator": "test_weighted"},
        late=late,
        commit="each_batch",
    )
    batch = delivered_batch(queue, join(fake, "r"))
    (mb,) = batch
    assert mb.advantages.tolist() == [0, 0, 22, 33, 44] * 2


def test_a_late_column_replaces_an_extra_one_of_its_name(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        weight = {"data": np.arange(5, dtype=np.float32), "per_token": True}
        producer.push([trajectory("g", index, 2, weight=weight) for index in range(2)])
    late = {"weight": lambda mb: mb.weight + 1}
    batch = delivered_batch(
        TrainerQueue(fake, "r", batch_groups=1, prefetch=0, late=late, commit="each_batch"), join(fake, "r")
    )
    (mb,) = batch
    assert mb.weight.tolist() == [1, 2, 3, 4, 5] * 2


@pytest.mark.parametrize("is_late", [False, True])
def test_nobody_trains_on_tokens_that_the_correction_rejects(is_late: bool, fake: Connection) -> None:
    old = np.float32([-0.5, -0.5, -0.5, -6, -0.5])
    with producing(fake, "r") as producer:
        pushed = {} if is_late else {"old_log_probs": old}
        producer.push([trajectory("g", index, 2, **pushed) for index in range(2)])
    late = {"old_log_probs": lambda mb: torch.tensor(old).repeat(mb.num_rows)}
    options: dict[str, Any] = {"late": late} if is_late else {"pushed": ["old_log_probs"]}
    chain = {"estimator": "grpo", "correction": {"rejections": [{"kind": "token_k1", "upper": 2.0}]}}
    queue = TrainerQueue(fake, "r", batch_groups=1, prefetch=0, chain=chain, **options)
    (mb,) = delivered_batch(queue, join(fake, "r"))
    assert mb.response_mask.tolist() == [False, False, True, False, True] * 2
    assert mb.advantages.bool().tolist() == mb.response_mask.tolist()


def test_a_chain_that_is_cut_between_correction_and_estimator_gives_the_same(fake: Connection) -> None:
    """In each row the correction rejects the first token of the response, in the second one also the next."""
    chain = {
        "estimator": "optimal_token_baseline",
        "compare": "columns",
        "kl": {"coefficient": 0.5},
        "correction": {"before_estimator": True, "rejections": [{"kind": "token_k1", "upper": 2.0}]},
    }
    advantages = []
    for name, late in (("whole", {}), ("cut", {"ref_log_probs": lambda mb: -torch.ones(mb.num_tokens)})):
        pushed = {"sum_pi_squared": [0.5] * 5, "rollout_log_probs": [-0.1, -0.2, -0.3, -0.4, -0.5]}
        pushed |= {} if late else {"ref_log_probs": [-1.0] * 5}
        with producing(fake, name) as producer:
            for index, old in enumerate([[-0.1, -0.2, -9, -0.3, -0.4], [-0.1, -0.2, -9, -9, -0.3]]):
                producer.push([trajectory("g", index, 2, old_log_probs=old, **pushed)])
        queue = TrainerQueue(
            fake, name, batch_groups=1, chain=chain, late=late, pushed=["old_log_probs"], commit="each_batch"
        )
        (mb,) = delivered_batch(queue, join(fake, name))
        advantages.append(mb.advantages[mb.response_mask].tolist())
    assert advantages[0] == advantages[1]


def test_metrics_count_a_batch_once_whatever_its_shards(fake: Connection) -> None:
    chain = {"estimator": "grpo", "whiten_advantages": True, "correction": {}}
    weights = []
    for name, shards in (("one", 1), ("three", 3)):
        settings = {"shards": shards, "max_trajectory_bytes": 1 << 16}
        run = pushed_run(fake, name, 8, settings=settings, old_log_probs=[-0.5] * 5)
        queue = TrainerQueue(
            fake, name, batch_groups=8, chain=chain, pushed=["old_log_probs"], commit="each_batch"
        )
        batch = delivered_batch(queue, run)
        assert len({group.shard for group in batch.layout.groups}) == shards
        weights.append((batch.metric_weights, batch.metrics["rollout_corr/rollout_is_seq_std"]))
    assert weights[0] == weights[1]


def test_the_kl_coefficient_adapts_by_what_was_trained_on(fake: Connection) -> None:
    """One trajectory of each group is a baseline, one is above the token budget."""
    with producing(fake, "r") as producer:
        for group_id in ("a", "b"):
            for index, role, tokens in ((0, "baseline", 5), (1, "train", 9), (2, "train", 5)):
                ref = [-9.0] * tokens
                producer.push([trajectory(group_id, index, 3, tokens, role=role, ref_log_probs=ref)])
    run, chain = join(fake, "r"), {"estimator": "reinforce", "kl": {"coefficient": 0.5, "target": 0.1}}
    queue = TrainerQueue(
        fake, "r", batch_groups=1, prefetch=0, tokens_per_micro_batch=8, chain=chain, commit="each_batch"
    )
    seen = [delivered_batch(queue, run).metrics["critic/kl_coef"] for _ in range(2)]
    assert seen == pytest.approx([0.5, 0.5 * (1 + 0.2 / 10000)], rel=1e-9)


@pytest.mark.parametrize("by_source", [False, True])
def test_a_reward_beyond_running_moments_stops_no_trainer(fake: Connection, by_source: bool) -> None:
    chain = {
        "estimator": "reinforce",
        "reward": {"mean": "running", "std": "running"},
        "by_source": by_source,
    }
    with producing(fake, "r") as producer:
        producer.push([trajectory("large", index, 2, reward=(-1) ** index * 1e300) for index in range(2)])
        push_groups(producer, 2)
    run = join(fake, "r")
    queue = TrainerQueue(fake, "r", batch_groups=3, prefetch=0, chain=chain, commit="each_batch")
    batch = delivered_batch(queue, run)
    assert {each.group_id for each in batch.references} == {"g0000", "g0001"}
    assert ledger(run)["dead"] == {"compute_error": 2}
