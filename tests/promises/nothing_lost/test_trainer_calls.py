"""Calls of the trainer queue that are interrupted, fail, or come from two threads, and are repeated."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch

from streamadv.algorithms.chain.config import ChainConfig
from streamadv.batch import leader as leader_module
from streamadv.batch.progress import Progress
from streamadv.batch.selection import coefficient_of, coefficients_after
from streamadv.errors import LateColumnError, NoBatchError, StreamadvError
from streamadv.store.connection import Connection
from streamadv.trainer import fetch, loop
from streamadv.trainer.microbatch import MicroBatch
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    compute_all,
    delivered_batch,
    group_all,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    pushed_run,
)


def queue_of(connection: Any, run: str = "r", **options: Any) -> TrainerQueue:
    given = {"batch_groups": 1, "commit": "manual", "max_staleness": None, "prefetch": 0, **options}
    return TrainerQueue(connection, run, **given)


def test_after_an_error_of_reading_ahead_the_batch_comes(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pushed_run(fake, "r", 1)
    queue = queue_of(fake)
    real, fails = fetch.empty_column, [True]

    def empty_column(*arguments: Any) -> Any:
        if fails:
            fails.pop()
            raise MemoryError("no memory for now")
        return real(*arguments)

    monkeypatch.setattr(fetch, "empty_column", empty_column)
    group_all(run)
    with pytest.raises((NoBatchError, MemoryError)):
        queue.next_batch(timeout=0)
    compute_all(run)
    assert queue.next_batch(timeout=0) is not None
    assert not fails


def test_a_batch_that_an_interrupt_in_a_callback_keeps_from_the_loop_comes_again(fake: Connection) -> None:
    run = pushed_run(fake, "r", 2, finish=True)
    queue = queue_of(fake)
    interrupts = [True]

    def callback(_: Any) -> None:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt

    queue.on_batch(callback)
    with pytest.raises(KeyboardInterrupt):
        delivered_batch(queue, run)
    batch = delivered_batch(queue, run)
    assert batch.version == 0


def test_two_threads_ask_for_batches(fake: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has read groups, and has not noted them, when the other one asks: they are in a batch once."""
    waits, reads, may_go_on = (threading.Event() for _ in range(3))
    wait_for_news, read_entries = loop.wait_for_news, leader_module.read_entries

    def waiting(*arguments: Any) -> bool:
        waits.set()
        return wait_for_news(*arguments)

    def read_slowly(*arguments: Any) -> Any:
        page = read_entries(*arguments)
        if threading.current_thread().name == "asks" and page and not reads.is_set():
            reads.set()
            may_go_on.wait(0.5)  # as long as the other one would need to read them too
        return page

    monkeypatch.setattr(loop, "wait_for_news", waiting)
    monkeypatch.setattr(leader_module, "read_entries", read_slowly)
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = queue_of(fake, mark="explicit", prefetch=1, batch_groups=2)
        queue.open()

        def ask() -> None:
            with suppress(NoBatchError):
                queue.next_batch(timeout=1)

        thread = threading.Thread(target=ask, name="asks")
        thread.start()
        assert waits.wait(10)
        push_groups(producer, 1, prefix="a")
        group_all(run)
        assert reads.wait(10)
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        may_go_on.set()
        thread.join()
        push_groups(producer, 1, prefix="b")
        producer.finish()
        batch = next_batch(queue, run)
        assert batch is not None
        assert {reference.group_id for reference in batch.references} == {"a0000", "b0000"}
        queue.trained(batch)
        queue.commit(queue.state_dict())
        assert ledger(run)["trained"] == 4
        assert problems(run) == []


def test_the_coefficient_outlives_a_larger_prefetch() -> None:
    config = ChainConfig.model_validate(
        {"estimator": "grpo", "kl": {"target": 0.1, "coefficient": 0.5, "horizon": 10}}
    )
    after: Mapping[str, float] = {}
    for k in range(20):
        after = coefficients_after(config, 0, after, k, 10.0, 100)
    assert after["19"] > 1
    coefficient = coefficient_of(config, 4, after, 20)
    assert coefficient is not None
    assert coefficient > 1


def test_an_interrupt_while_a_batch_is_noted_as_trained_forgets_no_group(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pushed_run(fake, "r", 2)
    queue = queue_of(fake, batch_groups=2)
    batch = delivered_batch(queue, run)
    real, calls = Progress._known_as, [0]

    def known_as(self: Progress, group_id: str) -> str:
        calls[0] += 1
        if calls[0] == 1:
            raise KeyboardInterrupt
        return real(self, group_id)

    monkeypatch.setattr(Progress, "_known_as", known_as)
    with pytest.raises(KeyboardInterrupt):
        queue.trained(batch)
    queue.trained(batch)
    state = queue.state_dict()
    assert (state["version"], sorted(state["groups"])) == (1, ["g0000", "g0001"])


def test_a_closed_queue_takes_no_run(fake: Connection) -> None:
    queue = queue_of(fake)
    queue.close()
    with pytest.raises(StreamadvError, match="closed"):
        queue.open()


def test_an_interrupt_while_results_are_read(fake: Connection) -> None:
    run = pushed_run(fake, "r", 2)
    queue = queue_of(fake, late={"ref_log_probs": lambda mb: torch.zeros(mb.num_tokens)})
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(run)
    interrupts = [KeyboardInterrupt()]

    class Cursors(dict[int, str]):
        def __setitem__(self, shard: int, entry: str) -> None:
            if interrupts:  # the result is kept already
                raise interrupts.pop()
            super().__setitem__(shard, entry)

    collector = queue._loop._collector
    assert collector is not None
    collector.cursors = Cursors(collector.cursors)
    with pytest.raises(KeyboardInterrupt):
        queue.next_batch(timeout=0)
    batch = queue.next_batch(timeout=0)
    assert batch is not None
    queue.trained(batch)
    queue.commit(queue.state_dict())
    assert ledger(run)["trained"] == 2
    assert problems(run) == []


def test_two_ranks_of_which_one_late_function_fails_once(fake: Connection) -> None:
    run = pushed_run(fake, "r", 4)
    fails = [True]

    def late(mb: MicroBatch) -> Any:
        if fails:
            fails.pop()
            return torch.full((mb.num_tokens,), torch.nan)
        return torch.ones(mb.num_tokens)

    leader = queue_of(
        fake, rank=0, world_size=2, job="j", batch_groups=2, late={"x": lambda mb: torch.ones(mb.num_tokens)}
    )
    follower = queue_of(fake, rank=1, world_size=2, job="j", batch_groups=2, late={"x": late})
    first = delivered_batch(leader, run)
    with pytest.raises(LateColumnError):
        follower.next_batch(timeout=0)
    other = follower.next_batch(timeout=0)
    assert other is not None
    assert other.id == first.id
    for queue in (leader, follower):
        batch = delivered_batch(queue, run)
        assert batch.version == 1
    leader.commit(leader.state_dict())
    assert problems(run) == []


def test_a_timeout_may_be_infinite(fake: Connection) -> None:
    run = pushed_run(fake, "r", 1)
    queue = queue_of(fake)
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(run)
    assert queue.next_batch(timeout=math.inf) is not None
