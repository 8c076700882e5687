"""Connections to Redis or Valkey, one client per way of failing.

A lost reply leaves a write in doubt. Scripts and reads may simply be sent again (`scripts`); a push may not,
since the same payload sent twice would overwrite or delete live columns (`push`); and a blocking read needs a
socket timeout longer than its block (`blocking`). redis-py's own defaults change with its version (redis-py 8
retries every command 10 times and cuts reads off after 5 s), so nothing is left to them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.cluster
import redis.connection
import redis.exceptions
from redis.backoff import FullJitterBackoff, NoBackoff
from redis.retry import Retry

from . import tls
from .errors import ServerUnreachableError, SettingError
from .packing import Packer

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRYABLE: Final[tuple[type[Exception], ...]] = (
    redis.exceptions.ConnectionError,  # also BusyLoadingError: the server is reading its data
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,  # failover: this was the primary a moment ago
    redis.exceptions.ClusterError,  # also CLUSTERDOWN and MASTERDOWN
    redis.exceptions.TryAgainError,
    redis.exceptions.AskError,  # also MOVED: not executed, the next attempt goes to the right node
    redis.exceptions.RedisClusterException,  # no node of the cluster answers
)
"""What passes by itself: wait (`Backoff`) and do the whole thing again; a push under a new nonce."""

_PING_ERRORS: Final[tuple[type[Exception], ...]] = (*RETRYABLE, redis.exceptions.ResponseError)

SOCKET_TIMEOUT: Final = 10.0  # seconds without a byte
CONNECT_TIMEOUT: Final = 5.0
BLOCK_MARGIN: Final = 5.0  # seconds on top of a read's block: the server re-arms blocks and may be late
SCRIPT_RETRIES: Final = 3  # inside the client; the loops above go on for ever
# redis-py 5 ignores its retry setting on a lost reply unless the errors are listed.
SENT_AGAIN_ON: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
MAX_CONNECTIONS: Final = (
    32  # per client, further callers wait their turn; `?max_connections=` in the URL changes it
)

SCHEMES: Final = {
    "redis": ("redis", False),
    "rediss": ("rediss", False),
    "unix": ("unix", False),
    "redis+cluster": ("redis", True),
    "rediss+cluster": ("rediss", True),
}
# What each client must set for itself: an option in the URL would win over it.
RESERVED_OPTIONS: Final = (
    "decode_responses",
    "legacy_responses",
    "protocol",
    "retry_on_error",
    "retry_on_timeout",
    "socket_timeout",
)


def hide_password(url: str) -> str:
    """The URL as it may be shown: passwords replaced by `***`."""
    shown = re.sub(r"^([a-z+]*://)([^:@/]*):(.*)@", r"\1\2:***@", url, flags=re.DOTALL)
    return re.sub(r"((?:^|[?&])(?:ssl_)?password=)[^&]*", r"\1***", shown)


class Backoff:
    """Waits between attempts: the n-th is uniform in [0, min(cap, base * 2**n)] seconds (full jitter).

    `sleep` takes seconds; give `Event.wait` to end the wait early. `draw` returns a number in [0, 1).
    """

    def __init__(
        self,
        base: float = 0.05,
        cap: float = 2.0,
        *,
        sleep: Callable[[float], object] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._base = base
        self._cap = cap
        self._sleep = sleep
        self._draw = draw
        self.failures = 0

    def delay(self) -> float:
        """Count one more failure and return the seconds to wait after it."""
        limit = min(self._cap, self._base * 2.0 ** min(self.failures, 64))
        self.failures += 1
        return limit * self._draw()

    def wait(self) -> None:
        self._sleep(self.delay())

    def reset(self) -> None:
        """Call after a success."""
        self.failures = 0


def patiently(call: Callable[[], T], who: str, *, sleep: Callable[[float], object] = time.sleep) -> T:
    """`call()`, again until the server answers: for what may simply be done twice. `who` is for the log."""
    backoff = Backoff(sleep=sleep)
    while True:
        try:
            return call()
        except RETRYABLE as error:
            level = logging.DEBUG if backoff.failures else logging.WARNING  # once for each outage
            logger.log(level, "%s: the server does not answer, waiting: %s", who, error)
            backoff.wait()


@dataclass(frozen=True)
class _Target:
    """A URL, checked, in the form redis-py takes."""

    url: str
    cluster: bool
    given: Mapping[str, Any]  # what the URL says, as redis-py names it

    @property
    def shared_options(self) -> dict[str, Any]:
        # RESP2 on every client version: one shape of replies. A unix socket takes no TCP options.
        options: dict[str, Any] = {"protocol": 2}
        if not self.url.startswith("unix:"):
            options |= {"socket_connect_timeout": CONNECT_TIMEOUT, "socket_keepalive": True}
        if self.url.startswith("rediss:") and "ssl_cert_reqs" not in self.given:
            options["ssl_check_hostname"] = True  # redis-py 5 would take any name for the right one
        return options


def _parse(url: str) -> _Target:
    shown = hide_password(url)
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise SettingError(
            f"redis URL {shown!r}: start it with one of {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    # Checked first, so that no message below can quote a piece of a password as a host, port or option.
    if set("/?#@[]") & set(rest.rpartition("@")[0]):
        raise SettingError(
            f"redis URL {shown!r}: write special characters in user name and password as %xx (@ is %40)"
        )
    plain, cluster = SCHEMES[scheme]
    try:
        options: dict[str, Any] = redis.connection.parse_url(f"{plain}://{rest}")  # type: ignore[no-untyped-call]
        path = urlsplit(f"{plain}://{rest}").path
    except ValueError as error:
        raise SettingError(f"redis URL {shown!r}: {error}") from None
    target = _Target(f"{plain}://{rest}", cluster, options)
    for name in RESERVED_OPTIONS:
        if name in options:
            raise SettingError(f"redis URL {shown!r}: {name} is set by streamadv, remove it")
    if plain == "unix":
        if "path" not in options:
            raise SettingError(f"redis URL {shown!r}: give the socket's path, unix:///path/to/redis.sock")
    elif path not in ("", "/") and not path[1:].isdigit():
        raise SettingError(f"redis URL {shown!r}: the database must be a number, not {path[1:]!r}")
    if cluster:
        if options.get("db"):
            raise SettingError(f"redis URL {shown!r}: a cluster has database 0 only")
        if not hasattr(redis.asyncio.cluster, "TransactionStrategy"):
            raise SettingError(
                f"redis URL {shown!r}: redis-py {redis.__version__} has no transactions on a cluster, "
                'pip install "redis>=7"'
            )
    try:  # makes the object only; an unknown option is found now and not at the first command
        redis.ConnectionPool.from_url(target.url, **target.shared_options).make_connection()
    except (TypeError, ValueError, redis.exceptions.RedisError) as error:
        raise SettingError(f"redis URL {shown!r}: {error}") from None
    if plain == "rediss":
        tls.check_files(options)
    return target


class _Common:
    """What the two kinds of connection share: the URL and how it is shown."""

    def __init__(self, url: str, target: _Target | None) -> None:
        self.url = url
        """The URL as given, with its password: for child processes, not for messages."""
        self._target = target

    @property
    def safe_url(self) -> str:
        return hide_password(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.safe_url!r})"

    def _judge(self, error: Exception) -> None:
        """Raise SettingError if this failed ping will not pass by itself."""
        for cause in tls.causes(error):
            if isinstance(cause, (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)):
                raise SettingError(
                    f"redis URL {self.safe_url!r}: {cause}; check user name and password"
                ) from None
        if isinstance(error, redis.exceptions.ResponseError) and not isinstance(error, RETRYABLE):
            raise SettingError(f"redis URL {self.safe_url!r}: the server answers {error}") from None
        if self._target is not None and (reason := tls.refusal(error, self._target.given)):
            raise SettingError(f"redis URL {self.safe_url!r}: TLS fails with {reason}") from None

    def _give_up(self, error: Exception, timeout: float) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"no answer from {self.safe_url} within {timeout:g} s ({error}): start the server or correct the URL"
        )

    def _warn_once(self) -> Callable[[Exception], None]:
        said: list[Exception] = []

        def warn(error: Exception) -> None:
            if not said:
                logger.warning("waiting for %s: %s", self.safe_url, error)
            said.append(error)

        return warn

    def _check_single_node(self, info: dict[str, Any]) -> None:
        if self._target is None or self._target.cluster or not info.get("cluster_enabled"):
            return
        remedy = self.safe_url.replace("://", "+cluster://", 1)
        raise SettingError(f"redis URL {self.safe_url!r}: this server is a cluster node, write {remedy!r}")


class Connection(_Common):
    """The clients of one process for one server or cluster. Making it does not touch the network.

    URL schemes: redis, rediss (TLS), unix, redis+cluster, rediss+cluster; user, password, database and TLS
    options as redis-py understands them (`?ssl_ca_certs=...`). Safe to share between threads. Replies are
    bytes. Raises SettingError on a bad URL.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, _parse(url))
        self._clients: dict[str, redis.Redis] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_client(cls, client: Any) -> Self:
        """A connection that uses this client in every role (fakeredis in tests); its owner closes it."""
        self = cls.__new__(cls)
        _Common.__init__(self, "client://", None)
        self._clients = {"any": client}
        self._lock = threading.Lock()
        return self

    @property
    def scripts(self) -> redis.Redis:
        """For reads and for scripts that may run twice: sends again when a reply is lost."""
        return self._client("scripts", SOCKET_TIMEOUT, SCRIPT_RETRIES)

    @property
    def push(self) -> redis.Redis:
        """For `MULTI` with payload: never sends anything twice. On a lost reply push under a new nonce."""
        return self._client("push", SOCKET_TIMEOUT, 0)

    def blocking(self, block_ms: int) -> redis.Redis:
        """For reads that block up to `block_ms`: times out 5 s after it, never sends again."""
        return self._client(f"blocking {block_ms}", block_ms / 1000 + BLOCK_MARGIN, 0)

    def check(self) -> None:
        """Ask the server once. Raises SettingError if it refuses (password, TLS, database) or is a cluster node and
        the URL does not say so; what may pass by itself (`RETRYABLE`) as it is.
        """
        try:
            self.push.ping()
            self._check_single_node(self._cluster_info())
        except _PING_ERRORS as error:
            self._judge(error)
            raise

    def wait_until_ready(
        self, timeout: float | None = None, on_wait: Callable[[Exception], object] | None = None
    ) -> None:
        """`check` until the server answers, `timeout` seconds at most (None: for ever).

        `on_wait` is called with the error after each failed attempt; the default warns once. Raises
        ServerUnreachableError after `timeout`, and SettingError as `check`.
        """
        start, backoff = time.monotonic(), Backoff()
        on_wait = on_wait or self._warn_once()
        while True:
            try:
                self.check()
                return
            except RETRYABLE as error:
                if timeout is not None and time.monotonic() - start >= timeout:
                    raise self._give_up(error, timeout) from None
                on_wait(error)
            backoff.wait()

    def server_id(self) -> str | None:
        """Changes when the server restarts or another one takes over; None where it does not tell."""
        return _run_id(self.scripts) if self._target is None or not self._target.cluster else None

    def close(self) -> None:
        with self._lock:
            if self._target is not None:
                for client in self._clients.values():
                    client.close()
                self._clients.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _client(self, role: str, socket_timeout: float, retries: int) -> redis.Redis:
        if self._target is None:
            return self._clients["any"]
        with self._lock:
            client = self._clients.get(role)
            if client is None:
                client = self._clients[role] = _make(self._target, socket_timeout, retries)
        return client

    def _cluster_info(self) -> dict[str, Any]:
        if self._target is None or self._target.cluster:
            return {}
        try:
            return self.push.info("cluster")
        except redis.exceptions.NoPermissionError:
            return {}


def _run_id(client: redis.Redis) -> str | None:
    try:
        return client.info("server").get("run_id")
    except RETRYABLE:
        raise
    except redis.exceptions.ResponseError:  # not permitted, or not known to this server
        return None


def _make(target: _Target, socket_timeout: float, retries: int) -> redis.Redis:
    options = target.shared_options | {"socket_timeout": socket_timeout}
    retry = Retry(FullJitterBackoff(cap=1.0, base=0.05) if retries else NoBackoff(), retries)
    if target.cluster:
        # Asks the cluster for its nodes at once, which is why clients are made at first use. It has the
        # commands of Redis, without being a subclass.
        return cast(redis.Redis, redis.cluster.RedisCluster.from_url(target.url, retry=retry, **options))
    if retries:
        options["retry_on_error"] = list(SENT_AGAIN_ON)
    options["command_packer"] = Packer()  # a cluster's client takes none: it copies
    pool = redis.BlockingConnectionPool.from_url(
        target.url, max_connections=MAX_CONNECTIONS, timeout=None, retry=retry, **options
    )
    return redis.Redis.from_pool(pool)


class AsyncConnection(_Common):
    """`Connection` for asyncio, without blocking reads: what producers need. Use it from one event loop."""

    def __init__(self, url: str) -> None:
        super().__init__(url, _parse(url))
        self._clients: dict[str, redis.asyncio.Redis] = {}

    @classmethod
    def from_client(cls, client: Any) -> Self:
        """A connection that uses this client in every role (fakeredis in tests); its owner closes it."""
        self = cls.__new__(cls)
        _Common.__init__(self, "client://", None)
        self._clients = {"any": client}
        return self

    @property
    def scripts(self) -> redis.asyncio.Redis:
        """For reads and for scripts that may run twice: sends again when a reply is lost."""
        return self._client("scripts", SCRIPT_RETRIES)

    @property
    def push(self) -> redis.asyncio.Redis:
        """For `MULTI` with payload: never sends anything twice. On a lost reply push under a new nonce."""
        return self._client("push", 0)

    async def check(self) -> None:
        """As `Connection.check`."""
        try:
            await self.push.ping()
            self._check_single_node(await self._cluster_info())
        except _PING_ERRORS as error:
            self._judge(error)
            raise

    async def wait_until_ready(
        self,
        timeout: float | None = None,  # noqa: ASYNC109  the same arguments as the sync one
        on_wait: Callable[[Exception], object] | None = None,
    ) -> None:
        """As `Connection.wait_until_ready`."""
        start, backoff = time.monotonic(), Backoff()
        on_wait = on_wait or self._warn_once()
        while True:
            try:
                await self.check()
                return
            except RETRYABLE as error:
                if timeout is not None and time.monotonic() - start >= timeout:
                    raise self._give_up(error, timeout) from None
                on_wait(error)
            await asyncio.sleep(backoff.delay())

    async def server_id(self) -> str | None:
        """As `Connection.server_id`."""
        if self._target is None or self._target.cluster:
            return None
        try:
            return (await self.scripts.info("server")).get("run_id")
        except RETRYABLE:
            raise
        except redis.exceptions.ResponseError:
            return None

    async def close(self) -> None:
        if self._target is not None:
            for client in self._clients.values():
                await client.aclose()
            self._clients.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _client(self, role: str, retries: int) -> redis.asyncio.Redis:
        if self._target is None:
            return self._clients["any"]
        client = self._clients.get(role)
        if client is None:
            client = self._clients[role] = _make_async(self._target, retries)
        return client

    async def _cluster_info(self) -> dict[str, Any]:
        if self._target is None or self._target.cluster:
            return {}
        try:
            return await self.push.info("cluster")
        except redis.exceptions.NoPermissionError:
            return {}


def _make_async(target: _Target, retries: int) -> redis.asyncio.Redis:
    options = target.shared_options | {"socket_timeout": SOCKET_TIMEOUT}
    retry = redis.asyncio.retry.Retry(
        FullJitterBackoff(cap=1.0, base=0.05) if retries else NoBackoff(), retries
    )
    if target.cluster:
        cluster = redis.asyncio.cluster.RedisCluster.from_url(target.url, retry=retry, **options)
        return cast(redis.asyncio.Redis, cluster)
    if retries:
        options["retry_on_error"] = list(SENT_AGAIN_ON)
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        target.url, max_connections=MAX_CONNECTIONS, timeout=None, retry=retry, **options
    )
    return redis.asyncio.Redis.from_pool(pool)
