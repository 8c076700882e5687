"""The pipelined connection of asyncio producers: cut anywhere, a server that forgets scripts, hangs or is demoted."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis
from redis.exceptions import ConnectionError, OutOfMemoryError, ReadOnlyError, ResponseError, TimeoutError

from streamadv.producer import Producer
from streamadv.store import clients
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.pipelined import Pipelined
from tests.support import group_all, join, ledger, payload_keys, problems, trajectory

ECHO = "return ARGV[1]"
ROLLOUT = {"input_ids": [1], "response_mask": [1], "reward": 1.0}


class CuttingProxy:
    """A TCP proxy that closes a connection after some bytes in one direction, once for each `cut`."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._direction = ""
        self._left = 0
        self.passed = 0  # bytes in the direction of the cut

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def cut(self, direction: str, after: int) -> None:
        """Close after so many bytes of 'requests' or 'replies'."""
        self._direction, self._left, self.passed = direction, after, 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(
            self._pass("requests", reader, server_writer, writer),
            self._pass("replies", server_reader, writer, server_writer),
        )

    async def _pass(
        self,
        direction: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if direction == self._direction:
                    self.passed += len(data)
                    if self.passed > self._left:
                        data, self._direction = data[: len(data) + self._left - self.passed], ""
                        writer.write(data)
                        await writer.drain()
                        break
                writer.write(data)
        except OSError:
            pass
        writer.close()
        back.close()


async def test_a_connection_whose_opening_is_cancelled_is_opened_by_the_next_call(redis_url: str) -> None:
    async with AsyncConnection(redis_url) as connection:
        pipelined = connection.pipelined
        assert pipelined is not None
        first = pipelined.eval(ECHO, 0, "1")
        others = asyncio.all_tasks()
        cancel = lambda: [task.cancel() for task in asyncio.all_tasks() - others]  # noqa: E731
        asyncio.get_running_loop().call_soon(cancel)
        with pytest.raises(ConnectionError):
            await first
        assert await pipelined.eval(ECHO, 0, "2") == b"2"


async def push_some(producer: Any, number: int) -> list[str]:
    """Two trajectories of one group and one of another, at once."""
    items = [trajectory(f"g{number}", 0), trajectory(f"g{number}", 1), trajectory(f"h{number}", 0, 1)]
    results = await asyncio.gather(*(producer.push([item]) for item in items))
    return [result.codes[0] for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["requests", "replies"])
async def test_a_connection_cut_between_any_two_bytes(redis_url: str, run: str, direction: str) -> None:
    codes: list[str] = []
    async with CuttingProxy(redis_url) as proxy, Producer(proxy.url, run) as producer:
        proxy.cut(direction, 1 << 30)
        await push_some(producer, 0)
        total, cuts = proxy.passed, 60
        for number in range(1, cuts):
            proxy.cut(direction, total * number // cuts)
            codes += await push_some(producer, number)
    assert set(codes) <= {"pushed", "duplicate"}
    assert "duplicate" in codes or direction == "requests"
    joined = await asyncio.to_thread(join, redis_url, run)
    await asyncio.to_thread(group_all, joined, None, 1000)
    assert ledger(joined)["pushed"] == 3 * cuts
    assert problems(joined) == []


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["requests", "replies"])
async def test_cuts_between_pushes_and_groups_begun_ahead(redis_url: str, run: str, direction: str) -> None:
    """No group stays open that nobody plays."""

    def play(url: str, proxy: CuttingProxy) -> list[str]:
        codes: list[str] = []
        cuts, total = 40, 0
        with Producer(url, run) as producer:
            groups = producer.groups(1, ahead=1)
            for number, group in zip(range(cuts), groups, strict=False):
                proxy.cut(direction, total * number // cuts if number else 1 << 30)
                codes += group.push([{"rollout_index": 0, **ROLLOUT}]).codes
                total = total or proxy.passed
        return codes

    async with CuttingProxy(redis_url) as proxy:
        codes = await asyncio.to_thread(play, proxy.url, proxy)
    assert set(codes) == {"pushed", "duplicate"} if direction == "replies" else {"pushed"}
    joined = await asyncio.to_thread(join, redis_url, run)
    for _ in range(2):
        await asyncio.to_thread(group_all, joined, None, 1000)
    assert ledger(joined)["pushed"] == len(codes) == 40
    assert joined.connection.scripts.zcard(joined.keys.home.open) == 0
    assert problems(joined) == []


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_scripts_that_a_server_forgets_again_and_again(redis_url: str, run: str, kind: str) -> None:
    items = [trajectory(f"g{number}", 0, 1) for number in range(20)]

    def push_blocking(client: redis.Redis) -> list[str]:
        codes = []
        with Producer(redis_url, run) as producer:
            for item in items:
                client.script_flush()
                codes += producer.push([item]).codes
        return codes

    async def push_asyncio(client: redis.Redis) -> list[str]:
        async def push(item: Any) -> str:
            client.script_flush()
            return (await producer.push([item])).codes[0]

        async with Producer(redis_url, run) as producer:
            return await asyncio.gather(*map(push, items))

    with redis.Redis.from_url(redis_url) as client:
        codes = push_blocking(client) if kind == "blocking" else asyncio.run(push_asyncio(client))
        joined = join(redis_url, run)
        assert codes == ["pushed"] * len(items)
        assert len(payload_keys(joined)) == len(items)
        assert {client.ttl(key) for key in payload_keys(joined)} == {-1}
    assert problems(joined) == []


def test_an_interrupt_between_two_replies_leaves_none_to_another_call(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    busy = "for i = 1, 3e6 do end return ARGV[1]"  # its replies come after the interrupt
    with Connection(redis_url) as connection:
        client = connection.push
        assert isinstance(client, clients.Client)
        client.ping()
        with monkeypatch.context() as patch:
            patch.setattr(redis.connection.AbstractConnection, "read_response", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.transact([], ("EVAL", busy, 0, "first"))
        assert client.transact([], ("EVAL", ECHO, 0, "second")) == b"second"


def test_an_interrupt_while_it_connects_leaves_no_connection_to_another_database(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send: Any = redis.connection.Connection.send_command
    put = ("EVAL", "return redis.call('SET', KEYS[1], 1)", 1, "key")

    def interrupt(connection: Any, *command: Any, **options: Any) -> None:
        if command[0] == "SELECT":
            raise KeyboardInterrupt
        send(connection, *command, **options)

    url = redis_url.removesuffix("/0") + "/3"
    with Connection(url) as connection, redis.Redis.from_url(redis_url) as other:
        client: Any = connection.push
        with monkeypatch.context() as patch:
            patch.setattr(redis.connection.Connection, "send_command", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.transact([], put)
        client.transact([], put)
        assert not other.exists("key")


def test_a_payload_whose_script_is_not_known_goes_by_itself(redis_url: str) -> None:
    with Connection(redis_url) as connection:
        client: Any = connection.push
        with pytest.raises(ResponseError, match="No matching script"):
            client.transact([("payload", {"a": b"1"})], ("EVALSHA", "0" * 40, 0))
        assert 0 < client.pttl("payload") <= 60_000


def echo(pipelined: Pipelined, text: str) -> asyncio.Future[Any]:
    return pipelined.eval(ECHO, 0, text)


def pipelined_of(connection: AsyncConnection, timeout: float | None = None) -> Pipelined:
    if timeout is not None:
        return Pipelined(connection.push, timeout)
    assert connection.pipelined is not None
    return connection.pipelined


async def test_each_call_has_its_own_result(redis_url: str) -> None:
    large = np.arange(100_000, dtype="<i4")
    async with AsyncConnection(redis_url) as connection:
        pipelined = pipelined_of(connection)
        calls = [
            echo(pipelined, "first"),
            pipelined.transact([("hash", {"a": large})], ("HGET", "hash", "a")),
            pipelined.eval("return redis.error_reply('OOM no room')", 0),
            pipelined.transact([("hash", {"a": b"1"})], ("NONE",)),
            echo(pipelined, "last"),
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[0] == b"first"
    assert results[1] == large.tobytes()
    assert isinstance(results[2], OutOfMemoryError)
    assert "unknown command" in str(results[3])
    assert results[4] == b"last"


async def test_a_cancelled_caller_disturbs_nobody_else(redis_url: str) -> None:
    async with AsyncConnection(redis_url) as connection:
        pipelined = pipelined_of(connection)
        for turns in range(4):  # before it is sent, and while its reply is due
            first, second, third = (echo(pipelined, text) for text in "abc")
            for _ in range(turns):
                await asyncio.sleep(0)
            second.cancel()
            assert await asyncio.gather(first, third) == [b"a", b"c"]


async def test_a_server_that_hangs_is_a_timeout_and_the_next_call_goes_on() -> None:
    with EmbeddedServer() as server:
        async with AsyncConnection(server.url) as connection:
            pipelined = pipelined_of(connection, timeout=1.0)
            assert await echo(pipelined, "a") == b"a"
            pid = (await connection.push.info("server"))["process_id"]
            os.kill(pid, signal.SIGSTOP)
            try:
                calls = [echo(pipelined, "b"), echo(pipelined, "c")]
                results = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert [type(result) for result in results] == [TimeoutError] * 2
            assert await echo(pipelined, "d") == b"d"
            pipelined.close()


async def test_a_server_that_is_no_primary_any_more_is_left(redis_url: str) -> None:
    """Its address may lead to another one by now."""
    async with AsyncConnection(redis_url) as connection:
        pipelined = pipelined_of(connection)
        assert await echo(pipelined, "a") == b"a"
        demoted = pipelined.eval("return redis.error_reply('READONLY a replica')", 0)
        behind = echo(pipelined, "b")
        results = await asyncio.gather(demoted, behind, return_exceptions=True)
        assert isinstance(results[0], ReadOnlyError)
        assert isinstance(results[1], (bytes, ConnectionError))
        assert await echo(pipelined, "c") == b"c"
        stats: dict[str, Any] = await connection.push.info("stats")
    assert stats["total_connections_received"] >= 3


async def test_closing_ends_the_calls_under_way(redis_url: str) -> None:
    async with AsyncConnection(redis_url) as connection:
        pipelined = pipelined_of(connection)
        calls = [echo(pipelined, "a")]
        pipelined.close()  # before it is connected
        await echo(pipelined, "b")
        calls.append(echo(pipelined, "c"))
        await asyncio.sleep(0)
        pipelined.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [ConnectionError] * 2
