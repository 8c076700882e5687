"""Once prompts came back, since the trainer went on from an older checkpoint, the run waits for who plays them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

import streamadv as sa
from streamadv.errors import NoBatchError
from streamadv.status.causes import ordinary_wait, reasons_of
from streamadv.status.model import ProducerState
from streamadv.status.read import read_status
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.support import group_all, heartbeat, join, next_batch, working

from .test_back import CHAIN, copy_of, play, queue_of, train
from .test_once import SIZE, record, stored

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
        status = read_status(joined)
        for other, reason in (
            ("lost", "prompts_left"),
            ("serves", "prompts_left"),
            ("open", "groups_coming"),
        ):
            producers = [ProducerState(state, state, 0.0) for state in ("finished", other)]
            seen = replace(status, producers=producers)
            assert (reasons_of(seen) or [ordinary_wait(seen)])[0].name == reason


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


@pytest.mark.server
def test_a_set_begun_after_an_older_checkpoint_is_not_set_back_when_a_server_restarts(
    tmp_path: Path, run: str
) -> None:
    with EmbeddedServer(tmp_path) as server, sa.Producer(server.url, run) as producer:
        joined = join(server.url, run)
        old = producer.prompts(sa.Prompts(range(2), shuffle=None, name="old"), SIZE)
        with queue_of(server.url, run, commit="manual") as queue:
            older = copy_of(queue)
            play(old, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(server.url, run, commit="manual") as queue:
            queue.load_state_dict(older)
            queue.open()
            play(old, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
            new = producer.prompts(sa.Prompts(range(8), shuffle=None, name="new"), SIZE)
            play(new, 4)
            train(queue, joined, 2)
            queue.commit(queue.state_dict())
            play(new, 1, reward=0.0)
            before = stored(joined, "new")
            server.stop()
            server.start()
            heartbeat(producer)
            assert len(train(queue, joined, 1)) == 1
            after = stored(joined, "new")
            assert not after.is_back
            assert after.following == before.following == [5]
            assert stored(joined, "old").is_back


def test_a_run_ends_when_all_that_came_back_is_in_the_weights(
    redis_url: str, run: str, forward: Callable[[float], None]
) -> None:
    """Some prompts were in play while the others were set back behind them, and no producer asks any more."""
    with sa.Producer(redis_url, run) as producer:
        joined, groups = (
            join(redis_url, run),
            producer.prompts(sa.Prompts(range(6), shuffle=None), SIZE),
        )
        with queue_of(redis_url, run, commit="manual") as queue:
            play(groups, 2)
            train(queue, joined, 1)
            older = copy_of(queue)
            queue.commit(older)
            play(groups, 2)
            in_play = [next(groups)[1] for _ in range(2)]
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run, commit="manual") as queue:
            queue.load_state_dict(older)
            queue.open()
            for group in in_play:
                group.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
            play(groups, 2)
            groups.close()
            producer.finish()
            assert len(train(queue, joined, 2)) == 4
            assert next_batch(queue, joined) is None
            queue.commit(queue.state_dict())
    assert stored(joined).counters == {"trained 1 0": 6}


def test_prompts_whose_groups_are_rolled_back_have_come_back(redis_url: str, run: str) -> None:
    """They were in play in the checkpoint, and their later tries are of versions behind it."""
    with sa.Producer(redis_url, run) as producer:
        joined, groups = (
            join(redis_url, run),
            producer.prompts(sa.Prompts(range(4), shuffle=None), SIZE),
        )
        with queue_of(redis_url, run, commit="manual") as queue:
            play(groups, 2)
            in_play = [next(groups)[1] for _ in range(2)]
            train(queue, joined, 1)
            older = copy_of(queue)
            queue.commit(older)
            heartbeat(producer)
            kept = producer.begin_group(SIZE)  # of the version of the checkpoint
            for _ in range(2):
                producer.begin_group(SIZE).run(lambda rollout: rollout.push(**record(rollout)), threads=1)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
            for group in in_play:
                with group:
                    pass  # its rollouts fail: the prompt is played again, under version 2
            group_all(joined)
            heartbeat(producer)
            play(groups, 2)
            kept.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
            group_all(joined)
            groups.close()
            producer.finish()
    with queue_of(redis_url, run, commit="manual") as queue:
        queue.load_state_dict(older)
        assert train(queue, joined, 1) == [kept.group_id]
        with pytest.raises(NoBatchError, match=r"of prompts train 2 are left, .*prompts_left"):
            next_batch(queue, joined)


def test_a_set_that_was_left_with_a_prompt_in_play_holds_up_nobody(redis_url: str, run: str) -> None:
    """The prompt was begun after the checkpoint and waits to be played again: nothing had ended that comes back."""
    right = sa.Prompts(range(5), shuffle=None, name="right")
    joined = join(redis_url, run)
    with sa.Producer(redis_url, run) as producer:
        left = producer.prompts(sa.Prompts(range(40), name="wrong", shuffle=None), SIZE)
        play(left, 2)
        with queue_of(redis_url, run, commit="manual") as queue:
            train(queue, joined, 1)
            older = copy_of(queue)
            queue.commit(older)
            _, group = next(left)
            left.close()
            with group:
                pass  # its rollouts fail
            group_all(joined)
            groups = producer.prompts(right, SIZE)
            play(groups, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run, commit="manual") as queue:
            queue.load_state_dict(older)
            queue.open()
            play(groups, 5)
            train(queue, joined, 2)
            assert not stored(joined, "wrong").is_back
            groups.close()
            producer.finish()
            while (batch := next_batch(queue, joined)) is not None:
                queue.trained(batch)


def test_all_sources_of_a_set_are_counted(redis_url: str, run: str) -> None:
    two = sa.Prompts({"math": range(3), "code": range(2)}, shuffle=None)
    with sa.Producer(redis_url, run) as producer:
        joined, groups = join(redis_url, run), producer.prompts(two, SIZE)
        with queue_of(redis_url, run, commit="manual") as queue:
            older = copy_of(queue)
            queue.commit(older)
            play(groups, 5)
            train(queue, joined, 3)
            queue.commit(queue.state_dict())
        groups.close()
        producer.finish()
    with queue_of(redis_url, run, commit="manual") as queue:
        queue.load_state_dict(older)
        with pytest.raises(NoBatchError, match=r"of prompts train 5 are left, .*prompts_left"):
            next_batch(queue, joined)


def test_the_first_batch_after_an_older_checkpoint_waits_for_who_is_in_the_loop(
    redis_url: str, run: str
) -> None:
    """A producer that waits for the last checkpoint asks for prompts once a second, and counts as finished."""
    options: dict[str, Any] = {"batch_groups": 4, "min_groups": 4, "keep_rolled_back": True}

    def loop() -> None:
        with sa.Producer(redis_url, run) as producer:
            for _, group in producer.prompts(sa.Prompts(range(6), shuffle=None), SIZE):
                group.run(lambda rollout: rollout.push(**record(rollout)), threads=1)

    def delivered(queue: TrainerQueue) -> int:
        batch = queue.next_batch(timeout=20)
        assert batch is not None
        queue.trained(batch)
        return len({each.group_id for each in batch.references})

    joined = join(redis_url, run)
    with working(joined), ThreadPoolExecutor(1) as pool:
        producer = pool.submit(loop)
        with TrainerQueue(redis_url, run, chain=CHAIN, commit="manual", **options) as queue:
            older = copy_of(queue)
            assert delivered(queue) == 4
            queue.commit(queue.state_dict())
            until(lambda: {each.state for each in read_status(joined).producers} == {"finished"}, "the loop")
        with TrainerQueue(redis_url, run, chain=CHAIN, commit="manual", **options) as queue:
            queue.load_state_dict(older)
            try:
                assert [delivered(queue), delivered(queue)] == [4, 2]
                queue.commit(queue.state_dict())
                producer.result(20)
            finally:
                queue.finish()


@pytest.mark.server
def test_a_run_that_has_lost_all_after_prompts_came_back_waits_as_before(tmp_path: Path, run: str) -> None:
    few = sa.Prompts(range(4), shuffle=None)
    with EmbeddedServer(tmp_path) as server:
        with sa.Producer(server.url, run) as producer:
            joined, groups = join(server.url, run), producer.prompts(few, SIZE)
            with queue_of(server.url, run) as queue:
                older = copy_of(queue)
                play(groups, 4)
                train(queue, joined, 2)
                queue.commit(queue.state_dict())
        with queue_of(server.url, run) as queue:
            queue.load_state_dict(older)
            with sa.Producer(server.url, run) as leaves:
                groups = leaves.prompts(few, SIZE)
                play(groups, 1)
                groups.close()
            train(queue, joined, 1)
            state = copy_of(queue)
            queue.commit(state)
        Redis.from_url(server.url).flushall()
        with queue_of(server.url, run) as queue:
            queue.load_state_dict(state)
            queue.open()
            assert stored(join(server.url, run)).is_back


def test_prompts_that_were_in_play_come_back_once_they_have_ended(redis_url: str, run: str) -> None:
    """The first return to the checkpoint finds them in play, the second one trained on."""
    with sa.Producer(redis_url, run) as producer:
        joined, groups = (
            join(redis_url, run),
            producer.prompts(sa.Prompts(range(2), shuffle=None), SIZE),
        )
        with queue_of(redis_url, run, commit="manual") as queue:
            older = copy_of(queue)
            queue.commit(older)
            in_play = [next(groups)[1] for _ in range(2)]
            for _ in range(2):
                producer.begin_group(SIZE).run(lambda rollout: rollout.push(**record(rollout)), threads=1)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run, commit="manual") as queue:
            queue.load_state_dict(older)
            queue.open()
            assert not stored(joined).is_back
            for group in in_play:
                group.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        groups.close()
        producer.finish()
    with queue_of(redis_url, run, commit="manual") as queue:
        queue.load_state_dict(older)
        with pytest.raises(NoBatchError, match=r"of prompts train 2 are left, .*prompts_left"):
            next_batch(queue, joined)


def test_what_the_newest_checkpoint_rolls_back_may_be_left(redis_url: str, run: str) -> None:
    """A batch was trained on and in no checkpoint when the trainer was killed."""
    with sa.Producer(redis_url, run) as producer:
        joined, groups = (
            join(redis_url, run),
            producer.prompts(sa.Prompts(range(40), shuffle=None), SIZE),
        )
        with queue_of(redis_url, run, commit="manual", prefetch=0) as queue:
            play(groups, 4)
            train(queue, joined, 1)
            newest = copy_of(queue)
            queue.commit(newest)
            train(queue, joined, 1)
            heartbeat(producer)
            play(groups, 2)  # of the version that is lost
            group_all(joined)
        groups.close()
        producer.finish()
    with queue_of(redis_url, run, commit="manual", prefetch=0) as queue:
        queue.load_state_dict(newest)
        train(queue, joined, 1)
        queue.commit(queue.state_dict())
        assert next_batch(queue, joined) is None
