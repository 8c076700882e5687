"""A producer waits until a trainer has said where weights lie, and says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from streamadv.errors import RunEndedError
from streamadv.producer import Producer
from streamadv.store.connection import Connection
from streamadv.store.waiting import REPORT_S, Wait
from streamadv.trainer.queue import TrainerQueue
from tests.support import producing


def test_it_returns_them_once_a_trainer_has_named_some(
    fake: Connection,
    forward: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, pauses = TrainerQueue(fake, "r"), 0

    def delay(_: Wait) -> float:
        """Time passes; in the third pause the trainer opens the run."""
        nonlocal pauses
        pauses += 1
        forward(REPORT_S)
        if pauses == 3:
            queue.open(weights="file:///0")
        return 0.0

    with producing(fake, "r") as producer, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(Wait, "delay", delay)
        assert producer.wait_for_weights() == (0, "file:///0") == producer.weights
        assert "no weights for 25 s: no trainer has named weights yet: start the trainer" in caplog.text
        assert producer.wait_for_weights() == (0, "file:///0")
        assert pauses == 3, "weights that are known are returned at once"


def test_a_run_that_has_ended_brings_none(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        TrainerQueue(fake, "r").open().finish()
        with pytest.raises(RunEndedError, match="named no weights: stop, or start a trainer"):
            producer.wait_for_weights()


@pytest.mark.server
async def test_tasks_wait_too(redis_url: str, run: str) -> None:
    queue = TrainerQueue(redis_url, run)
    async with Producer(redis_url, run) as producer:
        waiting = asyncio.create_task(producer.wait_for_weights())
        await asyncio.sleep(0)
        await asyncio.to_thread(queue.open, weights="file:///0")
        assert await waiting == (0, "file:///0")
    queue.close()
