"""Transient errors, such as those of a failover or a moving slot: which they are, and how long to wait for a retry."""

from __future__ import annotations

import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import redis.exceptions

from .. import metrics
from ..messages import one_line
from .reasons import Reason
from .tls import causes
from .waiting import Blocked, Wait

T = TypeVar("T")


class NotNowError(redis.exceptions.ResponseError):
    """The server does not answer or write for now. The first word of its reply says why: see `classified`."""


RETRYABLE: Final[tuple[type[Exception], ...]] = (
    redis.exceptions.ConnectionError,  # also BusyLoadingError: the server is reading its data
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,  # failover: this was the primary a moment ago
    redis.exceptions.ClusterError,  # also CLUSTERDOWN and MASTERDOWN
    redis.exceptions.TryAgainError,
    redis.exceptions.AskError,  # also MOVED: not executed, the next attempt goes to the right node
    redis.exceptions.RedisClusterException,  # no node of the cluster answers, or none has the slot
    NotNowError,
)
"""Transient errors: wait (`Outage`), then repeat the whole request; a push under a new nonce."""

SERVER_ERRORS: Final = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException)
"""What the client raises for a server: RedisClusterException, with no node of a cluster in reach, is no RedisError."""

# Too few replicas (min-replicas-to-write), failing snapshots, somebody's long script. redis-py may put the command in
# front, and the reply in the brackets of a tuple.
_NOT_NOW: Final = re.compile(r"""(?:^|: |\(['"])(NOREPLICAS|MISCONF|BUSY|STREAMEND) """)
# EXEC checks all conditions once more, for the transaction as a whole.
_DISCARDED: Final = re.compile(r"Transaction discarded because of: (\w+) ")
_CLASSES: Final[dict[str, type[redis.exceptions.RedisError]]] = {
    "OOM": redis.exceptions.OutOfMemoryError,
    "LOADING": redis.exceptions.BusyLoadingError,
    "READONLY": redis.exceptions.ReadOnlyError,
    "MASTERDOWN": redis.exceptions.MasterDownError,
    "CLUSTERDOWN": redis.exceptions.ClusterDownError,
}


class Outage(Wait):
    """A wait for a server: counts each failure and says at once what is wrong.

    stage: who waits, in the log and in the metric of failures.
    """

    def __init__(
        self, stage: str, *, cap: float = 2.0, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        super().__init__(Blocked(stage, "waiting for the server", first_s=0.0), cap=cap, sleep=sleep)
        self._stage = stage

    def delay_after(self, error: Exception) -> float:
        """Count and report one of RETRYABLE. Returns the seconds to the next attempt."""
        metrics.retried(self._stage, reason_of(error))
        self.because(server_reason(error))
        return self.delay()

    def pause_after(self, error: Exception) -> None:
        """Count and report one of RETRYABLE, and sleep until the next attempt is due."""
        self._sleep(self.delay_after(error))


def server_reason(error: Exception) -> Reason:
    """The reason for a wait that this error causes."""
    unknown = any(isinstance(cause, socket.gaierror) for cause in causes(error))
    name = "name_resolution" if unknown else _WAITS_FOR.get(reason_of(error), "failover")
    text = str(error).partition(" : <redis.")[0]  # the client of each Sentinel, with all its options
    return Reason(name, one_line(text))


_WAITS_FOR: Final = {
    "connection": "server_away",
    "timeout": "server_hangs",
    "loading": "server_loading",
    "busy": "server_busy",
    "misconf": "misconf",
    "streamend": "stream_end",
    "noreplicas": "noreplicas",
}


def reason_of(error: Exception) -> str:
    """The label of a transient error: one of `metrics.instruments.RETRY_REASONS`."""
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return reason
    refused = _NOT_NOW.search(str(error)) if isinstance(error, NotNowError) else None
    return refused[1].lower() if refused else "connection"


# Subclasses before their bases.
_REASONS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (redis.exceptions.BusyLoadingError, "loading"),
    (redis.exceptions.ReadOnlyError, "readonly"),
    (redis.exceptions.MasterDownError, "masterdown"),
    (redis.exceptions.ClusterDownError, "clusterdown"),
    (redis.exceptions.TryAgainError, "tryagain"),
    (redis.exceptions.MovedError, "moved"),
    (redis.exceptions.AskError, "ask"),
    (redis.exceptions.ClusterError, "tryagain"),  # redis-py gave up following TRYAGAIN, MOVED and ASK
    (redis.exceptions.RedisClusterException, "clusterdown"),
    (redis.exceptions.TimeoutError, "timeout"),
)


def classified(error: redis.exceptions.ResponseError) -> redis.exceptions.RedisError:
    """A server's error as a class that callers can catch: NotNowError where redis-py has none for a transient one.

    An error of EXEC gets the class that the command's own error would have (OutOfMemoryError, ReadOnlyError ...).
    """
    text = str(error)
    discarded = _DISCARDED.search(text)
    if discarded and discarded[1] in _CLASSES:
        return _CLASSES[discarded[1]](text)
    return NotNowError(text) if _NOT_NOW.search(text) else error


@contextmanager
def not_now() -> Iterator[None]:
    """Raises a server's errors as `classified`."""
    try:
        yield
    except redis.exceptions.ResponseError as error:
        raise classified(error) from None


@contextmanager
def closed_under_way() -> Iterator[None]:
    """Raises ConnectionError when redis-py's asyncio client fails because its connection was closed meanwhile.

    The server closed it, or another task that found the cluster's layout changed. redis-py or asyncio then raises an
    AttributeError or a TypeError.
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_globals["__name__"].partition(".")[0] not in ("redis", "asyncio"):
            raise
        raise redis.exceptions.ConnectionError(f"connection closed meanwhile: {error}") from error


def patiently(call: Callable[[], T], who: str, *, sleep: Callable[[float], object] = time.sleep) -> T:
    """Call until the server answers. Only for calls that may run twice. `who` names the caller in the log."""
    outage = Outage(who, sleep=sleep)
    while True:
        try:
            result = call()
        except RETRYABLE as error:
            outage.pause_after(error)
        else:
            outage.over()
            return result
