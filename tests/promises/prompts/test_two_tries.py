"""Two tries of one prompt in the groups logs: the second one waits, and nothing behind it does."""

from __future__ import annotations

import pytest

import streamadv as sa
from streamadv.prompts.stored import carry_ends, check_requeue
from streamadv.run.dead_letters import requeue
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    delivered_batch,
    group_all,
    join,
    next_batch,
    producing,
    push_groups,
    trajectory,
    working,
)

from ..nothing_lost.test_trainer_calls import queue_of
from .test_back import CHAIN, play
from .test_once import SIZE, prompts, record
from .test_requeued import kill_logged

PROMPT = "prompt:train::0:7:"


def test_two_tries_in_the_logs_do_not_stop_the_trainer(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1, retries=1), SIZE)
        (first,) = play(groups, 1)
        kill_logged(redis_url, run, joined)
        carry_ends(joined)
        check_requeue(joined, first)  # the operator's first request
        _, again = next(groups)  # a producer leases the next try
        requeue(joined, first)  # the operator's second request
        again.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
        play(groups, 4)
        group_all(joined)
        with TrainerQueue(redis_url, run, batch_groups=4, chain=CHAIN) as queue, working(joined):
            batch = queue.next_batch(timeout=5)
            assert batch is not None
            assert len({reference.group_id for reference in batch.references}) == 4


def test_another_try_of_a_prompt_does_not_hide_what_follows(fake: Connection) -> None:
    """A trainer that reads ahead gets the groups that wait behind it."""
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = queue_of(fake, mark="explicit", prefetch=1)
        queue.open()
        for group_id in (PROMPT + "0", PROMPT + "1", "other"):
            producer.push([trajectory(group_id, index, 2) for index in range(2)])
        first = delivered_batch(queue, run)
        assert first.references[0].group_id == PROMPT + "0"
        second = delivered_batch(queue, run)
        assert second.references[0].group_id == "other"


@pytest.mark.parametrize("size", [2, 8])
def test_two_tries_of_a_prompt_do_not_stop_the_trainer(fake: Connection, size: int) -> None:
    """The default mode: no other thread, nothing read ahead."""
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = queue_of(fake, batch_groups=size, prefetch=1)
        queue.open()
        for group_id in (PROMPT + "0", PROMPT + "1"):
            producer.push([trajectory(group_id, index, 2) for index in range(2)])
        push_groups(producer, 10 * size)
        batch = delivered_batch(queue, run)
        assert len({reference.group_id for reference in batch.references}) == size


def test_the_run_does_not_end_before_what_stands_behind_another_try(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = queue_of(fake, mark="explicit", prefetch=1)
        queue.open()
        for group_id in (PROMPT + "0", PROMPT + "1", "other"):
            producer.push([trajectory(group_id, index, 2) for index in range(2)])
        producer.finish()
        first = delivered_batch(queue, run)
        assert first.references[0].group_id == PROMPT + "0"
        assert next_batch(queue, run) is not None, "'other' is in no batch yet"
