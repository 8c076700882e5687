"""Producers against a real server: waiting for admission, the asyncio twin, a server that goes away."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import streamadv
from streamadv import doors
from streamadv.errors import Busy, ManifestMismatchError, ProducerClosedError
from streamadv.producer import Producer, Ticket, logic
from streamadv.producer import producer as producer_module
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import refusals, until
from tests.support import (
    OneClient,
    delivered_batch,
    ends,
    group_all,
    has_been_asked,
    holding,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    threads,
    trajectory,
)

MB = 1 << 20


@pytest.mark.processes
def test_a_producer_never_imports_torch() -> None:
    code = (
        "import sys, streamadv; streamadv.Producer, streamadv.Trajectory, streamadv.Ticket; "
        "streamadv.AsyncProducer; assert 'torch' not in sys.modules"
    )
    folder = Path(streamadv.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


def test_a_producer_waits_for_room(redis_url: str, run: str) -> None:
    limits = {"max_bytes": 4 * MB, "max_trajectory_bytes": 2 * MB}
    with producing(redis_url, run, limits) as producer:
        joined = join(redis_url, run)
        first = producer.begin_group(2)
        with pytest.raises(Busy, match=r"not admitted after 0\.01 s"):
            producer.begin_group(1, timeout=0.01)
        admitted = threading.Event()

        def wait(stop: threading.Event) -> None:
            producer.begin_group(2, group_id="next")
            admitted.set()

        with threads(wait):
            assert not admitted.wait(0.1)
            first.cancel(2)
            group_all(joined)
            assert admitted.wait(120)
    assert problems(joined) == []


def test_many_producers_push_the_same_file(redis_url: str, run: str) -> None:
    items = [[trajectory(f"g{number}", index, 3) for index in range(3)] for number in range(30)]
    codes: list[str] = []

    def push(stop: threading.Event) -> None:
        with Producer(redis_url, run) as producer:
            for members in items:
                codes.extend(producer.push(members).codes)

    with threads(push, push, push):
        pass
    joined = join(redis_url, run)
    assert (codes.count("pushed"), codes.count("duplicate")) == (90, 180)
    group_all(joined)
    assert ledger(joined) | {"pushed": 90, "queued": 90} == ledger(joined)
    assert problems(joined) == []


async def test_the_asyncio_twin(redis_url: str, run: str) -> None:
    settings = RunSettings(partial_min_usable=1)
    async with Producer(redis_url, run, settings=settings) as producer:

        async def play(rollout: Any) -> None:
            async with rollout:
                if rollout.rollout_index == 1:
                    raise RuntimeError("the environment broke")
                await rollout.push(input_ids=[1, 2], response_mask=[0, 1], reward=rollout.rollout_index)

        async with producer.group(size=4, data_source="math") as group:
            rollouts = list(group)
            results = await asyncio.gather(*map(play, rollouts[:3]), return_exceptions=True)
            assert [type(result) for result in results] == [type(None), RuntimeError, type(None)]
        assert await producer.model_version() is None
        assert await producer.score("other", 0, 1.0) == "unknown"
        assert (await producer.push([trajectory("h", 0)])).codes == ["pushed"]
        assert await producer.touch("h", 10_000)
        again = await producer.begin_group(2, group_id="h")
        assert (await again.cancel(1)).codes == ["pushed"]
        await producer.finish()
    joined = join(redis_url, run)
    assert sorted(group_all(joined)) == ["partial", "partial"]
    assert ledger(joined)["dropped"] == {"cancelled": 1, "failed": 2}
    assert problems(joined) == []


@pytest.mark.parametrize("turns", range(12))
async def test_closing_ends_the_heartbeat_at_any_moment(
    redis_url: str, run: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Python's wait_for, inside redis-py, drops the cancellation as its reply has just come."""
    monkeypatch.setattr(logic, "HEARTBEAT_S", 0)
    producer = await Producer(redis_url, run).__aenter__()
    for _ in range(turns):
        await asyncio.sleep(0)
    closing = asyncio.create_task(producer.close())
    done, _ = await asyncio.wait({closing}, timeout=10)
    monkeypatch.setattr(logic, "HEARTBEAT_S", 3600)  # where it does not end: lets it be cancelled
    assert done


@pytest.mark.server
def test_a_push_survives_a_restart_of_the_server(tmp_path: Path, run: str) -> None:
    server = EmbeddedServer(tmp_path)
    with server:
        with Producer(server.url, run) as producer:
            push_groups(producer, 3)
            server.kill()  # with the last second of pushes: they are sent again

            def push(stop: threading.Event) -> None:
                push_groups(producer, 3, prefix="after")

            with threads(push):
                server.start()
            producer.finish()
        joined = join(Connection(server.url), run)
        group_all(joined)
        found = ledger(joined)
        assert found["pushed"] == found["queued"] == 12
        assert problems(joined) == []


@pytest.mark.server
def test_a_push_above_maxmemory_waits_and_leaves_nothing_behind(tmp_path: Path, run: str) -> None:
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        with Producer(server.url, run) as producer:
            push_groups(producer, 1, 1)
            client.config_set("maxmemory", 1)
            pushed = threading.Event()

            def push(stop: threading.Event) -> None:
                push_groups(producer, 1, 1, prefix="more")
                pushed.set()

            with threads(push):
                assert not pushed.wait(0.3)
                client.config_set("maxmemory", 0)
                assert pushed.wait(120)
        joined = join(Connection(server.url), run)
        assert ledger(joined)["pushed"] == 2
        assert problems(joined) == []


@pytest.mark.parametrize("last_words", ["close", "finish"])
def test_a_producer_that_closes_late_does_not_speak_for_its_successor(
    redis_url: str, run: str, last_words: str
) -> None:
    """A restarted process of one name, while the old one still winds up."""
    with producing(redis_url, run) as other:
        other.finish()
    queue = TrainerQueue(redis_url, run, batch_groups=1, commit="each_batch")
    old = Producer(redis_url, run, name="rollouts-0").open()
    with Producer(redis_url, run, name="rollouts-0") as new:
        if last_words == "finish":
            old.finish()
        old.close()
        assert not ends(queue)
        push_groups(new, 1)
        new.finish()
    group_all(join(redis_url, run))
    assert not ends(queue), "the last group is yet to be named"


def test_the_name_of_a_producer_that_has_gone_is_free(redis_url: str, run: str) -> None:
    queue = TrainerQueue(redis_url, run, batch_groups=1, commit="each_batch")
    for _ in range(2):
        with Producer(redis_url, run, name="rollouts-0") as producer:
            assert not ends(queue)
            producer.finish()
            assert ends(queue)


@pytest.mark.parametrize("last_words", ["close", "finish", "collect"])
def test_a_forked_child_does_not_speak_for_its_parent(redis_url: str, run: str, last_words: str) -> None:
    with producing(redis_url, run) as other:
        other.finish()
    queue = TrainerQueue(redis_url, run, batch_groups=1, commit="each_batch")
    with Producer(redis_url, run) as producer:
        if (child := os.fork()) == 0:
            status = 1
            try:
                assert push_groups(producer, 1) == ["g0000"]
                if last_words == "finish":
                    producer.finish()
                if last_words != "collect":
                    producer.close()
                del producer
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        group_all(join(redis_url, run))
        assert next_batch(queue, join(redis_url, run)) is not None
        assert not ends(queue)
        push_groups(producer, 1, prefix="more")


def test_a_forked_child_finds_no_lock_held(redis_url: str, run: str) -> None:
    """Another thread of its parent may be anywhere in a call while it forks."""
    with Producer(redis_url, run) as producer:
        push_groups(producer, 1)
        locks = [lock for lock in doors._renewed if hasattr(lock, "acquire")]

        def hold_all(stop: threading.Event) -> None:
            for lock in locks:
                lock.acquire()
            held.set()
            stop.wait()
            for lock in locks:
                lock.release()

        held = threading.Event()
        with threads(hold_all):
            held.wait()
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)
                status = 1
                try:
                    assert push_groups(producer, 1, prefix="child") == ["child0000"]
                    producer.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0


def test_threads_that_begin_at_once_in_a_forked_child_start_one_heartbeat(fake: Connection) -> None:
    def start_rollouts() -> int:
        others: list[threading.Thread] = []
        start = producer._start_heart

        def start_heart() -> None:
            """Another thread starts its rollout meanwhile; it waits if it is to wait."""
            if not others:
                others.append(threading.Thread(target=rollouts[1]._start))
                others[0].start()
                others[0].join(0.2)
            start()

        producer._start_heart = start_heart  # type: ignore[method-assign]
        rollouts[0]._start()
        others[0].join(60)
        return sum(thread.name == "streamadv-heartbeat" for thread in threading.enumerate())

    with producing(fake, "r") as producer:
        rollouts = list(producer.begin_group(2))
        if (child := os.fork()) == 0:
            status = 100
            try:
                status = start_rollouts()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_producer_that_is_opened_in_a_forked_child_is_on_the_list(redis_url: str, run: str) -> None:
    producer, (said, says) = Producer(redis_url, run), os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            with producer:
                os.write(says, b"opened" if read_status(join(redis_url, run)).producers else b"missing")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(said, 100) == b"opened"
    assert read_status(join(redis_url, run)).producers == []


def test_a_forked_child_learns_what_its_parent_does(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no word on the list of producers, also not once its parent has left that."""
    monkeypatch.setattr(logic, "HEARTBEAT_S", 0.05)
    queue, joined = TrainerQueue(redis_url, run, batch_groups=1), join(redis_url, run)
    said, says = os.pipe()

    def play(producer: Producer, ticket: Ticket) -> None:
        os.write(says, producer.wait_for_weights().uri.encode())
        rollout = producer.rollout(ticket)

        def version() -> int | None:
            with rollout:
                return rollout.model_version

        until(lambda: version() == 1, "the version of the new weights")
        assert producer.weights == (1, "file:///1")
        os.write(says, b"version 1")
        until(lambda: rollout.cancelled, "the end of the run")
        producer.finish()

    with Producer(redis_url, run) as producer:
        push_groups(producer, 1)
        ticket = producer.begin_group(1).tickets[0]
        if (child := os.fork()) == 0:
            status = 1
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)  # else a child that learns nothing would stay
            try:
                play(producer, ticket)
                status = 0
            finally:
                os._exit(status)
        os.close(says)
        queue.open(weights="file:///0")
        assert os.read(said, 100) == b"file:///0"
        queue.trained(delivered_batch(queue, joined), weights="file:///1")
        assert os.read(said, 100) == b"version 1"
        producer.close()
        queue.finish()
        assert os.waitpid(child, 0)[1] == 0
    assert read_status(joined).producers == []
    queue.close()


@pytest.mark.parametrize("way", ["cancel", "leave"])
def test_ending_many_rollouts_is_linear_and_keeps_nobody_waiting(
    server: EmbeddedServer, redis_url: str, run: str, way: str
) -> None:
    count = 4096
    with (
        producing(redis_url, run, {"max_trajectory_bytes": 1024}) as producer,
        redis.Redis.from_url(redis_url) as client,
    ):
        with producer.group(count) as group:
            client.config_resetstat()
            if way == "cancel":
                assert group.cancel(count).indices == list(reversed(range(count)))
        calls: Any = client.info("commandstats")
        assert calls["cmdstat_xadd"]["calls"] <= count / 32
        assert sum(calls.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval")) >= 32
    joined = join(redis_url, run)
    assert group_all(joined) == ["incomplete"]
    assert problems(joined) == []


COLUMNS: dict[str, Any] = {"input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}


def connections_of(client: redis.Redis) -> set[str]:
    """Ids of the connections to the server besides this one."""
    return {each["id"] for each in client.client_list()} - {str(client.client_id())}


def scripts_run(client: redis.Redis) -> int:
    """How many scripts were called."""
    calls: Any = client.info("commandstats")
    return int(calls["cmdstat_evalsha"]["calls"])


def open_groups(client: redis.Redis, run: str) -> int:
    """What groupers leave open."""
    joined = join(OneClient(client), run)
    group_all(joined)
    return int(client.zcard(joined.keys.home.open))


async def test_a_producer_that_cannot_be_opened_is_disconnected(
    redis_url: str, run: str, producer: Producer
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        before = connections_of(client)
        other = Producer(redis_url, run, settings=RunSettings(shards=2))
        with pytest.raises(ManifestMismatchError) as blocking:
            other.open()
        with pytest.raises(ManifestMismatchError) as waiting:
            await other.__aenter__()
        await asyncio.to_thread(until, lambda: connections_of(client) <= before, "disconnected")
        assert blocking.value.args == waiting.value.args  # which keep what has raised them


@pytest.mark.server
def test_closing_ends_who_waits_and_what_comes_later(run: str) -> None:
    """For admission, for memory, for a server that is away: 12 threads, then every kind of call."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        settings = RunSettings(max_bytes=2 * MB, max_trajectory_bytes=MB)
        producer = Producer(server.url, run, settings=settings).open()
        group = producer.begin_group(2)
        first, second = group
        waiting = threading.Semaphore(0)

        def wait(stop: threading.Event) -> None:
            waiting.release()
            with pytest.raises(ProducerClosedError, match=r"producer .* is closed"):
                producer.begin_group(1)

        def push(stop: threading.Event) -> None:
            waiting.release()
            with pytest.raises(ProducerClosedError, match=r"producer .* is closed"):
                first.push(**COLUMNS)

        client.config_set("maxmemory", 1)
        with threads(*[wait] * 11, push):
            for _ in range(12):
                waiting.acquire()
            until(lambda: refusals(client, "OOM") and scripts_run(client) > 30, "all wait")
            producer.close()
        client.config_set("maxmemory", 0)
        assert not connections_of(client)
        for call in (
            producer.open,
            lambda: producer.begin_group(1),
            lambda: producer.push([trajectory("x", 0)]),
            lambda: producer.score("x", 0, 1.0),
            lambda: producer.touch("x"),
            producer.model_version,
            producer.finish,
            lambda: group.cancel(1),
            lambda: group.touch(10),
            lambda: second.push(**COLUMNS),
            second.fail,
            lambda: group.run(lambda rollout: rollout.push(**COLUMNS)),
        ):
            with pytest.raises(ProducerClosedError):
                call()
        producer.close()
        assert not connections_of(client)


@pytest.mark.server
async def test_closing_ends_the_tasks_that_wait(run: str) -> None:
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        settings = RunSettings(max_bytes=2 * MB, max_trajectory_bytes=MB)
        producer = await Producer(server.url, run, settings=settings).__aenter__()
        group = await producer.begin_group(2)
        first, second = group
        client.config_set("maxmemory", 1)
        calls: list[Any] = [asyncio.ensure_future(producer.begin_group(1)) for _ in range(40)]
        calls.append(asyncio.ensure_future(first.push(**COLUMNS)))
        await asyncio.to_thread(
            until, lambda: refusals(client, "OOM") and scripts_run(client) > 80, "all wait"
        )
        await producer.close()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
        assert {type(result) for result in results} == {ProducerClosedError}
        client.config_set("maxmemory", 0)
        for call in (
            producer.begin_group(1),
            producer.model_version(),
            producer.finish(),
            second.fail(),
            group.cancel(1),
        ):
            with pytest.raises(ProducerClosedError):
                await call
        await asyncio.to_thread(until, lambda: not connections_of(client), "disconnected")


async def test_a_close_that_is_cancelled_disconnects(redis_url: str, run: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        before = connections_of(client)
        producer = await Producer(redis_url, run).__aenter__()
        with holding(client):
            closing = asyncio.create_task(producer.close())
            await asyncio.to_thread(until, lambda: has_been_asked(client), "it says goodbye")
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        await asyncio.to_thread(until, lambda: connections_of(client) <= before, "disconnected")


def test_a_close_that_is_interrupted_disconnects(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "LEAVE_S", 300.0)  # however late the interrupt comes
    with redis.Redis.from_url(redis_url) as client:
        before = connections_of(client)
        producer = Producer(redis_url, run).open()

        def interrupt(stop: threading.Event) -> None:
            until(lambda: has_been_asked(client), "it says goodbye")
            os.kill(os.getpid(), signal.SIGINT)

        with holding(client), pytest.raises(KeyboardInterrupt), threads(interrupt):
            producer.close()
        until(lambda: connections_of(client) <= before, "disconnected")


@pytest.mark.parametrize("group_id", [None, "mine"])
async def test_a_group_whose_begin_was_cancelled_is_not_open(
    redis_url: str, run: str, group_id: str | None
) -> None:
    """The server opens it while nobody waits for the answer any more; the same call again begins it."""
    async with Producer(redis_url, run) as producer:
        with redis.Redis.from_url(redis_url) as client:
            for is_held in (False, True, True):
                begin = asyncio.create_task(producer.begin_group(2, group_id=group_id))
                await asyncio.sleep(0)
                with holding(client) if is_held else nullcontext():
                    if is_held:
                        await asyncio.to_thread(until, lambda: has_been_asked(client), "it has asked")
                    begin.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await begin
                await asyncio.to_thread(
                    until, lambda: open_groups(client, run) == 0, "the group is withdrawn"
                )
            group = await producer.begin_group(2, group_id=group_id)
            assert open_groups(client, run) == 1
            assert (await group.cancel(2)).codes == ["pushed"] * 2
    joined = join(redis_url, run)
    group_all(joined)
    assert problems(joined) == []


async def test_a_cancelled_begin_leaves_the_tickets_of_others(redis_url: str, run: str) -> None:
    async with Producer(redis_url, run) as producer, Producer(redis_url, run) as other:
        with redis.Redis.from_url(redis_url) as client:
            group = await other.begin_group(2, group_id="shared")
            with holding(client), pytest.raises(TimeoutError):
                await asyncio.wait_for(producer.begin_group(2, group_id="shared"), 0.02)
            await producer.begin_group(1)  # behind what the cancelled call has left
            assert [await rollout.push(**COLUMNS) for rollout in group] == ["pushed"] * 2


async def test_groups_that_a_cancelled_iteration_has_asked_for_are_not_open_after_the_close(
    redis_url: str, run: str
) -> None:
    """The server opens them while the producer leaves."""
    with redis.Redis.from_url(redis_url) as client:
        producer = await Producer(redis_url, run).__aenter__()
        groups = producer.groups(1, ahead=3)
        with holding(client):
            iteration = asyncio.ensure_future(anext(groups))
            await asyncio.to_thread(until, lambda: has_been_asked(client), "it has asked")
            iteration.cancel()
            closing = asyncio.create_task(producer.close())
            for _ in range(50):  # until it says goodbye
                await asyncio.sleep(0)
        await closing
        assert open_groups(client, run) == 0
    assert problems(join(redis_url, run)) == []


def test_a_group_whose_begin_was_under_way_at_the_close_is_not_open(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "CLOSE_S", 60.0)
    held = threading.Event()
    with redis.Redis.from_url(redis_url) as client:
        producer = Producer(redis_url, run).open()

        def begin(stop: threading.Event) -> None:
            held.wait(30)
            with pytest.raises(ProducerClosedError):
                producer.begin_group(2)

        def close(stop: threading.Event) -> None:
            until(lambda: held.is_set() and has_been_asked(client), "it has asked")
            producer.close()

        with threads(begin, close), holding(client):
            held.set()
            until(lambda: producer._logic.membership.closed, "it closes")
        assert open_groups(client, run) == 0
    assert problems(join(redis_url, run)) == []


@pytest.mark.parametrize("indices", [[0], [0, 1]])
def test_rollouts_whose_indices_are_in_an_array_are_cancelled(
    redis_url: str, run: str, indices: list[int]
) -> None:
    with Producer(redis_url, run) as producer, producer.group(2) as group:
        assert group.cancel(indices=np.array(indices)).indices == indices
