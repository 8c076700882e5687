"""What holds after a restart with other ranks and producers, or by a server that has lost writes, or everything."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import streamadv as sa
from streamadv.prompts.spec import identity
from streamadv.store.connection import Connection
from tests.promises.nothing_lost.test_world_size import start_job
from tests.support import join, next_batch, problems, trajectory, working

from .test_back import CHAIN, play, queue_of, train, trained_of
from .test_once import COUNT, SIZE, prompts, stored


def keys_of(run: Any) -> list[str]:
    """What the run has of its prompts, without how groups have ended."""
    home = run.keys.home
    kinds = ("state", "entries", "again", "given_up", "solved")
    return [home.prompts, *(getattr(home, f"prompt_{kind}")("train") for kind in kinds)]


def test_other_ranks_and_producers_go_on_with_what_is_left(redis_url: str, run: str) -> None:
    """One rank and one producer, then two ranks and three producers: no prompt is lost or trained twice."""
    joined = join(redis_url, run)
    with sa.Producer(redis_url, run) as producer, queue_of(redis_url, run) as queue:
        play(producer.prompts(prompts(epochs=1), SIZE), 4)
        trained = train(queue, joined, 1)
        state = queue.state_dict()
        queue.commit(state)
    producers = [sa.Producer(redis_url, run).open() for _ in range(3)]
    try:
        groups = [producer.prompts(prompts(epochs=1), SIZE) for producer in producers]
        for each in groups:
            play(each, 1)
        ranks = start_job(Connection(redis_url), run, 2, state, batch_groups=2, min_groups=1, chain=CHAIN)
        for _ in range(3):
            parts = [next_batch(queue, joined) for queue in ranks]
            trained += sorted({each.group_id for part in parts if part for each in part.references})
            for queue, part in zip(ranks, parts, strict=True):
                assert part is not None
                queue.trained(part)
        ranks[0].commit(ranks[0].state_dict())
        assert all(next(each, None) is None for each in groups)
    finally:
        for producer in producers:
            producer.close()
    assert Counter(map(identity, trained)) == dict.fromkeys(map(identity, trained), 1)
    assert len(trained) == trained_of(stored(joined)) == COUNT
    assert not problems(joined)


@pytest.mark.parametrize("has_ends", [True, False])
def test_a_home_shard_that_has_lost_its_last_writes_trains_nothing_twice(
    redis_url: str, run: str, has_ends: bool
) -> None:
    """It has the prompts as they were before. has_ends: how groups have ended is in another shard, and not lost."""
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        server, home = joined.connection.scripts, joined.keys.home
        groups = producer.prompts(prompts(epochs=1), SIZE)
        play(groups, 2)
        before = {key: server.dump(key) for key in keys_of(joined)}
        with queue_of(redis_url, run) as queue:
            trained = train(queue, joined, 1)
            state = queue.state_dict()
            queue.commit(state)
            for key, value in before.items():
                server.delete(key)
                if value is not None:
                    server.restore(key, 0, value)
            if not has_ends:
                server.delete(home.prompt_ends)
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(state)
            play(groups, COUNT - 2)
            trained += train(queue, joined, 3)
            queue.commit(queue.state_dict())
            with working(joined), ThreadPoolExecutor(1) as pool:
                rest = pool.submit(next, groups, None)
                assert queue.next_batch() is None
                assert rest.result() is None
        assert Counter(map(identity, trained)) == dict.fromkeys(map(identity, trained), 1)
        assert len(trained) == COUNT
        found = stored(joined)
        assert found.is_over
        assert found.counters == {"trained 1 0": COUNT}


def test_a_run_that_has_lost_everything_goes_on_from_the_checkpoint(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        play(groups, 4)
        with queue_of(redis_url, run) as queue:
            trained = train(queue, joined, 2)
            state = queue.state_dict()
            queue.commit(state)
    joined.connection.scripts.flushall()
    with sa.Producer(redis_url, run) as producer, queue_of(redis_url, run) as queue:
        queue.load_state_dict(state)
        queue.open()
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        play(groups, COUNT - 4)
        trained += train(queue, joined, 2)
        queue.commit(queue.state_dict())
        assert next(groups, None) is None
        assert Counter(map(identity, trained)) == dict.fromkeys(map(identity, trained), 1)
        assert len(trained) == COUNT
        assert stored(joined).counters == {"trained 1 0": COUNT}


@pytest.mark.release
def test_a_checkpoint_of_many_groups_ends_all_their_prompts(redis_url: str, run: str) -> None:
    """Each of its batches has more than a shard remembers ends of."""
    half = 4200
    given = sa.Prompts(range(2 * half), shuffle=None)
    settings = sa.RunSettings(max_trajectory_bytes=4096, dedupe_groups=10 * half)
    with sa.Producer(redis_url, run, settings=settings) as producer:
        joined = join(redis_url, run)
        next(producer.prompts(given, 1))
        ids = [given.set.group_id(f"1 {position}", 0) for position in range(2 * half)]
        for start in range(0, len(ids), 100):
            producer.push_many([[trajectory(group_id, 0, 1)] for group_id in ids[start : start + 100]])
        with sa.TrainerQueue(redis_url, run, batch_groups=half, max_staleness=2, chain=CHAIN) as queue:
            for _ in range(2):
                train(queue, joined, 1)
            queue.commit(queue.state_dict())
            assert trained_of(stored(joined)) == 2 * half
