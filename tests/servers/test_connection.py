"""Connections against a real server: what is sent again and what never is, blocks, waiting, clusters."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import redis
import redis.asyncio.cluster
import redis.exceptions

from streamadv.errors import ServerUnreachableError, SettingError
from streamadv.store import urls
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.keys import ShardKeys
from streamadv.store.retry import RETRYABLE, NotNowError
from streamadv.store.scripts import (
    run_script,
    run_script_async,
    run_transaction,
    run_transaction_async,
    script_call,
)
from streamadv.store.waiting import Blocked, Wait
from tests.clusters import until

needs_cluster_client = pytest.mark.skipif(
    not hasattr(redis.asyncio.cluster, "TransactionStrategy"), reason="redis-py 7 or newer"
)


class ReplyEater:
    """A TCP proxy that passes everything, but drops the connection instead of the reply to the first INCR."""

    def __init__(self) -> None:
        self.target_url = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.eaten = False
        self.port = int(self._listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        target = urlsplit(self.target_url)
        eat = False
        with (
            suppress(OSError),  # of whoever has gone
            client,
            socket.create_connection((target.hostname, target.port)) as server,
        ):
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is client:
                        eat = b"INCR" in data and not self.eaten
                        server.sendall(data)
                    elif eat:
                        self.eaten = True
                        return
                    else:
                        client.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def lossy_url(redis_url: str) -> Iterator[str]:
    proxy = ReplyEater()
    proxy.target_url = redis_url
    yield proxy.url
    proxy.close()


def value(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.get("n") or 0)


def increment(client: redis.Redis) -> None:
    pipe = client.pipeline(transaction=True)
    pipe.incr("n")
    pipe.execute()


def test_push_never_sends_twice(redis_url: str, lossy_url: str) -> None:
    with Connection(lossy_url) as connection:
        with pytest.raises(redis.exceptions.ConnectionError):
            increment(connection.push)
        assert value(redis_url) == 1
        increment(connection.push)  # usable afterwards
    assert value(redis_url) == 2


def test_a_blocking_client_never_sends_twice(redis_url: str, lossy_url: str) -> None:
    with Connection(lossy_url) as connection, pytest.raises(redis.exceptions.ConnectionError):
        connection.blocking(100).incr("n")
    assert value(redis_url) == 1


def test_blocks_of_many_lengths_share_connections(redis_url: str) -> None:
    with Connection(redis_url) as connection:
        before = len(connection.scripts.client_list())
        for block_ms in range(0, 2000, 30):
            connection.blocking(block_ms).ping()
        assert len(connection.scripts.client_list()) <= before + 3


def test_scripts_are_sent_again(redis_url: str, lossy_url: str) -> None:
    with Connection(lossy_url) as connection:
        assert connection.scripts.incr("n") == 2
    assert value(redis_url) == 2


async def test_the_async_push_never_sends_twice(redis_url: str, lossy_url: str) -> None:
    async with AsyncConnection(lossy_url) as connection:
        pipe = connection.push.pipeline(transaction=True)
        pipe.incr("n")
        with pytest.raises(redis.exceptions.ConnectionError):
            await pipe.execute()
        assert value(redis_url) == 1


async def test_async_scripts_are_sent_again(redis_url: str, lossy_url: str) -> None:
    async with AsyncConnection(lossy_url) as connection:
        assert await connection.scripts.incr("n") == 2


@pytest.mark.slow
def test_a_long_block_is_one_read(redis_url: str) -> None:
    """redis-py 8 would cut a read off after 5 s and send it again."""
    with Connection(redis_url) as connection:
        connection.scripts.xgroup_create("stream", "group", "0", mkstream=True)
        connection.scripts.config_resetstat()
        reader = connection.blocking(5200)
        assert not reader.xreadgroup("group", "me", {"stream": ">"}, count=1, block=5200)
        stats: dict[str, Any] = connection.scripts.info("commandstats")
    assert stats["cmdstat_xreadgroup"]["calls"] == 1


def test_a_pipeline_watches_keys_and_loads_scripts(redis_url: str) -> None:
    """As redis-py's does."""
    with Connection(redis_url) as connection, redis.Redis.from_url(redis_url) as other:
        client = connection.scripts
        pipe: Any = client.pipeline(transaction=False)
        pipe.watch("n")
        pipe.multi()
        pipe.set("n", "mine")
        other.set("n", "theirs")
        with pytest.raises(redis.exceptions.WatchError):
            pipe.execute()
        assert other.get("n") == b"theirs"
        client.register_script("return 7")(client=pipe)
        other.script_flush()
        assert pipe.execute() == [7]


def test_replies_are_bytes_in_one_shape(redis_url: str) -> None:
    with Connection(redis_url) as connection:
        connection.scripts.xgroup_create("stream", "group", "0", mkstream=True)
        entry = connection.push.xadd("stream", {"field": b"\xff\x00"})
        reply = connection.blocking(1000).xreadgroup("group", "me", {"stream": ">"}, count=1, block=1000)
    assert reply == [[b"stream", [(entry, {b"field": b"\xff\x00"})]]]


def test_a_push_into_a_restarted_server_works_at_once(server: EmbeddedServer, redis_url: str) -> None:
    with Connection(redis_url) as connection:
        connection.push.ping()  # an open connection that the restart breaks
        server.stop()
        server.start()
        connection.push.ping()


def test_waiting_for_a_server_that_starts_later(tmp_path: Any) -> None:
    with EmbeddedServer() as server:
        url = server.url
        server.stop()
        attempts: list[Exception] = []

        def on_wait(error: Exception) -> None:
            attempts.append(error)
            if len(attempts) == 2:
                server.start()

        with Connection(url) as connection:
            connection.wait_until_ready(60, on_wait)
        assert len(attempts) >= 2
        assert all(isinstance(error, RETRYABLE) for error in attempts)


async def test_a_server_that_never_answers() -> None:
    with EmbeddedServer() as server:
        url = server.url
    with Connection(url) as connection, pytest.raises(ServerUnreachableError, match="no answer"):
        connection.wait_until_ready(0)
    async with AsyncConnection(url) as connection:
        with pytest.raises(ServerUnreachableError, match="no answer"):
            await connection.wait_until_ready(0)


async def test_a_refusal_is_an_error_at_once(redis_url: str) -> None:
    for part in ("redis://:wrong-pw@", "redis://nobody:wrong-pw@"):
        url = redis_url.replace("redis://", part)
        with Connection(url) as connection, pytest.raises(SettingError) as caught:
            connection.wait_until_ready()
        assert "wrong-pw" not in str(caught.value)
        async with AsyncConnection(url) as other:
            with pytest.raises(SettingError):
                await other.wait_until_ready()
    with (
        Connection(redis_url.replace("/0", "/999")) as connection,
        pytest.raises(SettingError, match="DB index"),
    ):
        connection.wait_until_ready()


@pytest.mark.parametrize(
    ("scheme", "path", "remedy"),
    [
        pytest.param(
            "redis+cluster",
            "",
            r"this server is no cluster node: write redis://$",
            marks=needs_cluster_client,
        ),
        ("redis+sentinel", "/mymaster", r"no Sentinel .*addresses \(port 26379\), or write redis://$"),
    ],
)
async def test_a_server_of_another_kind_than_its_url_says_is_an_error_at_once(
    redis_url: str, scheme: str, path: str, remedy: str
) -> None:
    url = redis_url.replace("redis://", f"{scheme}://").removesuffix("/0") + path
    with Connection(url) as connection, pytest.raises(SettingError, match=remedy):
        connection.wait_until_ready()
    async with AsyncConnection(url) as other:
        with pytest.raises(SettingError, match=remedy):
            await other.wait_until_ready()


async def test_a_server_that_does_not_answer_to_tls_is_asked_whether_it_speaks_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "CONNECT_TIMEOUT", 0.5)
    async with AsyncConnection(redis_url.replace("redis://", "rediss://")) as connection:
        with pytest.raises(ServerUnreachableError, match=r"\(does it speak TLS, as rediss:// says\?\)"):
            await connection.wait_until_ready(0)


@pytest.mark.parametrize("option", ["/3", "/0?client_name=mine"])
def test_a_busy_server_that_refuses_a_new_connection_is_waited_for(
    forgetful: EmbeddedServer, option: str
) -> None:
    """redis-py selects the database and names the connection when it connects."""
    url, call = forgetful.url.removesuffix("/0") + option, script_call("server_id", ShardKeys("r:0:0"))

    async def ask() -> None:
        async with AsyncConnection(url) as connection:
            for client in (connection.scripts, connection.pipelined):
                with pytest.raises(NotNowError, match="BUSY"):
                    await run_script_async(client, call)
            with pytest.raises(NotNowError, match="BUSY"):
                await run_transaction_async(connection, [], call)

    with redis.Redis.from_url(forgetful.url) as client, ThreadPoolExecutor(1) as pool:
        client.config_set("busy-reply-threshold", 10)
        script = pool.submit(redis.Redis.from_url(forgetful.url).eval, "while true do end", 0)
        try:
            with suppress(redis.exceptions.ResponseError):  # BUSY
                while True:
                    client.get("x")
            with Connection(url) as connection:
                with pytest.raises(NotNowError, match="BUSY"):
                    run_script(connection.scripts, call)
                with pytest.raises(NotNowError, match="BUSY"):
                    run_transaction(connection, [], call)
            asyncio.run(ask())
        finally:
            client.script_kill()
        with pytest.raises(redis.exceptions.ResponseError):
            script.result()


def test_a_client_opens_no_more_connections_than_it_needs(redis_url: str) -> None:
    with Connection(redis_url + "?max_connections=2") as connection, ThreadPoolExecutor(8) as threads:
        client = connection.scripts
        assert len({client.client_id() for _ in range(8)}) == 1
        assert len(set(threads.map(lambda _: client.client_id(), range(64)))) <= 2


async def test_many_tasks_share_a_bounded_number_of_connections(redis_url: str) -> None:
    async with AsyncConnection(redis_url + "?max_connections=4&client_name=shared") as connection:
        await connection.push.set("key", b"v")
        assert await asyncio.gather(*(connection.push.get("key") for _ in range(200))) == [b"v"] * 200
        clients = await connection.push.client_list()
    assert len([client for client in clients if client["name"] == "shared"]) in range(2, 5)


def test_a_connection_closed_by_another_thread_is_an_outage(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a trainer that ends while its heartbeat waits for a slow server."""
    send: Any = redis.connection.AbstractConnection.send_packed_command
    with Connection(redis_url) as connection:
        client = connection.push
        client.ping()

        def send_and_close(of: Any, pieces: Any, **options: Any) -> None:
            send(of, pieces, **options)
            connection.close()

        with monkeypatch.context() as patch:
            patch.setattr(redis.connection.AbstractConnection, "send_packed_command", send_and_close)
            with pytest.raises(redis.exceptions.ConnectionError):
                client.incr("n")
        assert client.ping()


def test_a_transaction_whose_connection_another_thread_closes_is_an_outage(redis_url: str) -> None:
    """One that redis-py sends, as a status does that is read while its trainer ends."""
    with Connection(redis_url) as connection:
        client = connection.scripts
        pool: Any = client.connection_pool
        is_ready = threading.Event()

        class Closed(pool.connection_class):  # type: ignore[misc]
            def check_health(self) -> None:  # what redis-py does last before it sends
                if is_ready.is_set():
                    connection.close()

        pool.connection_class = Closed
        client.ping()
        is_ready.set()
        pipe = client.pipeline(transaction=True)
        pipe.get("n")
        with pytest.raises(redis.exceptions.ConnectionError):
            pipe.execute()
        assert connection.scripts.ping()


@pytest.mark.parametrize("turns", range(24))
async def test_a_connection_closed_at_any_moment_is_an_outage(redis_url: str, turns: int) -> None:
    """As a cluster's client closes all its connections when one task finds its layout changed."""
    async with AsyncConnection(redis_url) as connection:
        call = asyncio.create_task(
            run_script_async(connection.scripts, script_call("server_id", ShardKeys("r:0:0")))
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        await connection.scripts.connection_pool.disconnect(inuse_connections=True)
        with suppress(*RETRYABLE):
            await call


@contextmanager
def one_node_cluster(**options: str) -> Iterator[str]:
    """The URL of a cluster of one, without its scheme."""
    with EmbeddedServer(extra_options={"cluster-enabled": "yes"} | options) as server:
        with redis.Redis.from_url(server.url) as client:
            execute = cast(Callable[..., Any], client.execute_command)
            execute("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait = Wait(Blocked("test", "waiting for a cluster", None), base=0.01, cap=0.1)
            while execute("CLUSTER INFO")["cluster_state"] != "ok":
                wait.pause()
        yield server.url.removeprefix("redis").removesuffix("/0")


async def test_tasks_may_close_a_connection_at_once(redis_url: str) -> None:
    connection = AsyncConnection(redis_url)
    ids = [await client.client_id() for client in (connection.scripts, connection.push, connection.blocking)]
    await asyncio.gather(*(connection.close() for _ in range(3)))
    with redis.Redis.from_url(redis_url) as client:
        until(lambda: not client.client_list(client_id=ids), "disconnected")


@needs_cluster_client
@pytest.mark.slow
async def test_a_cluster_has_the_same_roles() -> None:
    script = "return redis.call('HLEN', KEYS[1])"
    with one_node_cluster() as rest:
        with (
            Connection("redis" + rest) as connection,
            pytest.raises(SettingError, match=r"redis\+cluster://"),
        ):
            connection.wait_until_ready(10)
        with Connection("redis+cluster" + rest) as connection:
            connection.wait_until_ready(30)
            pipe = connection.push.pipeline(transaction=True)
            pipe.hset("{run:0}:a", mapping={"x": b"\xff"})
            cast(Any, pipe).execute_command("EVAL", script, 1, "{run:0}:a")
            assert pipe.execute() == [1, 1]
            connection.scripts.xgroup_create("{run:0}:s", "group", "0", mkstream=True)
            assert connection.scripts.register_script(script)(keys=["{run:0}:a"]) == 1
            assert not connection.blocking(50).xreadgroup(
                "group", "me", {"{run:0}:s": ">"}, count=1, block=50
            )
        async with AsyncConnection("redis+cluster" + rest) as other:
            await other.wait_until_ready(30)
            async_pipe = other.push.pipeline(transaction=True)
            async_pipe.hset("{run:0}:b", mapping={"x": b"\xff"})
            cast(Any, async_pipe).execute_command("EVAL", script, 1, "{run:0}:b")
            assert await async_pipe.execute() == [1, 1]


@needs_cluster_client
@pytest.mark.slow
async def test_push_into_a_cluster_never_sends_twice() -> None:
    proxy = ReplyEater()
    with one_node_cluster(**{"cluster-announce-port": str(proxy.port)}) as rest:
        proxy.target_url = "redis" + rest
        with Connection("redis+cluster" + rest) as connection:
            with pytest.raises(RETRYABLE):
                increment(connection.push)
            assert value("redis" + rest) == 1
            increment(connection.push)
        assert value("redis" + rest) == 2
        proxy.eaten = False
        async with (
            AsyncConnection("redis+cluster" + rest) as other,
            other.push.pipeline(transaction=True) as pipe,
        ):
            pipe.incr("n")
            with pytest.raises(RETRYABLE):
                await pipe.execute()
        assert value("redis" + rest) == 3
    proxy.close()


@needs_cluster_client
@pytest.mark.slow
def test_a_cluster_that_is_down_is_waited_for() -> None:
    with one_node_cluster() as rest:
        url = "redis+cluster" + rest
    with Connection(url) as connection, pytest.raises(ServerUnreachableError):
        connection.wait_until_ready(0)
