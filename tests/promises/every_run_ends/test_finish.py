"""The trainer opens a run before its first batch, ends it, and opens it again; producers hear of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from streamadv.batch import leader
from streamadv.errors import Busy, NoBatchError, ProducerClosedError, RunEndedError, SettingError
from streamadv.producer import AsyncGroup, AsyncProducer, Producer
from streamadv.producer.admission import Lines
from streamadv.producer.tickets import Ticket
from streamadv.run import Run
from streamadv.run.heartbeats import SETTLE_S
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.retry import Outage
from streamadv.store.waiting import Wait
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import Cluster
from tests.support import (
    delivered_batch,
    group_all,
    heartbeat,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    trajectory,
)

COLUMNS: dict[str, Any] = {"input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}


def queue_of(connection: Connection | str, run: str = "r", **options: Any) -> TrainerQueue:
    return TrainerQueue(
        connection,
        run,
        **{"commit": "each_batch", "batch_groups": 1, "max_staleness": 0, "prefetch": 0, **options},
    )


def train(queue: TrainerQueue, run: Run, weights: str | None = None) -> None:
    batch = delivered_batch(queue, run)
    queue.trained(batch, weights)


def test_pacing_holds_from_open_on(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        queue = queue_of(fake, drop_after=5).open()
        queue.open()
        producer.begin_group(1, timeout=0)
        with pytest.raises(Busy, match="max_staleness allows 1"):
            producer.begin_group(1, timeout=0)
        assert queue.epoch == 1


def test_a_run_that_its_trainer_has_ended(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    with producing(fake, "r") as producer:
        run, queue = join(fake, "r"), queue_of(fake)
        push_groups(producer, 1)
        batch = delivered_batch(queue, run)
        queue.trained(batch)
        open_group = producer.begin_group(2, timeout=0)
        queue.finish()
        assert ledger(run)["trained"] == 2, "what was trained is committed"
        for refused in (
            lambda: producer.begin_group(1, timeout=0),
            lambda: producer.push([trajectory("new", 0, 1)]),
        ):
            with pytest.raises(RunEndedError, match="the trainer has ended the run"):
                refused()
        assert list(producer.groups(1)) == []
        heartbeat(producer)
        assert all(rollout.cancelled for rollout in open_group)
        open_group.push([{"rollout_index": index, **COLUMNS} for index in range(2)])
        with producer.group(1, role="eval", timeout=0) as evaluation:
            assert not next(iter(evaluation)).cancelled
            next(iter(evaluation)).push(**COLUMNS)
        group_all(run)
        assert next_batch(queue, run) is None
        assert (ledger(run)["queued"], ledger(run)["dropped"]) == (2, {"eval": 1})
        assert read_status(run).trainer.finished
        assert problems(run) == []
        with caplog.at_level(logging.WARNING):
            later = queue_of(fake).open()
        assert "run r was ended by its trainer: it is open again, and goes on at version 1" in caplog.text
        assert not read_status(run).trainer.finished
        train(later, run)
        producer.begin_group(1, timeout=0)
        heartbeat(producer)
        assert not producer._logic.membership.has_run_ended


def test_the_trainer_that_has_ended_a_run_may_open_it_again(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        queue = queue_of(fake).open()
        queue.finish()
        with pytest.raises(RunEndedError):
            producer.begin_group(1, timeout=0)
        queue.open()
        push_groups(producer, 1)
        train(queue, join(fake, "r"))


def test_a_batch_that_was_not_marked_is_not_lost_with_the_end(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run, queue = join(fake, "r"), queue_of(fake)
        push_groups(producer, 1)
        first = next_batch(queue, run)
        queue.finish()
        assert queue.next_batch(timeout=0) is None
        again = next_batch(queue_of(fake), run)
        assert getattr(again, "id", None) == getattr(first, "id", "")
    assert problems(run) == []


def test_every_rank_ends_by_its_own_call(fake: Connection) -> None:
    ranks = [queue_of(fake, rank=rank, world_size=2, job="j").open() for rank in range(2)]
    for queue in ranks:
        queue.finish()
    assert [queue.next_batch(timeout=0) for queue in ranks] == [None, None]


def test_a_group_begun_before_the_end_survives_its_loss(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        queue, run = queue_of(fake).open(), join(fake, "r")
        text = producer.begin_group(1, timeout=0).tickets[0].to_json()
        queue.finish()
        fake.scripts.delete(run.keys.home.open, *fake.scripts.keys("*:group:*"))
        assert producer.rollout(Ticket.from_json(text)).push(**COLUMNS) == "pushed"


# Weights


def test_weights_are_published_with_their_version(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        assert producer.weights is None
        queue, run = queue_of(fake).open(weights="file:///0"), join(fake, "r")
        producer.begin_group(1, group_id="g0000", timeout=0)
        assert producer.weights == (0, "file:///0")
        producer.push([trajectory("g0000", 0, 1)])
        train(queue, run, "s3://bucket/a b")
        producer.begin_group(1, group_id="g0001", timeout=0)
        assert producer.weights == (1, "s3://bucket/a b")
        producer.push([trajectory("g0001", 0, 1)])
        train(queue, run)
        heartbeat(producer)
        assert producer.weights == (1, "s3://bucket/a b"), "version 2 has none"
        with producing(fake, "r") as other:
            assert other.weights == (1, "s3://bucket/a b")


def test_a_checkpoint_has_where_its_weights_lie(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        queue, run = queue_of(fake, commit="manual", max_staleness=None), join(fake, "r")
        push_groups(producer, 3)
        states = []
        for version in (1, 2, 3):
            train(queue, run, f"file:///{version}")
            states.append(queue.state_dict())
        heartbeat(producer)
        assert producer.weights == (3, "file:///3")
        queue_of(fake).load_state_dict(states[0])
        heartbeat(producer)
        assert producer.weights == (1, "file:///1")
        without = {name: value for name, value in states[1].items() if name != "weights"}
        queue_of(fake).load_state_dict(without)
        heartbeat(producer)
        assert producer.weights == (1, "file:///1"), "weights of a later version were taken back"
        queue_of(fake, max_staleness=None).open()
        heartbeat(producer)
        assert producer.weights is not None


@pytest.mark.parametrize("uri", ["", "a\nb", 7, "x" * 3000])
def test_a_uri_is_one_line(fake: Connection, uri: Any) -> None:
    with pytest.raises(SettingError, match=r"weights is .*needs a URI"):
        queue_of(fake).open(weights=uri)


# Waiting on a real server


@pytest.fixture
def never_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for admission asks again when the trainer has announced something, and else not for an hour."""
    delay = Wait.delay  # repeats after errors of the server come as ever
    monkeypatch.setattr(Wait, "delay", lambda wait: delay(wait) if isinstance(wait, Outage) else 3600.0)


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "server":
        return str(request.getfixturevalue("redis_url"))
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster.url


SETTINGS = RunSettings(shards=2)


def noted_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released for each caller that begins to wait for admission."""
    waits, join_line = threading.Semaphore(0), Lines.join

    def noted(self: Lines, *arguments: Any) -> None:
        join_line(self, *arguments)
        waits.release()

    monkeypatch.setattr(Lines, "join", noted)
    return waits


@pytest.mark.server
def test_threads_that_wait_for_admission_are_woken(
    url: str, run: str, never_polls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = noted_waits(monkeypatch)
    queue = queue_of(url, run, settings=SETTINGS).open()
    with Producer(url, run, settings=SETTINGS) as producer, ThreadPoolExecutor(2) as pool:
        next(iter(producer.begin_group(1, timeout=0))).push(**COLUMNS)
        beginning = {pool.submit(producer.begin_group, 1) for _ in range(2)}
        for _ in beginning:
            waits.acquire()
        train(queue, join(url, run))
        done, waiting = futures.wait(beginning, timeout=30, return_when="FIRST_COMPLETED")
        assert [len(future.result()) for future in done] == [1]
        queue.finish()
        for future in waiting:
            with pytest.raises(RunEndedError):
                future.result(timeout=30)
    queue.close()


@pytest.mark.server
async def test_tasks_that_wait_for_admission_are_woken(
    url: str, run: str, never_polls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = noted_waits(monkeypatch)
    queue = await asyncio.to_thread(queue_of(url, run, settings=SETTINGS).open)
    async with Producer(url, run, settings=SETTINGS) as producer:
        first = await producer.begin_group(1, timeout=0)
        await next(iter(first)).push(**COLUMNS)
        beginning = {asyncio.create_task(begin(producer)) for _ in range(2)}
        for _ in beginning:
            await asyncio.to_thread(waits.acquire)
        await asyncio.to_thread(train, queue, join(url, run), "file:///1")
        done, waiting = await asyncio.wait(beginning, timeout=30, return_when="FIRST_COMPLETED")
        assert [len(task.result()) for task in done] == [1]
        assert producer.weights == (1, "file:///1")
        await asyncio.to_thread(queue.finish)
        for task in waiting:
            with pytest.raises(RunEndedError):
                await asyncio.wait_for(task, 30)
        assert [group async for group in producer.groups(1)] == []
    queue.close()


async def begin(producer: AsyncProducer) -> AsyncGroup:
    return await producer.begin_group(1)


def cut_off(url: str) -> None:
    """Close the connections of all who wait for an announcement, once somebody does."""
    with redis.Redis.from_url(url) as client:
        while not (blocked := [c for c in client.client_list() if c["cmd"] == "xread" and "b" in c["flags"]]):
            pass
        for connection in blocked:
            client.client_kill_filter(_id=connection["id"])


@pytest.mark.server
def test_a_thread_hears_of_room_after_its_connection_broke(
    redis_url: str, run: str, never_polls: None
) -> None:
    queue = queue_of(redis_url, run).open()
    with Producer(redis_url, run) as producer, ThreadPoolExecutor(1) as pool:
        next(iter(producer.begin_group(1, timeout=0))).push(**COLUMNS)
        beginning = pool.submit(producer.begin_group, 1)
        cut_off(redis_url)
        train(queue, join(redis_url, run))
        assert len(beginning.result(timeout=30)) == 1
    queue.close()


@pytest.mark.server
async def test_a_task_hears_of_room_after_its_connection_broke(
    redis_url: str, run: str, never_polls: None
) -> None:
    queue = await asyncio.to_thread(queue_of(redis_url, run).open)
    async with Producer(redis_url, run) as producer:
        first = await producer.begin_group(1, timeout=0)
        await next(iter(first)).push(**COLUMNS)
        beginning = asyncio.create_task(begin(producer))
        await asyncio.to_thread(cut_off, redis_url)
        await asyncio.to_thread(train, queue, join(redis_url, run))
        assert len(await asyncio.wait_for(beginning, 30)) == 1
    queue.close()


def listeners(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return sum(c["cmd"] == "xread" and "b" in c["flags"] for c in client.client_list())


@pytest.mark.server
async def test_of_those_who_wait_one_listens_and_the_next_one_after_it(
    redis_url: str, run: str, never_polls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is cancelled."""
    waits = noted_waits(monkeypatch)
    queue = await asyncio.to_thread(queue_of(redis_url, run).open)
    async with Producer(redis_url, run) as producer:
        first = await producer.begin_group(1, timeout=0)
        await next(iter(first)).push(**COLUMNS)
        beginning = []
        for _ in range(3):
            beginning.append(asyncio.create_task(begin(producer)))
            await asyncio.to_thread(waits.acquire)
        while not (count := await asyncio.to_thread(listeners, redis_url)):
            pass
        assert count == 1
        beginning[0].cancel()
        await asyncio.wait({beginning[0]})
        await asyncio.to_thread(train, queue, join(redis_url, run))
        assert len(await asyncio.wait_for(beginning[1], 30)) == 1
        assert not beginning[2].done()
        beginning[2].cancel()
    queue.close()


@pytest.mark.server
def test_a_producer_that_may_not_read_announcements_says_so_and_asks(
    redis_url: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queue_of(redis_url, run).open()
    with Producer(redis_url, run) as producer, ThreadPoolExecutor(1) as pool:
        next(iter(producer.begin_group(1, timeout=0))).push(**COLUMNS)
        joined = join(redis_url, run)
        joined.connection.scripts.set(joined.keys.home.admission, "no stream")
        beginning = pool.submit(producer.begin_group, 1)
        while "[unannounced]" not in caplog.text:
            pass
        train(queue, joined)
        assert len(beginning.result(timeout=30)) == 1
    queue.close()


@pytest.mark.server
def test_who_waits_for_admission_is_not_held_up_when_the_producer_closes(
    redis_url: str, run: str, never_polls: None
) -> None:
    queue = queue_of(redis_url, run).open()
    with ThreadPoolExecutor(1) as pool:
        producer = Producer(redis_url, run).open()
        producer.begin_group(1, timeout=0)
        beginning = pool.submit(producer.begin_group, 1)
        while not listeners(redis_url):
            pass
        producer.close()
        with pytest.raises(ProducerClosedError):
            beginning.result(timeout=30)
    queue.close()


def test_a_server_that_does_not_block_is_polled(fake: Connection) -> None:
    with producing(fake, "r") as producer, ThreadPoolExecutor(1) as pool:
        queue, run = queue_of(fake).open(), join(fake, "r")
        push_groups(producer, 1)
        beginning = pool.submit(producer.begin_group, 1)
        train(queue, run)
        assert len(beginning.result(timeout=30)) == 1


def test_a_run_does_not_end_until_a_replaced_server_has_heard_who_is_alive(
    fake: Connection, forward: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has lost the only heartbeat of a producer, and the trainer that had seen it is gone, too."""
    server = "one"
    monkeypatch.setattr(leader, "SETTLE_S", SETTLE_S)
    monkeypatch.setattr(Run, "server_ids", lambda _: [server])
    monkeypatch.setattr(Run, "server_ids_with", lambda _, pipe: ([server], pipe.execute()))
    with producing(fake, "r") as done, producing(fake, "r") as alive:
        run, before = join(fake, "r"), queue_of(fake).open()
        done.finish()
        server = "another"
        fake.scripts.hdel(run.keys.home.producers, alive._logic.membership.name)
        before.close()
        for restarts in range(2):
            queue = queue_of(fake)
            with pytest.raises(NoBatchError):
                queue.next_batch(timeout=0)
            if not restarts:
                forward(SETTLE_S - 1)
                with pytest.raises(NoBatchError):
                    queue.next_batch(timeout=0)
        heartbeat(alive)
        forward(SETTLE_S)
        heartbeat(alive)
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        alive.finish()
        forward(SETTLE_S)
        assert queue.next_batch(timeout=0) is None
        assert queue_of(fake).next_batch(timeout=0) is None, "the servers are known again"
