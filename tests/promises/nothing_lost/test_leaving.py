"""A producer that leaves: it asks first whether a server has lost what it was sent, and does not wait for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

import pytest
import redis

from streamadv.producer import Producer, async_producer, logic
from streamadv.producer import producer as producer_module
from streamadv.store import clients
from streamadv.store import connection as connection_module
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.chaos.proxy import Proxy
from tests.clusters import until
from tests.support import group_all, join, problems, trajectory

pytestmark = pytest.mark.server

COLUMNS: dict[str, Any] = {"input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}
KINDS = pytest.mark.parametrize("kind", ["blocking", "asyncio"])


def restart(server: EmbeddedServer) -> None:
    server.kill()
    server.start()


def push_and_leave(kind: str, url: str, run: str, meanwhile: Callable[[], object]) -> None:
    """Push a group of one, with one begun ahead, which nobody wants then; leave after `meanwhile`."""
    if kind == "blocking":
        with Producer(url, run, name=kind) as producer:
            with closing(producer.groups(1, ahead=1)) as groups:
                next(iter(next(groups))).push(**COLUMNS)
            producer.push([trajectory("g", 0, 1)])
            meanwhile()
        return

    async def work() -> None:
        async with Producer(url, run, name=kind) as producer:
            async with aclosing(producer.groups(1, ahead=1)) as groups:
                await next(iter(await anext(groups))).push(**COLUMNS)
            await producer.push([trajectory("g", 0, 1)])
            meanwhile()

    asyncio.run(work())


def said_by(url: str, run: str, name: str) -> str:
    """What a producer has said last, as the list of producers has it."""
    with redis.Redis.from_url(url) as client:
        value: Any = client.hget(join(url, run).keys.home.producers, name)
    return str(value.split(b" ")[1].decode())


def leave_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for less long than it does for users."""
    for module in (logic, producer_module, async_producer):
        monkeypatch.setattr(module, "LEAVE_S", 0.2)


@KINDS
def test_what_the_server_has_lost_is_sent_again_before_the_producer_leaves(
    forgetful: EmbeddedServer, run: str, kind: str
) -> None:
    """It talks to the new server within the 10 s of a heartbeat and never hears of the restart."""
    push_and_leave(kind, forgetful.url, run, lambda: restart(forgetful))
    joined = join(forgetful.url, run)
    assert said_by(forgetful.url, run, kind) == "gone"
    assert sorted(group_all(joined)) == ["complete"] * 2
    assert problems(joined) == []


@KINDS
def test_connections_cut_at_the_close_leave_no_group_open(redis_url: str, run: str, kind: str) -> None:
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    with Proxy("127.0.0.1", port) as proxy:

        def cut() -> None:
            for _ in range(4):  # a blocking client asks twice by itself
                proxy.arm("request")

        push_and_leave(kind, f"redis://127.0.0.1:{proxy.port}", run, cut)
        assert proxy.faults["request"] == 4
    joined = join(redis_url, run)
    assert said_by(redis_url, run, kind) == "gone"
    group_all(joined)
    assert joined.connection.scripts.zcard(joined.keys.home.open) == 0
    assert problems(joined) == []


@KINDS
@pytest.mark.parametrize("way", ["kill", "pause"])
def test_closing_ends_without_a_server_and_says_what_is_left(
    forgetful: EmbeddedServer,
    run: str,
    kind: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also when it hangs, and nobody gives up waiting for its answer."""
    leave_soon(monkeypatch)
    for module in (connection_module, clients):
        monkeypatch.setattr(module, "SOCKET_TIMEOUT", 3600.0)
    pid = forgetful.pid

    def away() -> None:
        if way == "kill":
            forgetful.kill()
        else:
            os.kill(pid, signal.SIGSTOP)

    try:
        push_and_leave(kind, forgetful.url, run, away)
    finally:
        if way == "pause":
            os.kill(pid, signal.SIGCONT)
    (said,) = [message for message in caplog.messages if "leaves run" in message]
    assert "nobody sends again if the server has lost them: 2" in said
    assert "open until their deadline: 1" in said


@KINDS
def test_what_finds_no_room_when_a_producer_leaves_is_told(
    forgetful: EmbeddedServer,
    run: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has not said that it is gone: its groups may come yet, for all that others know, until it counts as lost."""
    leave_soon(monkeypatch)

    def lose_all_and_pace() -> None:
        restart(forgetful)
        TrainerQueue(forgetful.url, run, batch_groups=1, max_staleness=0).open()
        with Producer(forgetful.url, run) as other:
            other.begin_group(2)

    push_and_leave(kind, forgetful.url, run, lose_all_and_pace)
    (said,) = [message for message in caplog.messages if "leaves run" in message]
    assert "no room" in said
    assert "nobody sends again if the server has lost them: 2" in said
    assert said_by(forgetful.url, run, kind) == "open"


@pytest.mark.timeout(60)
def test_pacing_does_not_hold_back_what_was_lost_once_the_trainer_has_ended_the_run(
    forgetful: EmbeddedServer, run: str
) -> None:
    """Nothing would ever make room for it, and its producer could not finish."""
    queue = TrainerQueue(forgetful.url, run, batch_groups=1, max_staleness=0)
    with Producer(forgetful.url, run) as producer, Producer(forgetful.url, run) as other:
        producer.push([trajectory("g", 0, 1)])
        restart(forgetful)
        queue.open()
        other.begin_group(2)
        queue.finish()
        producer.finish()
        assert group_all(join(forgetful.url, run)) == ["complete"]


@pytest.mark.parametrize("turns", range(1, 5))
async def test_a_close_that_is_cancelled_at_once_is_cancelled(redis_url: str, run: str, turns: int) -> None:
    """Also while it waits for its heartbeat to end."""
    with redis.Redis.from_url(redis_url) as client:
        before = {each["id"] for each in client.client_list()}
        producer = await Producer(redis_url, run).__aenter__()
        leaving = asyncio.create_task(producer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await asyncio.to_thread(
            until, lambda: {each["id"] for each in client.client_list()} <= before, "disconnected"
        )
