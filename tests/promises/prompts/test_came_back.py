"""Once prompts came back, since the trainer went on from an older checkpoint, the run waits for who plays them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import streamadv as sa
from streamadv.errors import NoBatchError
from tests.support import join, next_batch, working

from .test_back import copy_of, play, queue_of, train
from .test_once import SIZE

KILLED = """
import os, sys
import streamadv as sa
producer = sa.Producer(sys.argv[1], sys.argv[2]).open()
_, group = next(producer.prompts(sa.Prompts(range(4), shuffle=None), 2))
columns = dict(input_ids=[1, 2, 3], response_mask=[0, 1, 1], rollout_log_probs=[-1.0] * 3)
group.run(lambda rollout: rollout.push(**columns, reward=float(rollout.rollout_index)), threads=1)
os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
def test_the_producer_that_came_to_play_what_was_set_back_is_killed(
    redis_url: str, run: str, forward: Callable[[float], None]
) -> None:
    few = sa.Prompts(range(4), shuffle=None)
    with sa.Producer(redis_url, run) as producer:
        joined, groups = join(redis_url, run), producer.prompts(few, SIZE)
        with queue_of(redis_url, run) as queue:
            older = copy_of(queue)
            for _ in range(2):
                play(groups, 2)
                train(queue, joined, 1)
                queue.commit(queue.state_dict())
        assert next(groups, None) is None
    with queue_of(redis_url, run) as queue:
        queue.load_state_dict(older)
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        subprocess.run([sys.executable, "-c", KILLED, redis_url, run], check=False)
        assert len(train(queue, joined, 1)) == 1
        for _ in range(8):  # 40 s later: nobody has started it again yet
            forward(5.0)
            with pytest.raises(NoBatchError):
                next_batch(queue, joined)


def test_a_set_that_was_left_before_the_older_checkpoint_holds_up_nobody(redis_url: str, run: str) -> None:
    """Nothing of the set that was left is brought back: it is in the checkpoint as it is in the run."""
    right = sa.Prompts(range(5), shuffle=None, name="right")
    joined = join(redis_url, run)
    with sa.Producer(redis_url, run) as producer:
        left = producer.prompts(sa.Prompts(range(40), name="wrong", shuffle=None), SIZE)
        play(left, 2)
        left.close()
        with queue_of(redis_url, run) as queue:
            train(queue, joined, 1)
            older = copy_of(queue)
            queue.commit(older)
            groups = producer.prompts(right, SIZE)
            play(groups, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            queue.open()
            play(groups, 5)
            train(queue, joined, 2)
            with working(joined), ThreadPoolExecutor(1) as pool:
                rest = pool.submit(next, groups, None)  # as the loop does: it waits for the last checkpoint
                try:
                    while (batch := queue.next_batch(timeout=10)) is not None:
                        queue.trained(batch)
                    queue.commit(queue.state_dict())
                    assert rest.result(10) is None
                finally:
                    queue.finish()


def test_prompts_that_the_server_had_lost_may_be_left_as_any_others(redis_url: str, run: str) -> None:
    """The newest checkpoint: nothing is set back to an older one."""
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(sa.Prompts(range(9), shuffle=None), SIZE)
        play(groups, 4)
        with queue_of(redis_url, run) as queue:
            train(queue, joined, 1)
            state = copy_of(queue)
            queue.commit(state)
        home = joined.keys.home
        names = ("state", "entries", "again", "given_up")
        joined.connection.scripts.delete(
            home.prompts, *(getattr(home, f"prompt_{name}")("train") for name in names)
        )
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(state)
            train(queue, joined, 1)
            play(groups, 2)
            groups.close()  # as the page says: nobody wants the others
            producer.finish()
            train(queue, joined, 1)
            assert next_batch(queue, joined) is None
