"""Above maxmemory only admission and push are refused; everything else restarts and the pipeline drains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis
import torch

from streamadv.advantage.poison import compute_safely
from streamadv.advantage.prepare import prepare
from streamadv.advantage.publish import publish
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
        queue = TrainerQueue(small.url, run, batch_groups=3, chain={"estimator": "gae"}, pushed=["values"])
        with working(joined):
            trained = sum(batch.num_trajectories for batch in queue)
        assert trained == 16
        status = read_status(joined)
        assert status.balanced
        assert status.bytes == Bytes(live=0, reserved=0, dead=0)
        assert deep_problems(joined) == []


def test_results_wait_for_a_full_server_that_does_not_write(small: EmbeddedServer, run: str) -> None:
    """Neither way to hand them off is open then: with the transaction, or, above maxmemory, inside the script."""
    with redis.Redis.from_url(small.url) as client, Producer(small.url, run, settings=SMALL) as producer:
        push_groups(producer, 1, tokens=10, values=np.zeros(10), token_level_rewards=np.zeros(10))
        joined = open_run(Connection(small.url), run)
        queue = TrainerQueue(small.url, run, batch_groups=1, chain={"estimator": "gae"}, pushed=["values"])
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


def push_until_exec_refuses(
    client: redis.Redis, begin: Callable[[], Any], push: Callable[[Any], list[str]]
) -> None:
    """Look for the room in which the server takes all writes of a push and refuses the transaction as a whole.

    With less it refuses the writes, with more nothing: by EXEC it has also read the script with its references.
    """
    results: list[list[str]] = []

    def try_with(room: int) -> str:
        group = begin()
        whole, parts, pushed = refusals(client, "EXECABORT"), refusals(client, "OOM"), len(results)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + room)
        with threads(lambda stop: results.append(push(group))):
            until(lambda: len(results) > pushed or refusals(client, "EXECABORT") > whole, "refused or pushed")
            refused = "writes" if refusals(client, "OOM") > parts else "EXEC"
            outcome = "nothing" if len(results) > pushed else refused
            client.config_set("maxmemory", 0)
        return outcome

    low, high = 20_000, 400_000
    while high - low > 100 and (outcome := try_with(room := (low + high) // 2)) != "EXEC":
        low, high = (room, high) if outcome == "writes" else (low, room)
    if outcome != "EXEC" and not any(
        try_with(room) == "EXEC" for room in range(low - 6_000, high + 6_000, 400)
    ):
        assert "valkey_version" not in client.info("server"), (
            f"EXEC alone refuses nothing, with {low} bytes or more"
        )
        pytest.skip("this server hardly ever refuses a transaction whose writes it has taken")
    assert {code for codes in results for code in codes} == {"pushed"}


MANY = [
    {"rollout_index": index, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}
    for index in range(128)
]


def test_a_push_that_exec_refuses_waits(small: EmbeddedServer, run: str) -> None:
    with redis.Redis.from_url(small.url) as client, Producer(small.url, run, settings=SMALL) as producer:
        push_until_exec_refuses(
            client, lambda: producer.begin_group(len(MANY)), lambda group: group.push(MANY).codes
        )


def test_an_asyncio_push_that_exec_refuses_waits(small: EmbeddedServer, run: str) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()

        def wait_for(coroutine: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

        async with Producer(small.url, run, settings=SMALL) as producer:
            await asyncio.to_thread(
                push_until_exec_refuses,
                client,
                lambda: wait_for(producer.begin_group(len(MANY))),
                lambda group: wait_for(group.push(MANY)).codes,
            )

    with redis.Redis.from_url(small.url) as client:
        asyncio.run(work())
