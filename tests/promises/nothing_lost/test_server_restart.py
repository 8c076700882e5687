"""A server that lost recent writes, or refuses writes for a while: nothing is lost or done twice."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import product
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
from streamadv.producer import Producer, Ticket, logic, requests, resend
from streamadv.producer import producer as producer_module
from streamadv.run import Run
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.store import connection as connection_module
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.keys import ShardKeys
from streamadv.store.retry import NotNowError
from streamadv.store.scripts import ScriptCall, run_transaction, run_transaction_async, script_call
from streamadv.trainer import delivery
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.flows import Flow
from tests.support import (
    OneClient,
    compute_all,
    delivered_batch,
    ends,
    group_all,
    heartbeat,
    join,
    ledger,
    next_batch,
    now_ms,
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


class Heard:
    """What the producers of a run have said since it was asked last, as the list of producers has it."""

    def __init__(self, run: Run) -> None:
        self._scripts, self._key = run.connection.scripts, run.keys.home.producers
        self()

    def __call__(self) -> list[str]:
        said = []
        for name, value in self._scripts.hgetall(self._key).items():
            when, state, instance = value.split(b" ")
            if when != b"1":
                said.append(state.decode())
                self._scripts.hset(self._key, name, b" ".join((b"1", state, instance)))
        return said


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


@pytest.mark.parametrize("by", ["heartbeat", "close"])
def test_a_forked_child_sends_again_what_the_server_forgot(
    forgetful: EmbeddedServer, run: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(logic, "HEARTBEAT_S", 0.05 if by == "heartbeat" else 3600.0)
    (asked, asks), (said, says) = os.pipe(), os.pipe()
    with Producer(forgetful.url, run) as producer:
        if (child := os.fork()) == 0:
            status = 1
            try:
                push_groups(producer, 2)
                os.write(says, b"pushed")
                os.close(asks)
                os.read(asked, 1)  # until its parent has closed it
                if by == "close":
                    producer.close()
                status = 0
            finally:
                os._exit(status)
        os.close(asked)
        os.close(says)
        assert os.read(said, 100) == b"pushed"
        restart(forgetful)
        joined = join(forgetful.url, run)
        if by == "heartbeat":
            until(lambda: ledger(joined)["pushed"] == 4, "what the child had pushed")
        os.close(asks)
        assert os.waitpid(child, 0)[1] == 0
        assert ledger(joined)["pushed"] == 4


def seconds_later(run: Run, group_id: str, other: str) -> float:
    """How much later than the other open group this one will end."""
    one, two = (run.connection.scripts.zscore(run.keys.home.open, name) for name in (group_id, other))
    assert one is not None
    assert two is not None
    return (one - two) / 1000


@pytest.mark.parametrize("way", ["plain", "record", "fail", "cancel", "sent again", "elsewhere"])
def test_a_group_that_the_server_forgot_has_its_own_deadline_again(
    forgetful: EmbeddedServer, run: str, way: str
) -> None:
    with producing(forgetful.url, run, {"group_deadline_s": 3.0}) as producer:
        group = producer.begin_group(2, group_id="long", deadline_s=600)
        ticket = group.tickets[0].to_json()
        if way == "sent again":
            group.push([{"rollout_index": 0, "input_ids": [1], "response_mask": [1], "reward": 1.0}])
        restart(forgetful)
        heartbeat(producer)
        if way == "plain":
            group.push([{"rollout_index": 0, "input_ids": [1], "response_mask": [1], "reward": 1.0}])
        elif way == "record":
            group.push([trajectory("long", 0, 2)])
        elif way == "fail":
            next(iter(group)).fail()
        elif way == "cancel":
            group.cancel(indices=[1])
        elif way == "elsewhere":
            with producing(forgetful.url, run) as other:
                rollout = other.rollout(Ticket.from_json(ticket))
                rollout.push(input_ids=[1], response_mask=[1], reward=1.0)
        producer.begin_group(2, group_id="short")
        assert seconds_later(join(forgetful.url, run), "long", "short") > 500


def test_a_later_deadline_that_the_server_forgot_is_asked_for_again(
    forgetful: EmbeddedServer, run: str
) -> None:
    with producing(forgetful.url, run, {"group_deadline_s": 3.0}) as producer:
        group = producer.begin_group(2, group_id="long")
        group.push([{"rollout_index": 0, "input_ids": [1], "response_mask": [1], "reward": 1.0}])
        assert group.touch(600)
        assert not producer.touch("none", 600)
        restart(forgetful)
        heartbeat(producer)
        producer.begin_group(2, group_id="short")
        assert seconds_later(join(forgetful.url, run), "long", "short") > 500


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
    monkeypatch.setattr(requests, "MAX_SLICE_BYTES", 300_000)
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


def test_a_producer_that_has_finished_is_open_again_until_the_server_has_what_it_lost(
    forgetful: EmbeddedServer, run: str
) -> None:
    """Else the run would end between two groups that are sent again one by one, as pacing admits them."""
    with Producer(forgetful.url, run) as producer:
        push_groups(producer, 3, size=1)
        producer.finish()
        restart(forgetful)
        options: Any = {"batch_groups": 1, "max_staleness": 0, "prefetch": 0, "commit": "each_batch"}
        queue = TrainerQueue(forgetful.url, run, **options).open()
        joined = join(forgetful.url, run)
        for k in range(3):
            heartbeat(producer)
            batch = delivered_batch(queue, joined)
            queue.trained(batch)
            assert k == 2 or not ends(queue), "groups are yet to come"
        heartbeat(producer)
        assert ends(queue)
        assert ledger(joined)["trained"] == 3
        assert problems(joined) == []


def test_a_finished_producer_says_open_before_it_sends_again_to_one_shard(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home shard's server may have kept that it has finished, while that of another shard has lost its pushes."""
    listed: list[str] = []
    transact = producer_module.run_transaction

    def listening(*arguments: Any) -> Any:
        listed.extend(heard())
        return transact(*arguments)

    with producing(redis_url, run, {"shards": 2}) as producer:
        push_groups(producer, 2, size=1)
        producer.finish()
        heard = Heard(join(redis_url, run))
        monkeypatch.setattr(producer_module, "run_transaction", listening)
        heartbeat(producer)
        assert listed == []
        monkeypatch.setattr(producer_module, "server_ids", lambda _, shards: ["another"] * len(shards))
        heartbeat(producer)
        assert listed == ["open"]
        assert heard() == ["finished"]


@pytest.mark.parametrize(
    ("state", "away"),
    [*product(["open", "finished"], ["manifest", "server_id"]), ("open", "withdraw")],
)
def test_a_producer_is_heard_at_home_while_another_shard_is_away(
    redis_url: str, run: str, away: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat comes before what other servers of a cluster have to answer: the manifest's, those of groups."""
    run_script, server_ids = producer_module.run_script, producer_module.server_ids

    def ask(client: Any, call: ScriptCall) -> Any:
        if call.script.name == away:
            raise redis.exceptions.ConnectionError("away")
        return run_script(client, call)

    def ask_ids(connection: Connection, shards: Sequence[ShardKeys]) -> Any:
        if away == "server_id":
            raise redis.exceptions.ConnectionError("away")
        return server_ids(connection, shards)

    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        with closing(producer.groups(1, ahead=1)) as groups:  # the second one is to be withdrawn then
            next(iter(next(groups))).push(input_ids=[1, 2], response_mask=[0, 1], reward=1.0)
        if state == "finished":
            producer.finish()
        heard = Heard(joined)
        monkeypatch.setattr(producer_module, "run_script", ask)
        monkeypatch.setattr(producer_module, "server_ids", ask_ids)
        with pytest.raises(redis.exceptions.ConnectionError):
            producer._drive(producer._logic.heartbeat(), patient=False)
        assert heard() == [state]
        monkeypatch.undo()


def test_a_heartbeat_above_maxmemory_does_not_wait_for_room(tmp_path: Path, run: str) -> None:
    """The server has restarted and may have lost pushes: they are sent again once it takes them."""
    with (
        EmbeddedServer(tmp_path, appendfsync="always") as server,
        redis.Redis.from_url(server.url) as client,
        Producer(server.url, run) as producer,
    ):
        push_groups(producer, 3)
        producer.begin_group(2).cancel(1)
        restart(server)
        client.config_set("maxmemory", 1)
        joined = join(server.url, run)
        beaten = threading.Semaphore(0)

        def beat(stop: threading.Event) -> None:
            for _ in range(2):
                before = now_ms(joined)
                heartbeat(producer)
                [said] = joined.connection.scripts.hvals(joined.keys.home.producers)
                assert int(said.split(b" ")[0]) >= before
                beaten.release()

        try:
            with threads(beat):
                for _ in range(2):
                    assert beaten.acquire(timeout=30), "it waits inside"
        finally:
            client.config_set("maxmemory", 0)
        with pytest.raises(Busy, match="no room yet for groups that the server has lost"):
            producer.begin_group(2, timeout=0)
        heartbeat(producer)
        producer.begin_group(2, timeout=0)
        assert ledger(joined)["pushed"] == 7
        assert problems(joined) == []


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
        TrainerQueue(redis_url, run, batch_groups=2, chain=chain, commit="each_batch").next_batch(timeout=0)
    compute_all(joined)
    keys, scripts = joined.keys.home, joined.connection.scripts
    [(k, _)] = scripts.hgetall(keys.batches).items()
    [batch_id] = scripts.hkeys(keys.applied)
    joined.home.call("unapply_batch", ["99 99-aa", batch_id], unlinked=[])
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
    queue = TrainerQueue(redis_url, run, batch_groups=2, commit="each_batch")
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(joined)
    fetch, failures = delivery.fetch_outputs, iter([error])

    def fails_once(*arguments: Any) -> Any:
        nonlocal server
        for failure in failures:
            server = "second"
            raise failure
        return fetch(*arguments)

    monkeypatch.setattr(delivery, "fetch_outputs", fails_once)
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
        for connection in (packed, OneClient(client)):
            with pytest.raises(NotNowError, match="NOREPLICAS"):
                run_transaction(connection, payloads, call)
        other = AsyncConnection(forgetful.url)
        try:
            with pytest.raises(NotNowError, match="NOREPLICAS"):
                await run_transaction_async(other, payloads, call)
        finally:
            await other.close()


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
