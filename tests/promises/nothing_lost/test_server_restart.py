"""A server that lost recent writes, or refuses writes for a while: nothing is lost or done twice."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from streamadv import metrics
from streamadv.errors import (
    BatchLostError,
    Busy,
    NoBatchError,
    ServerUnreachableError,
    StreamadvError,
    UndecodableGroupError,
)
from streamadv.producer import Producer, encode, resend
from streamadv.run import Run
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.store import connection as connection_module
from streamadv.store.calls import run_transaction, run_transaction_async
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.keys import ShardKeys
from streamadv.store.retry import NotNowError
from streamadv.store.scripts import script_call
from streamadv.trainer import delivery
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.flows import Flow
from tests.support import (
    compute_all,
    delivered_batch,
    group_all,
    heartbeat,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    pushed_run,
    threads,
    trajectory,
)

pytestmark = pytest.mark.server


def restart(server: EmbeddedServer) -> None:
    server.kill()
    server.start()


def test_a_producer_sends_again_what_the_server_forgot(forgetful: EmbeddedServer, run: str) -> None:
    with Producer(forgetful.url, run) as producer:
        push_groups(producer, 3)
        group = producer.begin_group(2, group_id="half")
        group.push([{"rollout_index": 0, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}])
        group.cancel(1)
        restart(forgetful)
        producer.finish()
        joined = join(forgetful.url, run)
        assert ledger(joined)["pushed"] == 8
        assert group_all(joined) == ["complete"] * 3 + ["incomplete"]
        assert problems(joined) == []


def test_a_producer_sends_nothing_again_to_the_same_server(forgetful: EmbeddedServer, run: str) -> None:
    with Producer(forgetful.url, run) as producer:
        push_groups(producer, 2)
        producer.finish()
        assert producer.push([trajectory("g0000")]).codes == ["duplicate"]
        producer.finish()
    assert ledger(join(forgetful.url, run))["pushed"] == 4


def test_without_a_window_nothing_is_sent_again(forgetful: EmbeddedServer, run: str) -> None:
    with Producer(forgetful.url, run, resend_window=0) as producer:
        push_groups(producer, 2)
        restart(forgetful)
        producer.finish()
    assert ledger(join(forgetful.url, run))["pushed"] == 0


@pytest.mark.parametrize("forgotten", ["naming", "results", "trained", "commit"])
@pytest.mark.parametrize("mode", ["each_batch", "manual"])
@pytest.mark.slow
def test_a_trainer_goes_on_from_an_earlier_state_of_the_server(
    tmp_path: Path, run: str, forgotten: str, mode: str
) -> None:
    """The server loses `forgotten` and what followed; every group is trained once all the same."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    seen: list[str] = []

    def snapshot(moment: str) -> None:
        if moment == forgotten:
            shutil.copytree(data, copy)

    with EmbeddedServer(data, appendfsync="always") as server:
        connection = Connection(server.url)
        with Producer(server.url, run, settings=RunSettings(group_deadline_s=600)) as producer:
            push_groups(producer, 4)
            producer.finish()
        joined = join(connection, run)
        group_all(joined)
        queue = TrainerQueue(connection, run, batch_groups=2, commit=mode, prefetch=0)  # type: ignore[arg-type]

        def train() -> bool:
            batch = next_batch(queue, joined)
            if batch is None:
                return False
            seen.extend(sorted({reference.group_id for reference in batch.references}))
            if forgotten == "trained":
                snapshot("trained")
            queue.trained(batch)
            return True

        snapshot("naming")
        if forgotten == "results":
            with pytest.raises(Exception, match="no new group"):
                queue.next_batch(timeout=0)
            snapshot("results")
        assert train()
        snapshot("commit")
        queue.commit(queue.state_dict())
        server.kill()
        shutil.rmtree(data)
        copy.rename(data)
        server.start()
        while train():
            pass
        queue.commit(queue.state_dict())
        assert seen == ["g0000", "g0001", "g0002", "g0003"]
        assert ledger(joined)["trained"] == 8
        assert problems(joined) == []
        queue.close()


def test_what_is_kept_to_be_sent_again_is_bounded_at_every_push(
    forgetful: EmbeddedServer, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the rate between two heartbeats; that the bound shortens the window is said once."""
    monkeypatch.setattr(resend, "MAX_RESEND_BYTES", 100_000)
    with Producer(forgetful.url, run) as producer:
        push_groups(producer, 20, size=1, tokens=2000)  # 18 kB each, with their log-probs
        restart(forgetful)
        producer.finish()
        assert 1 <= ledger(join(forgetful.url, run))["pushed"] <= 5
    told = [record.getMessage() for record in caplog.records if "resend_window" in record.getMessage()]
    assert len(told) == 1, told


def test_what_is_kept_of_one_push_is_bounded_too(
    forgetful: EmbeddedServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that it takes are kept one by one, the last ones of them."""
    monkeypatch.setattr(resend, "MAX_RESEND_BYTES", 1_000_000)
    monkeypatch.setattr(encode, "MAX_SLICE_BYTES", 300_000)
    with Producer(forgetful.url, run) as producer:
        push_groups(producer, 1, size=20, tokens=20_000)  # 260 kB each
        restart(forgetful)
        producer.finish()
        assert 1 <= ledger(join(forgetful.url, run))["pushed"] <= 5


def test_what_the_server_forgot_goes_before_new_groups(forgetful: EmbeddedServer, run: str) -> None:
    # Room to begin one group of two at a time in each shard.
    settings = RunSettings(shards=2, max_trajectory_bytes=1 << 19, max_bytes=2 * (3 << 19))
    with Producer(forgetful.url, run, settings=settings) as producer:
        [lost] = push_groups(producer, 1)
        restart(forgetful)
        with Producer(forgetful.url, run, settings=settings) as other:
            shard_of = join(forgetful.url, run).keys.shard_of
            ids = [f"new{number}" for number in range(100)]
            new, newer, *_ = (each for each in ids if shard_of(each) == shard_of(lost))
            others = other.begin_group(2, group_id=new)
            heartbeat(producer)
            with pytest.raises(Busy, match="no room yet for groups that the server has lost"):
                producer.begin_group(2, group_id=newer, timeout=0.1)
            with pytest.raises(Busy, match="no room yet for groups that the server has lost"):
                producer.push([trajectory(newer, 0, 2)])
            assert len(producer.begin_group(2, timeout=10)) == 2  # lands in the shard with room
            assert len(producer.begin_group(2, group_id=new)) == 2  # is open already
            assert producer.push([trajectory(new, 0, 2)]).codes == ["pushed"]
            others.cancel(1)
            joined = join(forgetful.url, run)
            group_all(joined)
            heartbeat(producer)  # there is room: what was lost is sent
            producer.begin_group(2, group_id=newer, timeout=30)
        assert ledger(joined)["pushed"] == 4
        assert set(group_all(joined)) == {"complete"}
        assert problems(joined) == []


def test_a_cancellation_that_the_server_forgot_waits_for_room(forgetful: EmbeddedServer, run: str) -> None:
    settings = RunSettings(batch_groups=1, max_staleness=0)  # one group at a time
    with Producer(forgetful.url, run, settings=settings) as producer:
        producer.begin_group(2, group_id="g").cancel(1)
        restart(forgetful)
        with Producer(forgetful.url, run, settings=settings) as other:
            others = other.begin_group(2, group_id="h")
            heartbeat(producer)
            assert ledger(join(forgetful.url, run))["pushed"] == 0
            others.cancel(2)
            group_all(join(forgetful.url, run))
            heartbeat(producer)
            group_all(join(forgetful.url, run))
        assert ledger(join(forgetful.url, run))["dropped"] == {"cancelled": 3}


def test_a_trainer_that_settled_on_a_server_that_is_not_the_one(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a failover its connections may lead to two of them for a moment, and it asked the other one who it is."""
    name = "the old one"
    monkeypatch.setattr(Run, "server_ids_with", lambda _, pipe: ([name], pipe.execute()))
    with redis.Redis.from_url(redis_url) as client, producing(redis_url, run) as producer:

        def snapshot() -> dict[bytes, bytes]:
            return {key: client.dump(key) for key in client.keys("*")}

        def go_on_from(kept: dict[bytes, bytes]) -> None:
            client.flushdb()
            for key, value in kept.items():
                client.restore(key, 0, value)

        push_groups(producer, 4)
        joined = join(redis_url, run)
        group_all(joined)
        unnamed = snapshot()
        queue = TrainerQueue(redis_url, run, batch_groups=2, commit="manual")
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        compute_all(joined)
        computed = snapshot()
        go_on_from(unnamed)
        name = "the new one"
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)  # batch 0 is named again, on a server about to go
        go_on_from(computed)
        batches = [next_batch(queue, joined) for _ in range(2)]
        assert [batch.num_trajectories for batch in batches if batch] == [4, 4]
        for batch in batches:
            assert batch is not None
            queue.trained(batch)
        queue.commit(queue.state_dict())
        assert ledger(joined)["trained"] == 8
        assert read_status(joined).malformed == 0
        assert problems(joined) == []
        queue.close()


def test_results_that_come_too_late_are_deleted(redis_url: str, run: str) -> None:
    """Published between the look at the results log and the end of a batch that is committed or undone."""
    chain = {"estimator": "reinforce", "gamma": 0.9}  # has columns of its own
    joined = pushed_run(redis_url, run, 2)
    group_all(joined)
    with pytest.raises(NoBatchError):
        TrainerQueue(redis_url, run, batch_groups=2, chain=chain).next_batch(timeout=0)
    compute_all(joined)
    keys, scripts = joined.keys.home, joined.connection.scripts
    [(k, _)] = scripts.hgetall(keys.batches).items()
    [batch_id] = scripts.hkeys(keys.applied)
    joined.home.call("unapply_batch", [99, batch_id], unlinked=[])
    scripts.hdel(keys.batches, k)
    queue = TrainerQueue(redis_url, run, batch_groups=2, chain=chain, commit="manual")
    batch = delivered_batch(queue, joined)
    queue.trained(batch)
    queue.commit(queue.state_dict())
    queue.close()
    status = read_status(joined)
    assert (status.ledger.trained, status.malformed, status.bytes.live) == (4, 0, 0)
    assert problems(joined) == []


def test_batches_behind_one_that_is_lost_are_still_trained(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may be left for the lost one, and there is no batch 1 without a batch 0."""
    server = "first"
    monkeypatch.setattr(Run, "server_ids_with", lambda _, pipe: ([server], pipe.execute()))
    joined = pushed_run(redis_url, run, 4, finish=True)
    group_all(joined)
    queue = TrainerQueue(redis_url, run, batch_groups=2, prefetch=1, commit="manual")
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    keys = joined.keys.home
    scripts = joined.connection.scripts
    lost: list[bytes] = [entry for entry, _ in scripts.xrange(keys.groups, count=2)]
    scripts.xdel(keys.groups, *lost)
    server = "second"
    batch = delivered_batch(queue, joined)
    assert (batch.version, batch.num_trajectories) == (0, 4)
    assert next_batch(queue, joined) is None
    queue.close()


@pytest.mark.parametrize(
    "error", [BatchLostError("a group is gone"), UndecodableGroupError({("g0000", 0): "payload is gone"})]
)
def test_a_server_replaced_in_the_middle_of_a_delivery_is_no_fault_of_the_data(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, error: StreamadvError
) -> None:
    """What it misses for a moment is neither a dead letter nor a lost batch; without a new server it is both."""
    server = "first"
    monkeypatch.setattr(Run, "server_ids_with", lambda _, pipe: ([server], pipe.execute()))
    joined = pushed_run(redis_url, run, 2)
    group_all(joined)
    queue = TrainerQueue(redis_url, run, batch_groups=2)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(joined)
    fetch, failures = delivery.fetch, iter([error])

    def fails_once(*arguments: Any) -> Any:
        nonlocal server
        for failure in failures:
            server = "second"
            raise failure
        return fetch(*arguments)

    monkeypatch.setattr(delivery, "fetch", fails_once)
    batch = queue.next_batch(timeout=30)
    assert batch is not None
    assert batch.num_trajectories == 4
    assert ledger(joined)["dead"] == {}
    queue.close()


def test_writes_that_are_refused_for_a_while_are_waited_for(forgetful: EmbeddedServer, run: str) -> None:
    """As with too few replicas. Producers and trainer meet it if they have something to write at that moment."""
    flow = Flow(forgetful.url, run, shards=1)
    with Connection(forgetful.url) as connection, flow.going():
        flow.progress()
        connection.scripts.config_set("min-replicas-to-write", 1)
        try:
            until(lambda: {"judge", "grouper", "advantage"} <= refused_stages(), "all are refused")
        finally:
            connection.scripts.config_set("min-replicas-to-write", 0)
        flow.progress()
    flow.check()


async def test_a_push_that_is_refused_for_a_while_is_an_outage(forgetful: EmbeddedServer) -> None:
    """Whichever client of redis-py sends it: each tells of an error inside MULTI in words of its own."""
    payloads, call = [("payload", {"column": b"x"})], script_call("server_id", ShardKeys("r:0:0"))
    with Connection(forgetful.url) as packed, redis.Redis.from_url(forgetful.url) as client:
        packed.scripts.config_set("min-replicas-to-write", 1)
        for connection in (packed, Connection.from_client(client)):
            with pytest.raises(NotNowError, match="NOREPLICAS"):
                run_transaction(connection, payloads, call)
        async with AsyncConnection(forgetful.url) as other:
            with pytest.raises(NotNowError, match="NOREPLICAS"):
                await run_transaction_async(other, payloads, call)


@pytest.mark.slow
def test_a_script_of_somebody_that_runs_long_is_waited_for(
    forgetful: EmbeddedServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers BUSY to every role then, also to one that starts."""
    monkeypatch.setattr(connection_module, "BLOCK_MARGIN", 0.2)  # a read that blocks already gets no answer
    flow = Flow(forgetful.url, run, shards=1)
    with Connection(forgetful.url) as connection, flow.going():
        flow.progress()
        connection.scripts.config_set("busy-reply-threshold", 10)

        def script(stop: threading.Event) -> None:
            with suppress(redis.exceptions.RedisError), redis.Redis.from_url(forgetful.url) as client:
                client.eval("while true do redis.call('TIME') end", 0)

        def newcomer(stop: threading.Event) -> None:
            with Producer(forgetful.url, run, settings=flow.settings) as late:
                assert late.score("none", 0, 1.0) == "unknown"

        stages = {"judge", "grouper", "advantage", "producer", "trainer"}
        with threads(script):
            try:
                flow._until(lambda: "grouper" in refused_stages("busy"), "the script runs")
                with pytest.raises(ServerUnreachableError, match="BUSY"), Connection(forgetful.url) as once:
                    once.wait_until_ready(0.1)
                with threads(newcomer):
                    flow._until(lambda: stages <= refused_stages("busy"), f"{stages} are told BUSY")
                    connection.scripts.script_kill()
            finally:
                with suppress(redis.exceptions.ResponseError):
                    connection.scripts.script_kill()
        flow.progress()
    flow.check()


def refused_stages(reason: str = "noreplicas") -> set[str]:
    """Stages that have been told so."""
    samples = [sample for family in metrics.REGISTRY.collect() for sample in family.samples]
    counts = [s for s in samples if s.name == "streamadv_connection_errors_total" and s.value]
    return {s.labels["stage"] for s in counts if s.labels["reason"] == reason}
