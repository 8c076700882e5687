"""Connections to Redis or Valkey: up to three clients per process, because calls differ in what may be repeated.

A lost reply leaves a write in doubt. Scripts and reads may simply be sent again (`scripts`). A push may not (`push`),
because the same payload sent twice would overwrite or delete live columns. A blocking read needs a socket timeout
longer than its block (`blocking`). Loops around the clients wait out transient errors: see `retry.py`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Self, cast

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
import redis.exceptions

from ..doors import renewed_at_fork
from ..errors import ServerUnreachableError, SettingError
from . import tls
from .clients import SOCKET_TIMEOUT, make_async_client, make_client, sentinels_of
from .pipelined import Pipelined
from .reasons import Reason
from .retry import RETRYABLE, closed_under_way, reason_of, server_reason
from .urls import hide_password, parse_url
from .waiting import Blocked, Wait

_PING_ERRORS: Final[tuple[type[Exception], ...]] = (*RETRYABLE, redis.exceptions.ResponseError)

#: Answer of a server of another kind than the URL names -> what to write.
_OF_ANOTHER_KIND: Final = {
    "Cluster mode is not enabled": "this server is no cluster node: write",
    "unknown command 'SENTINEL'": "no Sentinel answers there: give their addresses (port 26379), or write",
}
#: A server without TLS takes the connection, and waits for the end of a line.
_MAY_SPEAK_NO_TLS: Final = re.compile("Timeout connecting|No master found")

MIN_BLOCK_MS: Final = 512
BLOCK_MARGIN: Final = 5.0  # seconds on top of a read's block: the server re-arms blocks and may be late
#: Inside the client, for a connection that the server has closed meanwhile. The loops around it go on for ever and have
#: to notice within 30 s that a server hangs, so there is one.
SCRIPT_RETRIES: Final = 1


class _BaseConnection:
    """What the two kinds of connection share: the URL and how it is shown."""

    def __init__(self, url: str) -> None:
        self.url = url
        """The URL as given, with its password: for child processes, not for messages."""
        self._target = parse_url(url)
        self._clients: dict[str, Any] = {}  # by role

    @property
    def is_cluster(self) -> bool:
        """Whether the URL is of a cluster."""
        return self._target.cluster

    @property
    def safe_url(self) -> str:
        """The URL without its password, for messages."""
        return hide_password(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.safe_url!r})"

    def _raise_if_permanent(self, error: Exception) -> None:
        """Raise SettingError for an error of a ping that waiting does not mend: password, rights, TLS."""
        for cause in tls.causes(error):
            if isinstance(cause, (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)):
                raise SettingError(
                    f"redis URL {self.safe_url!r}: {str(cause).rstrip('.')}; check user name and password"
                ) from None
        for mark, remedy in _OF_ANOTHER_KIND.items():
            if mark in str(error):
                scheme = self.safe_url.partition("+")[0]
                raise SettingError(f"redis URL {self.safe_url!r}: {remedy} {scheme}://") from None
        if isinstance(error, redis.exceptions.ResponseError) and not isinstance(error, RETRYABLE):
            raise SettingError(f"redis URL {self.safe_url!r}: the server answers {error}") from None
        if reason := tls.refusal(error, self._target.options):
            raise SettingError(f"redis URL {self.safe_url!r}: TLS fails with {reason}") from None

    def _after_failure(self, error: Exception, wait: Wait) -> None:
        """Report a failed attempt to reach the server. Raises ServerUnreachableError when it is time to give up."""
        reason = self._unknown_sentinels() or server_reason(error)
        if self._target.tls and _MAY_SPEAK_NO_TLS.search(reason.text):
            reason = Reason(reason.name, f"{reason.text} (does it speak TLS, as rediss:// says?)")
        if wait.timeout is not None and reason.name == "name_resolution":
            raise ServerUnreachableError(
                f"redis URL {self.safe_url!r}: {reason.text}: {reason.remedy(None)}"
            ) from None
        if wait.expired:
            raise ServerUnreachableError(
                f"no answer from {self.safe_url} within {wait.timeout:g} s ({reason.text}): {reason.remedy(None)}"
            ) from None
        wait.because(reason)

    def _unknown_sentinels(self) -> Reason | None:
        """The reason when no host of the Sentinels can be resolved, which redis-py does not report."""
        hosts = [host for host, _ in self._target.sentinels]
        for host in hosts:
            try:
                socket.getaddrinfo(host, None)
                return None
            except socket.gaierror as error:
                text = f"{', '.join(hosts)}: {error.strerror}"
        return Reason("name_resolution", text) if hosts else None

    def _check_single_node(self, info: dict[str, Any]) -> None:
        if info.get("cluster_enabled"):
            remedy = self.safe_url.replace("://", "+cluster://", 1)
            raise SettingError(
                f"redis URL {self.safe_url!r}: this server is a cluster node, write {remedy!r}"
            )


class Connection(_BaseConnection):
    """The clients of one process for one server or cluster. Making it does not touch the network.

    URL schemes: redis, rediss (TLS), unix, redis+cluster, rediss+cluster, and redis+sentinel, rediss+sentinel
    (`//host:port,host:port/name`, `?sentinel_username=`, `?sentinel_password=`); user, password, database and TLS
    options as redis-py understands them (`?ssl_ca_certs=...`). Safe to share between threads. Replies are bytes.

    reply_timeout: seconds, for one-shot commands: no call waits longer for a reply, and none is sent again.
    Raises SettingError on a bad URL.
    """

    def __init__(self, url: str, *, reply_timeout: float | None = None) -> None:
        super().__init__(url)
        self._reply_timeout = reply_timeout
        self._lock = renewed_at_fork(threading.Lock())

    @classmethod
    def of(cls, connection: str | Connection) -> Connection:
        """The connection of a URL, or the one given. Raises SettingError for anything else."""
        if isinstance(connection, str):
            return cls(connection)
        if not isinstance(connection, Connection):
            kind = type(connection).__name__  # bytes may hold a password
            raise SettingError(
                f"connection is {kind}, needs a URL (streamadv.redis_url() has it) or a Connection"
            )
        return connection

    @property
    def scripts(self) -> redis.Redis:
        """For reads and for scripts that may run twice: sends again when a reply is lost."""
        return self._client("scripts", SOCKET_TIMEOUT, SCRIPT_RETRIES)

    @property
    def push(self) -> redis.Redis:
        """For `MULTI` with payload: never sends anything twice. On a lost reply push under a new nonce."""
        return self._client("push", SOCKET_TIMEOUT, 0)

    def blocking(self, block_ms: int) -> redis.Redis:
        """For reads that block up to `block_ms`: times out 5 s after the next power of two, never sends again."""
        # So that few clients serve all lengths.
        up_to_ms = max(MIN_BLOCK_MS, 1 << (block_ms - 1).bit_length())
        return self._client(f"blocking {up_to_ms}", up_to_ms / 1000 + BLOCK_MARGIN, 0)

    def check(self) -> None:
        """Ask the server once. Raises one of RETRYABLE if it does not answer now, SettingError if it refuses (password,
        TLS, database) or is a cluster node without the URL saying so.
        """
        try:
            self.push.ping()
            if not self.is_cluster:
                with suppress(redis.exceptions.NoPermissionError):
                    self._check_single_node(self.push.info("cluster"))
        except _PING_ERRORS as error:
            self._raise_if_permanent(error)
            raise

    def wait_until_ready(
        self,
        timeout: float | None = None,
        on_wait: Callable[[Exception], object] | None = None,
        *,
        reading: bool = False,
    ) -> None:
        """`check` until the server answers, `timeout` seconds at most (None: for ever). Says why it waits.

        on_wait: called with the error after each failed attempt. reading: a server that refuses only writes will do.
        Raises SettingError as `check`, and ServerUnreachableError after `timeout`; with a timeout it is also raised at
        once for an unknown host name.
        """
        wait = Wait(Blocked(self.safe_url, "waiting for the server", None, first_s=0.0), timeout=timeout)
        while True:
            try:
                self.check()
                return
            except RETRYABLE as error:
                if reading and reason_of(error) == "misconf":
                    return  # only writes, and PING, are refused
                self._after_failure(error, wait)
                if on_wait is not None:
                    on_wait(error)
            wait.pause()

    def memory(self) -> dict[str, Any]:
        """The server's memory figures; {} where INFO is not permitted, or not known to this server."""
        try:
            return self.scripts.info("memory")
        except redis.exceptions.ResponseError as error:
            if isinstance(error, RETRYABLE):
                raise
            return {}

    def note_failed_push(self) -> None:
        """Call after a push that raised one of RETRYABLE.

        Reads the cluster's layout again: redis-py's transactions look for a slot's new primary after some errors only,
        not after a timeout, and would ask a primary that hangs for ever.
        """
        client = self._clients.get("push")
        if client is not None and self.is_cluster:
            with suppress(*RETRYABLE), closed_under_way():
                cast(redis.cluster.RedisCluster, client).nodes_manager.initialize()

    def close(self) -> None:
        """Close every client; the next use opens them again."""
        with self._lock:
            for client in self._clients.values():
                for closable in (client, *sentinels_of(client)):
                    closable.close()
            self._clients.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _client(self, role: str, socket_timeout: float, retries: int) -> redis.Redis:
        with self._lock:
            client: redis.Redis | None = self._clients.get(role)
            if client is None:
                if self._reply_timeout is not None:
                    socket_timeout, retries = min(socket_timeout, self._reply_timeout), 0
                client = self._clients[role] = make_client(self._target, socket_timeout, retries)
        return client


class AsyncConnection(_BaseConnection):
    """`Connection` for asyncio: what producers need. Use it from one event loop."""

    _pipelined: Pipelined | None = None

    @property
    def scripts(self) -> redis.asyncio.Redis:
        """For reads and for scripts that may run twice: sends again when a reply is lost."""
        return self._client("scripts", SCRIPT_RETRIES)

    @property
    def push(self) -> redis.asyncio.Redis:
        """For `MULTI` with payload: never sends anything twice. On a lost reply push under a new nonce."""
        return self._client("push", 0)

    @property
    def blocking(self) -> redis.asyncio.Redis:
        """For reads that block for a few seconds at most, less than the socket's timeout. Never sends again."""
        return self._client("blocking", 0)

    @property
    def pipelined(self) -> Pipelined | None:
        """For pushes and scripts of many tasks at once, over one connection; None for a cluster. Never sends twice."""
        if self.is_cluster:
            return None
        if self._pipelined is None:
            self._pipelined = Pipelined(self.push, SOCKET_TIMEOUT)
        return self._pipelined

    async def check(self) -> None:
        """As `Connection.check`."""
        try:
            await self.push.ping()
            if not self.is_cluster:
                with suppress(redis.exceptions.NoPermissionError):
                    self._check_single_node(await self.push.info("cluster"))
        except _PING_ERRORS as error:
            self._raise_if_permanent(error)
            raise

    async def wait_until_ready(
        self,
        timeout: float | None = None,  # noqa: ASYNC109  the same arguments as the sync one
    ) -> None:
        """As `Connection.wait_until_ready`."""
        wait = Wait(Blocked(self.safe_url, "waiting for the server", None, first_s=0.0), timeout=timeout)
        while True:
            try:
                await self.check()
                return
            except RETRYABLE as error:
                self._after_failure(error, wait)
            await asyncio.sleep(wait.delay())

    async def memory(self) -> dict[str, Any]:
        """As `Connection.memory`."""
        try:
            figures: dict[str, Any] = await self.scripts.info("memory")
            return figures
        except redis.exceptions.ResponseError as error:
            if isinstance(error, RETRYABLE):
                raise
            return {}

    async def note_failed_push(self) -> None:
        """As `Connection.note_failed_push`."""
        client = self._clients.get("push")
        if client is not None and self.is_cluster:
            with suppress(*RETRYABLE), closed_under_way():
                await cast(redis.asyncio.cluster.RedisCluster, client).nodes_manager.initialize()

    async def close(self) -> None:
        if self._pipelined is not None:
            self._pipelined.close()
            self._pipelined = None
        clients, self._clients = self._clients, {}  # another task may close it meanwhile
        for client in clients.values():
            for closable in (client, *sentinels_of(client)):
                await closable.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _client(self, role: str, retries: int) -> redis.asyncio.Redis:
        client: redis.asyncio.Redis | None = self._clients.get(role)
        if client is None:
            client = self._clients[role] = make_async_client(self._target, retries)
        return client
