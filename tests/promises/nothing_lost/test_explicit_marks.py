"""`mark="explicit"`: a trainer that reads ahead says itself which batches it has trained on."""

from __future__ import annotations

import queue as queues
import threading
from types import ModuleType
from typing import Any

import pytest
import redis

from streamadv.batch import leader, recovery
from streamadv.errors import NoBatchError, SettingError
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.microbatch import Batch
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    delivered_batch,
    join,
    ledger,
    next_batch,
    problems,
    push_groups,
    pushed_run,
    working,
)


def queue_of(connection: Connection | str, run: str = "r", **options: Any) -> TrainerQueue:
    given = {"batch_groups": 1, "mark": "explicit", "commit": "manual", "max_staleness": None, **options}
    return TrainerQueue(connection, run, **given)


def deliver(queue: TrainerQueue, run: Run, count: int = 1) -> list[Batch]:
    """The next batches; each is named, computed and read before the one before it is marked."""
    batches = []
    for _ in range(count):
        batch = delivered_batch(queue, run)
        batches.append(batch)
    return batches


@pytest.fixture
def run_of_four(fake: Connection) -> Run:
    return pushed_run(fake, "r", 4, finish=True)


def test_only_trained_marks(fake: Connection, run_of_four: Run) -> None:
    queue = queue_of(fake, prefetch=2)
    batches = deliver(queue, run_of_four, 3)
    assert [batch.version for batch in batches] == [0, 1, 2]
    assert queue.state_dict()["version"] == 0
    queue.trained(batches[0])
    state = queue.state_dict()
    assert (state["version"], state["groups"]) == (1, ["g0000"])
    queue.commit(state)
    assert ledger(run_of_four)["trained"] == 2
    assert problems(run_of_four) == []


def test_the_queue_says_what_it_waits_for_and_does_not_end_the_run(
    fake: Connection, run_of_four: Run
) -> None:
    queue = queue_of(fake, prefetch=1)
    first, second = deliver(queue, run_of_four, 2)
    with pytest.raises(NoBatchError, match=r"batches 0 to 1 are delivered and not marked .* \[unmarked\]"):
        queue.next_batch(timeout=0)
    queue.trained(first)
    (third,) = deliver(queue, run_of_four)
    for batch in (second, third):
        queue.trained(batch)
    (fourth,) = deliver(queue, run_of_four)
    assert next_batch(queue, run_of_four) is None
    queue.trained(fourth)
    queue.commit(queue.state_dict())
    assert ledger(run_of_four)["trained"] == 8


def test_batches_are_marked_in_order(fake: Connection, run_of_four: Run) -> None:
    queue = queue_of(fake, prefetch=1)
    first, second = deliver(queue, run_of_four, 2)
    with pytest.raises(SettingError, match="batch 1 is marked as trained before batch 0: mark in order"):
        queue.trained(second)
    for batch in (first, second, second):
        queue.trained(batch)
    assert queue.state_dict()["version"] == 2


def test_what_was_delivered_and_not_marked_comes_again(fake: Connection, run_of_four: Run) -> None:
    queue = queue_of(fake, prefetch=2)
    batches = deliver(queue, run_of_four, 3)
    queue.trained(batches[0])
    state = queue.state_dict()
    queue.commit(state)
    resumed = queue_of(fake, prefetch=2)
    resumed.load_state_dict(state)
    again = deliver(resumed, run_of_four, 2)
    assert [batch.id for batch in again] == [batch.id for batch in batches[1:]]


def test_each_batch_is_committed_when_it_is_marked(fake: Connection, run_of_four: Run) -> None:
    queue = queue_of(fake, prefetch=1, commit="each_batch")
    first, second = deliver(queue, run_of_four, 2)
    assert ledger(run_of_four)["trained"] == 0
    queue.trained(first)
    assert ledger(run_of_four)["trained"] == 2
    queue.trained(second)
    assert ledger(run_of_four)["trained"] == 4


def test_a_rank_may_mark_later_than_rank_0_commits(fake: Connection, run_of_four: Run) -> None:
    ranks = [queue_of(fake, prefetch=1, rank=rank, world_size=2, job="j") for rank in range(2)]
    in_hand = [deliver(queue, run_of_four, 2) for queue in ranks]
    for batch in in_hand[0]:
        ranks[0].trained(batch)
        ranks[0].commit(ranks[0].state_dict())
    rest = [deliver(queue, run_of_four, 2) for queue in ranks]
    for batch in (*in_hand[1], *rest[1]):
        ranks[1].trained(batch)
    assert ranks[1].state_dict()["version"] == 4
    ids = [[batch.id for batch in batches] for batches in rest]
    assert ids[0] == ids[1]
    assert ledger(run_of_four)["trained"] == 4


@pytest.mark.server
def test_batches_in_hand_survive_a_server_that_forgets(forgetful: EmbeddedServer, run: str) -> None:
    with Producer(forgetful.url, run) as producer:
        push_groups(producer, 3)
        joined = join(forgetful.url, run)
        queue = queue_of(forgetful.url, run, prefetch=1)
        first, second = deliver(queue, joined, 2)
        forgetful.kill()
        forgetful.start()
        producer.finish()  # sends its groups again
        queue.trained(first)
        queue.trained(second)
        (third,) = deliver(queue, join(forgetful.url, run))
        queue.trained(third)
        queue.commit(queue.state_dict())
        queue.close()
    groups = [batch.references[0].group_id for batch in (first, second, third)]
    assert sorted(groups) == ["g0000", "g0001", "g0002"]
    assert problems(join(forgetful.url, run)) == []


def test_a_thread_reads_while_another_trains(redis_url: str, run: str) -> None:
    trained: list[str] = []
    ready: queues.SimpleQueue[Batch | None] = queues.SimpleQueue()
    queue = queue_of(redis_url, run, prefetch=2, batch_groups=2)

    def read(stop: threading.Event) -> None:
        for batch in queue:
            ready.put(batch)
        ready.put(None)

    with Producer(redis_url, run) as producer:
        push_groups(producer, 20)
        producer.finish()
        joined = join(redis_url, run)
        with working(joined, read, lease_s=1):
            while (batch := ready.get(timeout=60)) is not None:
                trained += {reference.group_id for reference in batch.references}
                queue.trained(batch)
                queue.commit(queue.state_dict())
    queue.close()
    assert sorted(trained) == [f"g{number:04d}" for number in range(20)]
    assert ledger(joined)["trained"] == 40
    assert problems(joined) == []


def test_a_wrong_mode_is_named() -> None:
    with pytest.raises(SettingError, match="mark is 'never', needs 'auto' or 'explicit'"):
        TrainerQueue("redis://localhost:1", mark="never", commit="each_batch")  # type: ignore[arg-type]


def test_a_server_that_is_replaced_twice_while_a_batch_is_committed(
    fake: Connection, run_of_four: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second session begins after the first one has finished the commit, and does not know the batch any more."""
    server = "first"
    monkeypatch.setattr(Run, "server_ids_with", lambda _, pipe: ([server], pipe.execute()))
    queue = queue_of(fake, commit="each_batch")
    (batch,) = deliver(queue, run_of_four)

    def fail_once(module: ModuleType, name: str, comes_back_as: str) -> None:
        call, failures = getattr(module, name), iter([redis.ConnectionError("server away")])

        def fails_once(*arguments: Any) -> None:
            nonlocal server
            for failure in failures:
                server = comes_back_as
                raise failure
            call(*arguments)

        monkeypatch.setattr(module, name, fails_once)

    fail_once(leader, "commit", "second")
    fail_once(recovery, "set_trainer", "third")
    queue.trained(batch)
    assert server == "third"
    assert ledger(run_of_four)["trained"] == 2
    assert problems(run_of_four) == []
