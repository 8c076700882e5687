"""Bounded staleness: whole groups, at naming, reported with what was lost; producers hear what is too late."""

from __future__ import annotations

import pytest

from streamadv.errors import Busy
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, group_all, heartbeat, join, ledger, problems, push_groups


def train_batches(run: Run, queue: TrainerQueue, producer: Producer, count: int) -> None:
    """Make and train `count` batches of fresh groups."""
    for _ in range(count):
        push_groups(producer, 1, prefix=f"fresh{queue.state_dict()['version']}-", model_version=10_000)
        batch = delivered_batch(queue, run)
        queue.trained(batch)


def test_a_group_that_came_too_late_is_dropped_whole_and_reported(redis_url: str, run: str) -> None:
    connection = Connection(redis_url)
    with Producer(connection, run) as producer:
        queue = TrainerQueue(
            connection, run, batch_groups=1, max_staleness=1, prefetch=0, commit="each_batch"
        )
        train_batches(join(connection, run), queue, producer, 3)
        push_groups(producer, 1, prefix="old", model_version=0, data_source="slow", tokens=12)
        push_groups(producer, 1, prefix="edge", model_version=[1, 3], tokens=7)
        batch = delivered_batch(queue, join(connection, run))
        assert {reference.group_id for reference in batch.references} == {"edge0000"}
        assert batch.staleness == [2, 2]
        assert batch.metrics["dropped/stale/slow/groups"] == 1
        assert batch.metrics["dropped/stale/slow/response_length/mean"] == 10
        assert batch.metrics["response_length/mean"] == 5
        joined = join(connection, run)
        assert ledger(joined)["dropped"] == {"stale": 2}
        assert problems(joined) == []


def test_without_versions_nothing_goes_stale(redis_url: str, run: str) -> None:
    connection = Connection(redis_url)
    with Producer(connection, run) as producer:
        queue = TrainerQueue(
            connection, run, batch_groups=1, max_staleness=0, drop_after=0, prefetch=0, commit="each_batch"
        )
        push_groups(producer, 1)
        first = delivered_batch(queue, join(connection, run))
        queue.trained(first)
        push_groups(producer, 1, prefix="later")
        second = delivered_batch(queue, join(connection, run))
        assert second.staleness == [0, 0], "without a version: never stale"


def test_producers_hear_which_rollouts_can_no_longer_make_it(redis_url: str, run: str) -> None:
    connection = Connection(redis_url)
    with Producer(connection, run) as producer:
        queue = TrainerQueue(
            connection, run, batch_groups=1, max_staleness=1, prefetch=0, commit="each_batch"
        )
        queue.state_dict()  # takes the run: there is a version from now on
        slow = producer.begin_group(2, timeout=5)
        assert slow.model_version == 0
        train_batches(join(connection, run), queue, producer, 2)
        heartbeat(producer)
        assert [rollout.cancelled for rollout in slow] == [False, False]
        train_batches(join(connection, run), queue, producer, 1)
        heartbeat(producer)
        assert [rollout.cancelled for rollout in slow] == [True, True]


def test_producers_are_admitted_as_far_ahead_as_max_staleness_allows(redis_url: str, run: str) -> None:
    connection = Connection(redis_url)
    with Producer(connection, run) as producer:
        queue = TrainerQueue(connection, run, batch_groups=2, max_staleness=1, prefetch=0, commit="manual")
        queue.state_dict()
        push_groups(producer, 4)
        with pytest.raises(Busy, match="max_staleness"):
            producer.begin_group(2, timeout=0)
        group_all(join(connection, run))
        with pytest.raises(Busy, match="4 groups begun and not yet trained"):
            producer.begin_group(2, timeout=0)
        batch = delivered_batch(queue, join(connection, run))
        queue.trained(batch)  # frees admission, though nothing is committed
        for _ in range(2):
            producer.begin_group(2, timeout=0)
        with pytest.raises(Busy):
            producer.begin_group(2, timeout=0)
