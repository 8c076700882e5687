"""Makes redis-py's clients, with timeouts, retries and limits: for a server, a cluster, or behind Sentinels.

Every option is set, because redis-py's defaults change with its version (redis-py 8 retries every command 10 times
and cuts reads off after 5 s).
"""

from __future__ import annotations

from contextlib import suppress
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
from .exchange import SENT_AGAIN_ON, Client, Packer, Pool, executed, texts
from .retry import not_now
from .urls import Target

SOCKET_TIMEOUT: Final = 10.0  # seconds without a byte
#: Connections of one client; further callers wait. `?max_connections=` in the URL changes it.
MAX_CONNECTIONS: Final = 32

MASTER: Final = (b"master", "master")
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
        pipe.execute = partial(executed, pipe.execute)
        return pipe


class _MasterConnection(redis.sentinel.SentinelManagedConnection):
    """Refuses a server that is no master: a Sentinel may learn late of a failover, and replicas accept reads."""

    def connect_to(self, address: Any) -> None:
        super().connect_to(address)  # type: ignore[no-untyped-call]
        self.send_command("ROLE")  # type: ignore[no-untyped-call]
        with suppress(redis.exceptions.NoPermissionError):
            # Ask the Sentinels again: redis-py 5 tries one address for a while, and a former master starts as one.
            now = self.connection_pool.get_master_address()
            if self.read_response()[0] not in MASTER or now != address:
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
            if (await self.read_response())[0] not in MASTER or now != address:
                await self.disconnect()
                raise redis.exceptions.ConnectionError(NOT_MASTER.format(*address))


class _AsyncMasterSSLConnection(_AsyncMasterConnection, redis.asyncio.sentinel.SentinelManagedSSLConnection):
    pass


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
