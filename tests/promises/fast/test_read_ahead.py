"""Payloads of the next batch are there when it is asked for, and nothing else comes of reading ahead."""

from __future__ import annotations

from typing import Any

import pytest

from streamadv.errors import NoBatchError
from streamadv.run import Run
from streamadv.run.dead_letters import list_dead
from streamadv.store.connection import Connection
from streamadv.trainer import fetch
from streamadv.trainer.microbatch import Batch
from streamadv.trainer.queue import TrainerQueue
from tests.support import compute_all, delivered_batch, identities, ledger, next_batch, problems, pushed_run
from tests.support import logged as logged_groups


@pytest.fixture
def joined(redis_url: str, run: str) -> Run:
    """Six groups of two, all pushed."""
    connection = Connection(redis_url)
    return pushed_run(connection, run, 6, finish=True)


def first_batch(joined: Run) -> tuple[TrainerQueue, Batch]:
    """A queue that has delivered batch 0, named batch 1, and begun to read it ahead."""
    queue = TrainerQueue(joined.connection, joined.name, batch_groups=2, commit="manual")
    batch = delivered_batch(queue, joined)
    return queue, batch


def missing(queue: TrainerQueue) -> int:
    """Wait for what is being read ahead; payloads that were not read."""
    assert queue._loop._collector is not None
    assert queue._loop._collector.ahead is not None
    queue._loop._collector.ahead.thread.join()
    fetched = queue._loop._collector.ahead.fetched
    assert fetched is not None
    return len(fetched.missing)


def payload_keys(joined: Run, group_id: str) -> list[str]:
    return [packet.key for packet in logged_groups(joined)[group_id].packets]


def test_payloads_come_over_the_network_once(joined: Run) -> None:
    queue, _ = first_batch(joined)
    assert missing(queue) == 0
    for group_id in ("g0002", "g0003"):
        joined.connection.scripts.delete(*payload_keys(joined, group_id))
    compute_all(joined)
    batch = queue.next_batch(timeout=0)
    assert batch is not None
    assert identities(batch.references) == [("g0002", 0), ("g0002", 1), ("g0003", 0), ("g0003", 1)]
    assert batch.micro_batches[0].input_ids.tolist() == [*range(5), *range(10, 15)] * 2


def test_what_was_read_ahead_is_not_delivered(joined: Run) -> None:
    queue, _ = first_batch(joined)
    missing(queue)
    queue.commit(queue.state_dict())
    queue.close()
    assert ledger(joined)["trained"] == 0
    assert ledger(joined)["in_flight"] == 8
    compute_all(joined)
    again = TrainerQueue(joined.connection, joined.name, batch_groups=2, commit="each_batch")
    assert identities(again.next_batch(timeout=0).references)[0] == ("g0000", 0)  # type: ignore[union-attr]
    assert problems(joined) == []


@pytest.mark.parametrize("wrong", ["size", "values"])
def test_what_cannot_be_read_ahead_is_a_dead_letter_when_it_is_due(wrong: str, joined: Run) -> None:
    queue, _ = first_batch(joined)
    missing(queue)
    first, *_ = payload_keys(joined, "g0005")
    mask: Any = joined.connection.scripts.hget(first, "response_mask")
    damaged = mask[:-1] if wrong == "size" else mask.replace(b"\1", b"\2")
    joined.connection.scripts.hset(first, "response_mask", damaged)
    compute_all(joined)
    assert queue.next_batch(timeout=0) is not None
    assert missing(queue) == (1 if wrong == "size" else 0), "values are looked at when all are there"
    compute_all(joined)
    batch = queue.next_batch(timeout=0)
    assert batch is not None
    assert identities(batch.references) == [("g0004", 0), ("g0004", 1)]
    assert [dead.group_id for dead in list_dead(joined)] == ["g0005"]


def test_a_batch_too_large_to_hold_is_fetched_when_it_is_due(
    joined: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_BYTES", 1)
    queue, _ = first_batch(joined)
    assert missing(queue) == sum(len(payload_keys(joined, group_id)) for group_id in ("g0002", "g0003"))
    compute_all(joined)
    assert queue.next_batch(timeout=0) is not None


def test_a_fault_while_reading_ahead_is_raised_by_the_queue(
    joined: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fetch, "fetch_replies", fail)
    queue = TrainerQueue(joined.connection, joined.name, batch_groups=2, commit="each_batch")
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    with pytest.raises(ZeroDivisionError):
        next_batch(queue, joined)
