"""Waiting that cannot end becomes an error; waiting that is stuck gets a reason."""

from __future__ import annotations

import logging

import pytest

from streamadv.connection import Connection
from streamadv.errors import NoBatchError, StarvedError, UncommittedBudgetError
from streamadv.producer import Producer
from streamadv.status import read_status
from streamadv.trainer_queue import TrainerQueue
from streamadv.watchdog import LOOK_S, SAY_S, Limits, Watchdog, reasons_of
from tests.support import (
    group_all,
    join,
    next_batch,
    producing,
    push_groups,
    push_one,
    trajectory,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_without_anything_names_the_missing_producers(fake: Connection) -> None:
    (reason,) = reasons_of(read_status(join(fake, "r")))
    assert "no producer is alive" in reason


def test_a_live_producer_is_no_reason(fake: Connection) -> None:
    with producing(fake, "r"):
        assert reasons_of(read_status(join(fake, "r"))) == []


def test_entries_nobody_takes_are_named_with_their_age(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_one(producer, trajectory())
        status = read_status(join(fake, "r"))
    status["streams"]["rollouts"]["oldest_age_s"] = 33.0
    (reason,) = reasons_of(status)
    assert "1 entries wait for a grouper (none known), the oldest for 33 s" in reason


def test_everything_filtered_is_named(fake: Connection) -> None:
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        push_groups(producer, 3, reward=1.0)
        run = join(fake, "r")
        group_all(run)
        assert reasons_of(read_status(run)) == [
            "all 3 groups so far were filtered away (zero_variance 3)",
        ]


def filtering_run(fake: Connection, groups: int, kept: int, watchdog: Watchdog, producer: Producer) -> None:
    """Push filtered and kept groups, then let the watchdog look."""
    push_groups(producer, groups, prefix="same", reward=1.0)
    push_groups(producer, kept, prefix="kept")
    group_all(join(fake, "r"))
    watchdog.look()


def test_starvation_is_an_error_after_max_filtered_batches(fake: Connection) -> None:
    clock = Clock()
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        watchdog = Watchdog(join(fake, "r"), Limits(2, 0.05, 3), clock)
        watchdog.look()
        clock.now += LOOK_S
        filtering_run(fake, 5, 0, watchdog, producer)
        clock.now += LOOK_S
        push_groups(producer, 1, prefix="last", reward=0.0)
        group_all(join(fake, "r"))
        with pytest.raises(StarvedError, match="6 groups were filtered away"):
            watchdog.look()


def test_a_batch_in_between_forgives(fake: Connection) -> None:
    clock = Clock()
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        watchdog = Watchdog(join(fake, "r"), Limits(2, 0.05, 3), clock)
        filtering_run(fake, 5, 0, watchdog, producer)
        watchdog.progress()
        clock.now += LOOK_S
        watchdog.look()
        clock.now += LOOK_S
        push_groups(producer, 5, prefix="more", reward=1.0)
        group_all(join(fake, "r"))
        watchdog.look()


def test_a_named_batch_that_waits_for_a_worker_is_not_starvation(fake: Connection) -> None:
    clock = Clock()
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        run = join(fake, "r")
        watchdog = Watchdog(run, Limits(1, 0.05, 3), clock)
        push_groups(producer, 1, prefix="kept")
        group_all(run)
        queue = TrainerQueue(fake, "r", batch_groups=1)
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        watchdog.look()
        for prefix in ("same", "more"):
            clock.now += LOOK_S
            push_groups(producer, 4, prefix=prefix, reward=1.0)
            group_all(run)
            watchdog.look()
        queue.close()


def test_few_kept_groups_are_warned_of(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        watchdog = Watchdog(join(fake, "r"), Limits(2, 0.3, None), clock)
        watchdog.look()
        clock.now += LOOK_S
        filtering_run(fake, 7, 2, watchdog, producer)
    assert "only 2 of the last 9 groups were kept" in caplog.text


def test_the_reason_is_said_every_half_minute(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watchdog = Watchdog(join(fake, "r"), Limits(1, 0.05, 10), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(int(3 * SAY_S)):
            clock.now += 1
            watchdog.look()
    said = [record.message for record in caplog.records if record.message.startswith("no batch for")]
    assert len(said) == 3
    assert "no producer is alive" in said[0]


def test_uncommitted_batches_that_fill_the_budget_are_an_error(fake: Connection) -> None:
    """The producer waits for bytes that only a commit frees; the trainer would wait for the producer."""
    settings = {"max_trajectory_bytes": 300_000, "max_bytes": 1_200_000}
    with producing(fake, "r", settings) as producer:
        run = join(fake, "r")
        push_groups(producer, 2, tokens=20_000)
        queue = TrainerQueue(fake, "r", batch_groups=2, commit="manual", max_staleness=None)
        batch = next_batch(queue, run)
        assert batch is not None
        queue.trained(batch)
        watchdog = Watchdog(run, Limits(2, 0.05, 10))
        with pytest.raises(UncommittedBudgetError, match="commit more often, or raise max_bytes"):
            watchdog.look()
        queue.commit(queue.state_dict())
        Watchdog(run, Limits(2, 0.05, 10)).look()
