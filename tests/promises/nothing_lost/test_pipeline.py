"""All stages together, in threads, on a real server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from streamadv.advantage import compute as computing
from streamadv.advantage import worker
from streamadv.advantage.worker import run_worker
from streamadv.grouping.grouper import run_grouper
from streamadv.producer import Producer
from streamadv.run import Shard
from streamadv.run.run import delete_run
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.microbatch import MicroBatch
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    delivered_batch,
    group_all,
    join,
    ledger,
    make_overdue,
    next_batch,
    problems,
    producing,
    push_groups,
    threads,
    trajectory,
)

CHAINS: list[Any] = ["grpo", {"estimator": "reinforce", "whiten_advantages": True}]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_from_producers_to_the_trainer(redis_url: str, run: str, shards: int, chain: Any) -> None:
    with producing(redis_url, run, {"shards": shards}) as producer:
        stages = [lambda stop: run_grouper(join(redis_url, run), stop, lease_s=1)] * 2
        stages += [lambda stop: run_worker(join(redis_url, run), stop, device="cpu", lease_s=1)] * 2
        joined = join(redis_url, run)
        seen: list[tuple[str, int]] = []
        with threads(*stages):
            pushed = push_groups(producer, 20, 3)
            producer.finish()
            with_queue = TrainerQueue(redis_url, run, batch_groups=6, chain=chain, commit="each_batch")
            for batch in with_queue:
                assert problems(joined, deep=False) == []
                seen += [(line.group_id, line.rollout_index) for line in batch.trajectories()]
                for mb in batch:
                    assert torch.isfinite(mb.advantages).all()
            with_queue.close()
    assert sorted(seen) == [(group_id, index) for group_id in pushed for index in range(3)]
    assert ledger(joined)["trained"] == 60
    assert problems(joined) == []
    left = {key.rpartition(b":")[2] for key in joined.connection.scripts.scan_iter(f"{{{run}:*")}
    assert not {key for key in left if key.startswith((b"payload", b"output"))}
    delete_run(joined.connection, joined.name)
    assert not list(joined.connection.scripts.scan_iter(f"*{run}*"))


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.server
def test_above_maxmemory_the_pipeline_drains(run: str, chain: Any) -> None:
    """Every role can start, and what is stored can be trained on and deleted."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        with Producer(server.url, run) as producer:
            push_groups(producer, 6)
            producer.finish()
        client.config_set("maxmemory", 1)
        joined = join(Connection(server.url), run)
        group_all(joined)
        queue = TrainerQueue(Connection(server.url), run, batch_groups=4, chain=chain, commit="each_batch")
        while next_batch(queue, joined) is not None:
            joined = join(Connection(server.url), run)
        assert ledger(joined)["trained"] == 12
        assert problems(joined) == []


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_every_script_may_be_sent_twice(
    fake: Connection, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply was lost and the client has sent the script again: the caller sees the second reply."""
    original = Shard.call

    def twice(self: Shard, script: str, args: Any = (), **given: Any) -> Any:
        given = {name: value if isinstance(value, str) else list(value) for name, value in given.items()}
        original(self, script, args, **given)
        return original(self, script, args, **given)

    monkeypatch.setattr(Shard, "call", twice)
    with producing(fake, "r", {"shards": 2, "redundancy": 1}) as producer:
        run = join(fake, "r")
        push_groups(producer, 9, 2)
        producer.push([trajectory("open", 0, 2)])
        group_all(run)
        make_overdue(run, "open")
        producer.finish()
        queue = TrainerQueue(fake, "r", batch_groups=4, chain=chain, commit="each_batch")
        seen: list[str] = []
        while (batch := next_batch(queue, run)) is not None:
            assert problems(run) == []
            seen += [reference.group_id for reference in batch.references]
        assert len(seen) == 18
        assert (ledger(run)["trained"], ledger(run)["dropped"]) == (18, {"expired": 1})
        assert problems(run) == []


@pytest.mark.server
def test_a_restart_of_the_server_stops_nobody(tmp_path: Path, run: str) -> None:
    """With appendfsync always nothing is lost and nothing is trained twice."""
    with EmbeddedServer(tmp_path, appendfsync="always") as server:
        url = server.url
        stages = [
            lambda stop: run_grouper(join(url, run), stop, lease_s=1),
            lambda stop: run_worker(join(url, run), stop, device="cpu", lease_s=1),
        ]
        seen: list[tuple[str, int]] = []
        taken = threading.Semaphore(0)

        def train(stop: threading.Event) -> None:
            for batch in TrainerQueue(url, run, batch_groups=3, commit="each_batch"):
                seen.extend((line.group_id, line.rollout_index) for line in batch.trajectories())
                taken.release()

        def produce(stop: threading.Event) -> None:
            with Producer(url, run) as producer:
                for number in range(8):
                    push_groups(producer, 3, prefix=f"p{number}-")
                    if number < 6:
                        taken.acquire(timeout=30)
                producer.finish()

        finished = threading.Event()

        def both(stop: threading.Event) -> None:
            train(stop)
            finished.set()

        with threads(*stages, both, produce):
            for _ in range(2):
                taken.acquire(timeout=30)
                taken.release()
                server.kill()
                server.start()
            assert finished.wait(240)
        joined = join(Connection(url), run)
        assert len(seen) == len(set(seen)) == 48
        assert ledger(joined)["trained"] == 48
        assert problems(joined) == []


def test_a_worker_whose_publisher_fails_ends_with_the_error(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with its queues full."""
    computed = threading.Semaphore(0)
    compute = computing.compute

    def count(*args: Any) -> Any:
        computed.release()
        return compute(*args)

    def fail(*_: Any) -> bool:
        for _ in range(4):
            assert computed.acquire(timeout=30)
        raise ZeroDivisionError("publisher")

    monkeypatch.setattr(computing, "compute", count)
    monkeypatch.setattr(worker, "publish", fail)
    with producing(redis_url, run) as producer:
        push_groups(producer, 6)
        joined = join(redis_url, run)
        group_all(joined)
        queue = TrainerQueue(redis_url, run, batch_groups=1, prefetch=5, commit="each_batch")
        with pytest.raises(Exception, match="no new group"):
            queue.next_batch(timeout=0)
        with pytest.raises(ZeroDivisionError):
            run_worker(joined, threading.Event(), device="cpu")
        queue.close()


def test_a_worker_survives_an_outage_while_it_counts_tries(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch fails once as a whole, and the server is away when its groups are to be tried one by one."""
    compute, call = computing.compute, Shard.call
    broken, away = iter([True]), iter([True])

    def compute_or_fail(*args: Any) -> Any:
        if next(broken, False):
            raise ZeroDivisionError("once")
        return compute(*args)

    def call_or_fail(self: Shard, name: str, *args: Any, **given: Any) -> Any:
        if name == "attempt" and next(away, False):
            raise redis.ConnectionError("away")
        return call(self, name, *args, **given)

    monkeypatch.setattr(computing, "compute", compute_or_fail)
    monkeypatch.setattr(Shard, "call", call_or_fail)
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        joined = join(redis_url, run)
        group_all(joined)
        with threads(lambda stop: run_worker(join(redis_url, run), stop, device="cpu", lease_s=0.2)):
            queue = TrainerQueue(redis_url, run, batch_groups=2, commit="each_batch")
            batch = queue.next_batch(timeout=30)
            assert batch is not None
            assert (batch.num_trajectories, next(away, None)) == (4, None)
            queue.close()


def test_a_late_supplier_sees_every_token_once(redis_url: str, run: str) -> None:
    asked: list[int] = []

    def values(mb: MicroBatch) -> torch.Tensor:
        asked.extend(mb.input_ids.tolist())
        return torch.zeros(len(mb.input_ids))

    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        joined = join(redis_url, run)
        options = {"chain": {"estimator": "gae"}, "late": {"values": values}, "batch_groups": 2}
        batch = delivered_batch(
            TrainerQueue(joined.connection, run, tokens_per_micro_batch=5, **options), joined
        )
    assert sorted(asked) == sorted(token for mb in batch for token in mb.input_ids.tolist())
