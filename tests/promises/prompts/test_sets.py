"""Several sets of prompts in one run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import streamadv as sa
from streamadv.errors import NoBatchError
from streamadv.trainer.queue import TrainerQueue
from tests.support import join, threads, working

from .test_once import SIZE, record, trainer


def play(group: Any) -> None:
    for rollout in group:
        rollout.push(**record(rollout))


def trainer_that_ends(
    url: str, run: str, trained: list[str]
) -> tuple[Callable[[threading.Event], None], threading.Event]:
    """A trainer, and whether its loop has ended."""
    has_ended = threading.Event()

    def train(stop: threading.Event) -> None:
        trainer(url, run, trained)(stop)
        has_ended.set()

    return train, has_ended


def test_a_set_that_is_played_later_is_played_to_its_end(redis_url: str, run: str) -> None:
    """One loop waits for the end of its prompts, while another one of the same producer has some left."""
    trained: list[str] = []
    train, has_ended = trainer_that_ends(redis_url, run, trained)
    with sa.Producer(redis_url, run) as producer, working(join(redis_url, run), train):
        few = producer.prompts(sa.Prompts(["one", "two"], name="few"), SIZE)
        more = producer.prompts(sa.Prompts(range(6), name="more"), SIZE)
        play(next(more)[1])
        for _, group in few:
            play(group)
        assert not has_ended.wait(3)
        for _, group in more:
            play(group)
    assert len([group for group in trained if group.startswith("prompt:few:")]) == 2
    assert len([group for group in trained if group.startswith("prompt:more:")]) == 6


def test_a_set_that_was_left_does_not_hold_up_another_one(redis_url: str, run: str) -> None:
    """Some prompts of one set were begun; the producers go on with another one, under another name."""
    trained: list[str] = []
    has_ended = []

    def train(_: threading.Event) -> None:
        with TrainerQueue(
            redis_url, run, batch_groups=4, max_staleness=1, chain={"estimator": "reinforce"}
        ) as queue:
            with suppress(NoBatchError):
                while (batch := queue.next_batch(timeout=10)) is not None:
                    trained.extend({each.group_id for each in batch.references})
                    queue.trained(batch)
                has_ended.append(True)
            queue.commit(queue.state_dict())  # once, after the loop
            queue.finish()

    with sa.Producer(redis_url, run) as producer, working(join(redis_url, run), train):
        left = producer.prompts(sa.Prompts(range(400), name="wrong"), SIZE)
        play(next(left)[1])
        left.close()  # type: ignore[attr-defined]
        for _, group in producer.prompts(sa.Prompts(range(6), name="right"), SIZE):
            play(group)
    assert has_ended
    assert len(trained) == 7


def test_a_loop_that_was_left_ends_with_its_producer(redis_url: str, run: str) -> None:
    """Whoever leaves a loop and finishes wants no more, though prompts are left and the producer lives on."""
    trained: list[str] = []
    train, has_ended = trainer_that_ends(redis_url, run, trained)
    with sa.Producer(redis_url, run) as producer, working(join(redis_url, run), train):
        loop = producer.prompts(sa.Prompts(range(9)), SIZE)  # which lives on, too
        play(next(loop)[1])
        producer.finish()
        assert has_ended.wait(20)
    assert len(trained) == 1


def test_a_loop_that_was_left_open_is_said(redis_url: str, run: str) -> None:
    """Its iterator lives on, and another loop waits for the checkpoint after the trainer's."""
    with (
        sa.Producer(redis_url, run) as producer,
        working(join(redis_url, run)),
        TrainerQueue(redis_url, run, batch_groups=4, chain={"estimator": "reinforce"}) as queue,
    ):
        left = producer.prompts(sa.Prompts(range(9), name="easy"), SIZE)
        play(next(left)[1])
        few = producer.prompts(sa.Prompts(["one"], name="few"), SIZE)
        play(next(few)[1])
        with threads(lambda _: list(few)):
            queue.trained(queue.next_batch())
            with pytest.raises(NoBatchError, match=r"of prompts easy 8 are left, .*\[prompts_left\]"):
                queue.next_batch(timeout=1)
            left.close()  # type: ignore[attr-defined]
            assert queue.next_batch() is None
            queue.commit(queue.state_dict())
