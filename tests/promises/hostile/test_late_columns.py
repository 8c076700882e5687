"""Late columns: what the trainer's functions may give, and batches whose groups cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis
import torch

from streamadv.errors import LateColumnError, SettingError
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.store.connection import Connection
from streamadv.trainer.microbatch import Batch, MicroBatch
from streamadv.trainer.queue import TrainerQueue
from tests.support import compute_all, delivered_batch, join, ledger, next_batch, problems, push_groups

GAE: Any = {"estimator": "gae"}


@pytest.fixture
def producer(producer: Producer) -> Producer:
    """It has pushed two groups."""
    push_groups(producer, 2, ref_log_probs=np.zeros(5))
    return producer


def queue_of(run: Run, values: Callable[..., Any], **options: Any) -> TrainerQueue:
    options = {
        "commit": "each_batch",
        "batch_groups": 2,
        "prefetch": 0,
        "chain": GAE,
        "late": {"values": values},
        **options,
    }
    return TrainerQueue(run.connection, run.name, **options)


def one(mb: MicroBatch) -> torch.Tensor:
    return torch.ones(len(mb.input_ids))


def with_nan(mb: MicroBatch) -> torch.Tensor:
    values = one(mb)
    values[4] = torch.nan  # the last token of a row: trainable
    return values


def too_large(mb: MicroBatch) -> torch.Tensor:
    return one(mb).double() * 1e39


def fails(_: MicroBatch) -> torch.Tensor:
    raise redis.exceptions.ConnectionError("the critic's\nserver is away")


def leaves(_: MicroBatch) -> torch.Tensor:
    raise SystemExit(3)


WRONG: list[tuple[Callable[..., Any], str]] = [
    (lambda mb: None, "is None, needs a tensor"),
    (lambda mb: [1.0] * len(mb.input_ids), "is a list, needs a tensor"),
    (lambda mb: one(mb)[:-1], r"shape \(19,\), needs \(20,\)"),
    (lambda mb: one(mb)[:, None], r"shape \(20, 1\), needs \(20,\)"),
    (lambda mb: one(mb).to(torch.complex64), "dtype torch.complex64"),
    (with_nan, r"not finite .* trainable tokens, first nan in g0000/0, token 4 of row 0: look"),
    (too_large, "not finite"),
    (fails, r"function .* raised ConnectionError: the critic's.{1,4}server is away"),
    (leaves, "function .* raised SystemExit: 3"),
]


@pytest.mark.parametrize("chain", [GAE, "grpo"], ids=["needed", "for the loop"])
def test_what_is_no_column_is_an_error_that_names_it(joined: Run, chain: Any) -> None:
    answers = [*WRONG, (one, "")]
    queue = queue_of(joined, lambda mb: answers[0][0](mb), chain=chain)
    for _, text in WRONG:
        with pytest.raises(LateColumnError, match=f"^late column values.*{text}") as caught:
            next_batch(queue, joined)
        assert "\n" not in str(caught.value)
        answers.pop(0)
    batch = next_batch(queue, joined)  # the same one, once the function is right
    assert batch is not None
    assert (batch.version, batch.num_trajectories) == (0, 4)
    assert all(torch.equal(mb.values, one(mb)) for mb in batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool])
def test_other_kinds_of_numbers_are_taken(joined: Run, dtype: torch.dtype) -> None:
    batch = delivered_batch(queue_of(joined, lambda mb: one(mb).to(dtype)), joined)
    assert all(mb.values.dtype == torch.float32 and torch.equal(mb.values, one(mb)) for mb in batch)


def test_a_gradient_stays_behind_and_what_is_not_trained_on_may_be_anything(joined: Run) -> None:
    weight = torch.ones(1, requires_grad=True)

    def values(mb: MicroBatch) -> torch.Tensor:
        return torch.where(mb.response_mask.bool(), mb.input_ids * weight, torch.nan)

    batch = delivered_batch(queue_of(joined, values), joined)
    for mb in batch:
        assert not mb.values.requires_grad
        assert torch.equal(mb.values, mb.input_ids * mb.response_mask.float())
        assert mb.advantages.isfinite().all()
        assert mb.returns.isfinite().all()


def test_what_a_function_writes_into_its_micro_batch_stays_there(joined: Run) -> None:
    def values(mb: MicroBatch) -> torch.Tensor:
        for column in mb.columns.values():
            column.zero_()
        mb.columns.clear()
        mb.row_lengths.clear()
        return torch.ones(20)

    def log_probs(mb: MicroBatch) -> torch.Tensor:
        return mb.rollout_log_probs * mb.response_mask

    queue = queue_of(joined, values, late={"values": values, "old_log_probs": log_probs})
    batch = delivered_batch(queue, joined)
    (mb,) = batch
    assert mb.response_mask.sum() == batch.num_tokens
    assert torch.equal(mb.old_log_probs, mb.rollout_log_probs * mb.response_mask)
    assert [line.rows[0].input_ids.tolist() for line in batch.trajectories()][1] == list(range(10, 15))


@pytest.mark.parametrize(
    ("late", "text"),
    [
        ({"values": None}, "values .* needs a function"),
        ({"response_mask": one}, "response_mask .* cannot be made late"),
        ({"advantages": one}, "advantages .* cannot be made late"),
        ({"position_ids": one}, "position_ids is what every micro-batch has by itself"),
        ({"no name": one}, "no name"),
    ],
)
def test_what_cannot_be_late_is_a_start_up_error(joined: Run, late: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        TrainerQueue(joined.connection, joined.name, late=late, commit="each_batch")


@pytest.mark.parametrize("what", ["advantages", "rewards"])
def test_results_that_are_not_finite_cost_their_group(joined: Run, what: str) -> None:
    """Whoever has written them: no worker does."""
    chain: Any = {"estimator": "reinforce"} if what == "advantages" else GAE
    queue = queue_of(joined, one, chain=chain)
    with pytest.raises(Exception, match="no new group"):
        next_batch_without_work(queue, joined)
    compute_all(joined)
    client = joined.connection.scripts
    keys = joined.keys.home
    if what == "advantages":
        (key,) = [key.decode() for key in client.keys("*") if b":output:" in key]
        advantages = np.frombuffer(client.hget(key, "advantages"), np.float32).copy()
        advantages[:5] = np.nan
        client.hset(key, "advantages", advantages.tobytes())
    else:
        ((entry, fields),) = client.xrange(keys.results)
        client.delete(keys.results)
        client.xadd(keys.results, {**fields, b"rewards": np.array([np.nan, 1, 0, 1]).tobytes()}, id=entry)
    batch = queue.next_batch(timeout=0)
    assert batch is not None
    assert {reference.group_id for reference in batch.references} == {"g0001"}
    assert ledger(joined)["dead"] == {"undecodable": 2}
    assert problems(joined) == []


def next_batch_without_work(queue: TrainerQueue, run: Run) -> None:
    from tests.support import group_all

    group_all(run)
    queue.next_batch(timeout=0)


def spoil(run: Run) -> None:
    for key in run.connection.scripts.keys("*:payload:*"):
        run.connection.scripts.hset(key, "response_mask", b"\x07")


@pytest.mark.parametrize(
    "chain", ["grpo", GAE, {"estimator": "reinforce", "kl": {"log_probs": "old_log_probs"}}]
)
def test_a_batch_whose_groups_are_all_dead_is_empty(
    redis_url: str, run: str, joined: Run, producer: Producer, chain: Any
) -> None:
    late = {"values": one, "old_log_probs": one}

    def queue() -> TrainerQueue:
        return queue_of(join(Connection(redis_url), run), one, chain=chain, late=late, commit="manual")

    spoil(joined)
    push_groups(producer, 2, prefix="h", ref_log_probs=np.zeros(5))
    for life in range(2):  # nothing is committed, so the batch is delivered again
        trainer = queue()
        first = next_batch(trainer, joined)
        assert empty(first), life
    second = delivered_batch(trainer, joined)
    assert (second.version, second.num_trajectories) == (1, 4)
    assert all(mb.advantages.isfinite().all() for mb in second)
    trainer.trained(second)
    trainer.commit(trainer.state_dict())
    dead = ledger(joined)["dead"]
    assert sum(dead.values()) == 4
    assert ledger(joined)["trained"] == 4
    assert problems(joined) == []


def empty(batch: Batch | None) -> bool:
    assert batch is not None
    assert list(batch.trajectories()) == []
    return (batch.version, batch.num_trajectories, batch.num_tokens, sum(mb.num_rows for mb in batch)) == (
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("chain", ["grpo", GAE])
def test_of_two_ranks_none_stops_when_nothing_can_be_read(joined: Run, chain: Any) -> None:
    leader = queue_of(joined, one, world_size=2, chain=chain, job="first")
    follower = queue_of(joined, one, world_size=2, rank=1, chain=chain, job="first")
    spoil(joined)
    mine, theirs = next_batch(leader, joined), next_batch(follower, joined)
    assert mine is not None
    assert theirs is not None
    assert len(mine) == len(theirs)
    assert [mb.num_rows for batch in (mine, theirs) for mb in batch] == [0] * 2 * len(mine)
    assert all(len(mb.advantages) == len(mb.values) == 0 for batch in (mine, theirs) for mb in batch)
    leader.trained(mine)
    leader.commit(leader.state_dict())
    assert ledger(joined)["dead"] == {"undecodable": 4}
    assert problems(joined) == []
