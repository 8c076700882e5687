"""A producer of episodes is killed in the middle of a group: each task of each epoch is trained on once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import count

import pytest

import streamadv as sa
from streamadv.integrations import verifiers
from tests.docs.story import ROOT
from tests.support import join, ledger, problems, working

from .test_episodes import CHAIN, episode, trace

TASKS, EPOCHS, SIZE, BATCH = 6, 2, 3, 2
pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.timeout(300)]


def job(url: str, run: str, pushes: int) -> None:
    """A producer that plays the tasks, and dies after so many pushes; 0: to the end."""
    pushed = count(1)
    with sa.Producer(url, run=run, name="tasks") as producer:
        for number, group in producer.prompts(sa.Prompts(list(range(TASKS)), epochs=EPOCHS), SIZE):
            for rollout in group:
                score = 10.0 * number + rollout.rollout_index  # by which the trainer knows it
                verifiers.push(rollout, episode(trace(CHAIN, rewards={"r": {"score": score, "weight": 1.0}})))
                if next(pushed) == pushes:
                    os.kill(os.getpid(), signal.SIGKILL)
        producer.finish()


def test_each_task_of_each_epoch_is_trained_on_once(redis_url: str, run: str) -> None:
    queue = sa.TrainerQueue(redis_url, run, batch_groups=BATCH, commit="each_batch", chain="grpo").open()

    def producer(pushes: int) -> subprocess.Popen[bytes]:
        code = f"from {__name__} import job; job({redis_url!r}, {run!r}, {pushes})"
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)

    trained = Counter[float | None]()
    with working(joined := join(redis_url, run)):
        assert producer(2 * SIZE + 2).wait() == -signal.SIGKILL
        again = producer(0)
        for _ in range(TASKS * EPOCHS // BATCH):
            batch = queue.next_batch()
            assert batch is not None
            trained.update(reference.reward for reference in batch.references)
            queue.trained(batch)
        assert queue.next_batch() is None
        assert again.wait() == 0
    queue.close()
    assert trained == {10.0 * number + index: EPOCHS for number in range(TASKS) for index in range(SIZE)}
    assert ledger(joined)["trained"] == TASKS * EPOCHS * SIZE
    assert problems(joined) == []
