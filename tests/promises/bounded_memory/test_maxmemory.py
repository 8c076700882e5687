"""Above maxmemory only admission and push are refused; everything else restarts and the pipeline drains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis
import torch

from streamadv.advantage.compute import compute_safely
from streamadv.advantage.prepare import prepare
from streamadv.advantage.worker import publish
from streamadv.errors import Busy, NoBatchError
from streamadv.producer import Producer
from streamadv.run import open_run
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.status.model import Bytes
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.retry import NotNowError
from streamadv.trainer.queue import TrainerQueue
from tests.chaos.proxy import Proxy
from tests.clusters import refusals, until
from tests.support import (
    ADVANTAGE,
    batches_read,
    consumer_of,
    deep_problems,
    group_all,
    push_groups,
    threads,
    working,
)

pytestmark = pytest.mark.server

SMALL = RunSettings(max_trajectory_bytes=100_000)


@pytest.fixture
def small() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(maxmemory="40mb") as server:
        yield server


def test_every_role_restarts_and_the_pipeline_drains(small: EmbeddedServer, run: str) -> None:
    columns = {"values": np.zeros(2000), "token_level_rewards": np.zeros(2000)}
    with redis.Redis.from_url(small.url) as client:
        with Producer(small.url, run, settings=SMALL) as producer:
            push_groups(producer, 8, tokens=2000, **columns)
            client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("another", "key")
            with pytest.raises(Busy, match="above its maxmemory"):
                producer.begin_group(2, timeout=0.2)
            producer.finish()
        joined = open_run(Connection(small.url), run)
        queue = TrainerQueue(
            small.url, run, batch_groups=3, chain={"estimator": "gae"}, pushed=["values"], commit="each_batch"
        )
        with working(joined):
            trained = sum(batch.num_trajectories for batch in queue)
        assert trained == 16
        status = read_status(joined)
        assert status.balanced
        assert status.bytes == Bytes(live=0, reserved=0, dead=0, kept=0)
        assert deep_problems(joined) == []


def test_results_wait_for_a_full_server_that_does_not_write(small: EmbeddedServer, run: str) -> None:
    """Neither way to hand them off is open then: with the transaction, or, above maxmemory, inside the script."""
    with redis.Redis.from_url(small.url) as client, Producer(small.url, run, settings=SMALL) as producer:
        push_groups(producer, 1, tokens=10, values=np.zeros(10), token_level_rewards=np.zeros(10))
        joined = open_run(Connection(small.url), run)
        queue = TrainerQueue(
            small.url, run, batch_groups=1, chain={"estimator": "gae"}, pushed=["values"], commit="each_batch"
        )
        group_all(joined)
        with pytest.raises(NoBatchError):  # named now
            queue.next_batch(timeout=0)
        [[entry]] = batches_read(consumer_of(joined, ADVANTAGE))
        computed = compute_safely(joined, prepare(joined, entry), torch.device("cpu"))
        client.config_set("min-replicas-to-write", 1)
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        with pytest.raises(NotNowError, match="NOREPLICAS"):
            publish(joined, computed)
        client.config_set("min-replicas-to-write", 0)
        assert publish(joined, computed)


def test_a_refused_admission_leaves_the_sizes_of_trajectories(small: EmbeddedServer, run: str) -> None:
    """Also the one that would have halved their counts."""
    with redis.Redis.from_url(small.url) as client, Producer(small.url, run, settings=SMALL) as producer:
        push_groups(producer, 1, tokens=10)
        sizes = open_run(Connection(small.url), run).keys.home.sizes
        client.hincrby(sizes, "h24", 5000)
        before = client.hgetall(sizes)
        client.config_set("maxmemory", 1)
        with pytest.raises(Busy, match="above its maxmemory"):
            producer.begin_group(2, timeout=0)
        assert client.hgetall(sizes) == before
        client.config_set("maxmemory", 0)
        producer.begin_group(2)
        assert int(client.hget(sizes, "h24") or 0) == 2500


def test_producers_go_on_when_there_is_room_again(small: EmbeddedServer, run: str) -> None:
    """A push under way waits for the fuse; nothing of it is lost or left behind."""
    with redis.Redis.from_url(small.url) as client, Producer(small.url, run) as producer:
        group = producer.begin_group(2)
        client.config_set("maxmemory", 1)
        pushing = threading.Thread(
            target=lambda: group.push(
                [
                    {"rollout_index": i, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}
                    for i in (0, 1)
                ]
            )
        )
        pushing.start()
        assert not any(key.startswith(b"{") and b"payload" in key for key in client.scan_iter())
        client.config_set("maxmemory", 0)
        pushing.join(30)
        assert not pushing.is_alive()
        status = read_status(open_run(Connection(small.url), run))
        assert status.ledger.pushed == 2
        assert status.duplicates == 0


@contextmanager
def refusing_exec(server: EmbeddedServer) -> Iterator[tuple[str, Callable[[Callable[[], object]], None]]]:
    """A URL, and a way to push by it when the server takes all writes of a transaction and refuses its EXEC.

    A proxy holds EXEC back until the server has no memory left.
    """
    at = urlsplit(server.url)
    assert at.port is not None
    with Proxy(at.hostname or "", at.port) as proxy, redis.Redis.from_url(server.url) as client:

        def push_by(push: Callable[[], object]) -> None:
            proxy.hold(b"*1\r\n$4\r\nEXEC\r\n")
            with threads(lambda stop: push()):
                assert proxy.held.wait(60)
                assert refusals(client, "OOM") == 0  # all writes are queued
                client.config_set("maxmemory", 1)
                proxy.release()
                until(lambda: refusals(client, "EXECABORT"), "a refused EXEC")
                client.config_set("maxmemory", 0)

        yield f"redis://127.0.0.1:{proxy.port}", push_by


MANY = [
    {"rollout_index": index, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}
    for index in range(128)
]


def test_a_push_that_exec_refuses_waits(small: EmbeddedServer, run: str) -> None:
    with refusing_exec(small) as (url, push_by), Producer(url, run, settings=SMALL) as producer:
        group = producer.begin_group(len(MANY))
        push_by(lambda: group.push(MANY))
        assert group.push(MANY).codes == ["duplicate"] * len(MANY)
    joined = open_run(Connection(small.url), run)
    assert read_status(joined).ledger.pushed == len(MANY)
    assert group_all(joined) == ["complete"]
    assert deep_problems(joined) == []


async def test_an_asyncio_push_that_exec_refuses_waits(small: EmbeddedServer, run: str) -> None:
    loop = asyncio.get_running_loop()
    with refusing_exec(small) as (url, push_by):
        async with Producer(url, run, settings=SMALL) as producer:
            group = await producer.begin_group(len(MANY))

            def push() -> None:
                asyncio.run_coroutine_threadsafe(group.push(MANY), loop).result(60)

            await asyncio.to_thread(push_by, push)
            assert (await group.push(MANY)).codes == ["duplicate"] * len(MANY)
    joined = await asyncio.to_thread(open_run, Connection(small.url), run)
    assert read_status(joined).ledger.pushed == len(MANY)
    assert group_all(joined) == ["complete"]
    assert deep_problems(joined) == []
