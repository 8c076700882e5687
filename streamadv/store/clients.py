"""Makes redis-py's clients, with timeouts, retries and limits: for a server, a cluster, or behind Sentinels.

Every option is set, because redis-py's defaults change with its version (redis-py 8 retries every command 10 times
and cuts reads off after 5 s).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final, cast

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.cluster
import redis.exceptions
import redis.sentinel
from redis.backoff import FullJitterBackoff, NoBackoff
from redis.retry import Retry

from .. import doors
from .exchange import (
    Packer,
    Payloads,
    Piece,
    Pool,
    pack_transaction,
    replies,
    texts,
    transaction_result,
)
from .retry import classified, not_now
from .urls import Target

SOCKET_TIMEOUT: Final = 10.0  # seconds without a byte
# redis-py 5 retries after a lost reply only for listed errors. A listed error also closes its connection, which after
# READONLY leads to a former primary.
SENT_AGAIN_ON: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
)
#: Seconds before what was sent is sent again, at most.
AGAIN_S: Final = 0.1
#: Connections of one client; further callers wait. `?max_connections=` in the URL changes it.
MAX_CONNECTIONS: Final = 32

NOT_MASTER: Final = "{}:{} is no longer, or not yet, the master"

# Refresh the node list after every error (callers back off anyway); one missing shard must not block the others.
CLUSTER_OPTIONS: Final = {"reinitialize_steps": 1, "require_full_coverage": False}


def _options(target: Target, retry: type[Any], socket_timeout: float, retries: int) -> dict[str, Any]:
    """Options of a client that sends a command up to 1 + `retries` times. retry: redis-py's class."""
    backoff = FullJitterBackoff(cap=1.0, base=0.05) if retries else NoBackoff()
    options = target.shared_options | {"socket_timeout": socket_timeout, "retry": retry(backoff, retries)}
    if "socket_connect_timeout" in options:
        options["socket_connect_timeout"] = min(options["socket_connect_timeout"], socket_timeout)
    options["encoding_errors"] = "backslashreplace"  # of a refusal, which may repeat what somebody has sent
    options |= doors.client_options if retry is Retry else doors.async_client_options
    return options | (CLUSTER_OPTIONS if target.cluster else {"retry_on_error": list(SENT_AGAIN_ON)})


def make_client(target: Target, socket_timeout: float, retries: int) -> redis.Redis:
    """A client that sends a command up to 1 + `retries` times; may be shared by threads."""
    options = _options(target, Retry, socket_timeout, retries)
    if target.cluster:
        # This asks the cluster for its nodes at once, so clients are made at first use. The class has the
        # commands of Redis without being a subclass.
        return cast(redis.Redis, _ClusterClient.from_url(target.url, **options))
    options["command_packer"] = Packer()  # a cluster's client takes none: it copies
    if not target.sentinels:
        pool = Pool.from_url(target.url, max_connections=MAX_CONNECTIONS, timeout=None, **options)
    else:
        kind = _MasterSSLConnection if target.tls else _MasterConnection
        options |= _through_sentinels(target, redis.sentinel.Sentinel, kind, Retry(NoBackoff(), 0))
        pool = cast(Any, Pool)(**options)
    client: Any = Client.from_pool(pool)
    client.attempts = 1 + retries
    return cast(redis.Redis, client)


class _ClusterClient(redis.cluster.RedisCluster):
    """A cluster's client that sends no numbers (see `texts`), and raises errors as `retry.classified` has them.

    So does its pipeline.
    """

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with not_now(args):
            return super().execute_command(*texts(args), **options)  # type: ignore[no-untyped-call]

    def pipeline(self, *args: Any, **options: Any) -> Any:
        pipe: Any = super().pipeline(*args, **options)  # type: ignore[no-untyped-call]
        send = pipe.execute_command
        pipe.execute_command = lambda *args, **options: send(*texts(args), **options)
        pipe.execute = partial(_executed, pipe.execute)
        return pipe


def _executed(execute: Callable[..., list[Any]], *args: Any, **options: Any) -> list[Any]:
    """What `execute` of a pipeline of redis-py returns or raises, with errors as `classified`."""
    with not_now():
        replies = execute(*args, **options)
    refusal = redis.exceptions.ResponseError
    return [classified(reply) if isinstance(reply, refusal) else reply for reply in replies]


def _packed(commands: Iterable[Sequence[Any]]) -> list[Piece]:
    return [piece for args in commands for piece in Packer().pack(*args)]


class Client(redis.Redis):
    """A client of one server. What it sends goes past redis-py, which records and looks up much for each command."""

    attempts = 1  # at sending what goes past redis-py

    def transact(self, payloads: Payloads, call: Sequence[Any]) -> Any:
        """MULTI: write the hashes, then make `call`, whose reply is returned. Raises the first error there was."""
        return self._exchange(*pack_transaction(payloads, call), transaction_result, call)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's client."""
        return self.execute_together([(args, options)])[0]

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        """As redis-py's client."""
        return _Pipeline(self, transaction)

    def execute_together(
        self, commands: Sequence[tuple[Sequence[Any], Mapping[str, Any]]], raise_on_error: bool = True
    ) -> list[Any]:
        """Results of commands sent in one piece, each given as its arguments and redis-py's options.

        Raises the first error there is, or has each one among the results. ReadOnlyError is raised in any case, so that
        the connection, which leads to a former primary, is given up.
        """
        raised = Exception if raise_on_error else redis.exceptions.ReadOnlyError

        def results_of(replies: list[Any]) -> Any:
            results = [self._result_of(*pair) for pair in zip(replies, commands, strict=True)]
            return next((result for result in results if isinstance(result, raised)), results)

        pieces = _packed([args for args, _ in commands])
        results: list[Any] = self._exchange(pieces, len(commands), results_of)
        return results

    def _result_of(self, reply: Any, command: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
        """What redis-py makes of a reply; an error as `classified`."""
        args, options = command
        if isinstance(reply, redis.exceptions.ResponseError):
            return classified(reply, args)
        if args[0] not in self.response_callbacks:
            return reply
        others = {name: value for name, value in options.items() if name != "keys"}  # for redis-py's cache
        return self.response_callbacks[args[0]](reply, **others)

    def read(self, commands: Sequence[Sequence[Any]]) -> Generator[Any]:
        """Replies to commands that write nothing, each as soon as it has come; a refusal as an error among them.

        Who does not take all of them closes the iterator. Asks once: raises ConnectionError or TimeoutError.
        """
        pool: Any = self.connection_pool
        connection = pool.get_connection()
        try:
            with closing(replies(connection, [b"".join(_packed(commands))], len(commands))) as incoming:
                for command, reply in zip(commands, incoming, strict=True):
                    is_refused = isinstance(reply, redis.exceptions.ResponseError)
                    yield classified(reply, command) if is_refused else reply
        finally:
            pool.release(connection)

    def _exchange(
        self,
        pieces: Sequence[Piece],
        count: int,
        result_of: Callable[[list[Any]], Any],
        sent: Sequence[Any] = (),
    ) -> Any:
        """Send commands, and return or raise what `result_of` makes of so many replies. sent: the one that may fail.

        Again on the errors, and as often, as redis-py was told.
        """
        pool: Any = self.connection_pool
        connection = pool.get_connection()
        attempts = self.attempts
        try:
            while True:
                attempts -= 1
                try:
                    result = result_of(list(replies(connection, pieces, count)))
                    if isinstance(result, Exception):
                        raise result
                    return result
                except SENT_AGAIN_ON:
                    connection.disconnect()
                    if not attempts:
                        raise
                    doors.sleep(AGAIN_S * random.random())
        except redis.exceptions.ResponseError as error:
            raise classified(error, sent) from None
        finally:
            pool.release(connection)


class _Pipeline(redis.client.Pipeline):
    """Commands, which without MULTI are sent as a `Client` sends."""

    def __init__(self, client: Client, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client, self._has_multi = client, transaction

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """As redis-py's, with errors as `classified`."""
        if self._has_multi or self.watching or self.explicit_transaction or self.scripts:
            return _executed(super().execute, raise_on_error)
        commands, self.command_stack = self.command_stack, []
        return self._client.execute_together(commands, raise_on_error) if commands else []


class _MasterConnection(redis.sentinel.SentinelManagedConnection):
    """Refuses a server that is no master: a Sentinel may learn late of a failover, and replicas accept reads."""

    def connect_to(self, address: Any) -> None:
        super().connect_to(address)  # type: ignore[no-untyped-call]
        self.send_command("ROLE")  # type: ignore[no-untyped-call]
        with suppress(redis.exceptions.NoPermissionError):
            # Ask the Sentinels again: redis-py 5 tries one address for a while, and a former master starts as one.
            now = self.connection_pool.get_master_address()
            if not _is_master(self.read_response()) or now != address:
                self.disconnect()  # type: ignore[no-untyped-call]  # else the next try takes it for connected
                raise redis.exceptions.ConnectionError(NOT_MASTER.format(*address))


class _MasterSSLConnection(_MasterConnection, redis.sentinel.SentinelManagedSSLConnection):
    pass


class _AsyncMasterConnection(redis.asyncio.sentinel.SentinelManagedConnection):
    """As `_MasterConnection`."""

    async def connect_to(self, address: Any) -> None:
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        await self.send_command("ROLE")
        with suppress(redis.exceptions.NoPermissionError):
            now = await self.connection_pool.get_master_address()
            if not _is_master(await self.read_response()) or now != address:
                await self.disconnect()
                raise redis.exceptions.ConnectionError(NOT_MASTER.format(*address))


class _AsyncMasterSSLConnection(_AsyncMasterConnection, redis.asyncio.sentinel.SentinelManagedSSLConnection):
    pass


def _is_master(role: Any) -> bool:
    return role[0] in (b"master", "master")


class _Master:
    """Finds the master for connections through Sentinels, as redis-py's pool for Sentinels does.

    That pool is not a blocking one.
    """

    is_master = True
    check_connection = False

    def __init__(self, sentinel: Any, service_name: str) -> None:
        self.sentinel = sentinel
        self.service_name = service_name

    def get_master_address(self) -> Any:
        """Host and port; to be awaited with asyncio's Sentinel. Raises MasterNotFoundError, a ConnectionError."""
        return self.sentinel.discover_master(self.service_name)


class _AsyncClassified:
    """As `_ClusterClient`, without pipelines: callers put `not_now` around `execute`."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with not_now(args):
            return await super().execute_command(*args, **options)  # type: ignore[misc]


class _AsyncClusterClient(_AsyncClassified, redis.asyncio.cluster.RedisCluster):  # type: ignore[misc]
    pass


class _AsyncClient(_AsyncClassified, redis.asyncio.Redis):  # type: ignore[misc]
    pass


def make_async_client(target: Target, retries: int) -> redis.asyncio.Redis:
    """`make_client` for asyncio."""
    options = _options(target, redis.asyncio.retry.Retry, SOCKET_TIMEOUT, retries)
    if target.cluster:
        return cast(redis.asyncio.Redis, _AsyncClusterClient.from_url(target.url, **options))
    if not target.sentinels:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            target.url, max_connections=MAX_CONNECTIONS, timeout=None, **options
        )
        return _AsyncClient.from_pool(pool)
    once = redis.asyncio.retry.Retry(NoBackoff(), 0)
    kind = _AsyncMasterSSLConnection if target.tls else _AsyncMasterConnection
    options |= _through_sentinels(target, redis.asyncio.sentinel.Sentinel, kind, once)
    return _AsyncClient.from_pool(redis.asyncio.BlockingConnectionPool(**options))


def sentinels_of(client: Any) -> list[Any]:
    """The clients with which `client` asks the Sentinels: close them with it."""
    pool = getattr(client, "connection_pool", None)  # a cluster's client has none
    master = pool.connection_kwargs.get("connection_pool") if pool is not None else None
    return master.sentinel.sentinels if isinstance(master, _Master) else []


def _through_sentinels(target: Target, make: Any, kind: type[Any], retry: Any) -> dict[str, Any]:
    """Options of a pool whose connections, of this kind, ask the Sentinels where to go."""
    sentinel = make(target.sentinels, sentinel_kwargs=target.sentinel_options | {"retry": retry})
    master = _Master(sentinel, target.master)
    limits = {"max_connections": MAX_CONNECTIONS, "timeout": None}
    return limits | target.url_options | {"connection_class": kind, "connection_pool": master}
