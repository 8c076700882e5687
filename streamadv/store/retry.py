"""Outages: what passes by itself, a failover or a moving slot among it, is waited for, done again, and counted."""

from __future__ import annotations

import random
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
from .tls import causes
from .waiting import SAY_S, Reason, Waiting

T = TypeVar("T")


class NotNowError(redis.exceptions.ResponseError):
    """The server does not answer or write for now, and says in its first word why: see `classified`."""


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
"""What passes by itself: wait (`Backoff`) and do the whole thing again; a push under a new nonce."""

# Too few replicas (min-replicas-to-write), snapshots that fail, somebody's script that runs long. redis-py may put in
# front which command it was, and the reply in the brackets of a tuple.
_NOT_NOW: Final = re.compile(r"""(?:^|: |\(['"])(NOREPLICAS|MISCONF|BUSY|STREAMEND) """)
# What EXEC refuses, as it checks all conditions once more for the transaction as a whole.
_DISCARDED: Final = re.compile(r"Transaction discarded because of: (\w+) ")
_CLASSES: Final[dict[str, type[redis.exceptions.RedisError]]] = {
    "OOM": redis.exceptions.OutOfMemoryError,
    "LOADING": redis.exceptions.BusyLoadingError,
    "READONLY": redis.exceptions.ReadOnlyError,
    "MASTERDOWN": redis.exceptions.MasterDownError,
    "CLUSTERDOWN": redis.exceptions.ClusterDownError,
}


class Backoff:
    """Waits between attempts: the n-th is uniform in [0, min(cap, base * 2**n)] seconds (full jitter).

    `sleep` takes seconds; give `Event.wait` to end the wait early. `draw` returns a number in [0, 1). From one success
    to the next it is one wait, which `because` says why.
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
        self._waiting: Waiting | None = None

    def delay(self) -> float:
        """Count one more failure and return the seconds to wait after it."""
        limit = min(self._cap, self._base * 2.0 ** min(self.failures, 64))
        self.failures += 1
        return limit * self._draw()

    def wait(self) -> None:
        self._sleep(self.delay())

    def because(self, who: str, what: str, *reasons: Reason, first_s: float = SAY_S) -> None:
        """Why `who` is in the state `what`: said after `first_s` seconds, then every SAY_S."""
        if self._waiting is None:
            self._waiting = Waiting(who, what, first_s)
        self._waiting.because(*reasons)

    def reset(self) -> None:
        """Call after a success."""
        self.failures = 0
        if self._waiting is not None:
            self._waiting.over()
            self._waiting = None


def retried(stage: str, error: Exception, backoff: Backoff) -> None:
    """Count and say what will be tried again; the caller then waits. `backoff` tells one outage from the next."""
    metrics.retried(stage, reason_of(error))
    backoff.because(stage, "waiting for the server", server_reason(error), first_s=0.0)


def server_reason(error: Exception) -> Reason:
    """What of the server or the network is waited for."""
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
    """Why something is tried again: one of `metrics.RETRY_REASONS`."""
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return reason
    refused = _NOT_NOW.search(str(error)) if isinstance(error, NotNowError) else None
    return refused[1].lower() if refused else "connection"


# Kinds before what they are kinds of.
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
    """The error by its class where redis-py has none for it: NotNowError for what passes by itself.

    What EXEC refuses is classed as if the command had been refused (OutOfMemoryError, ReadOnlyError ...).
    """
    text = str(error)
    discarded = _DISCARDED.search(text)
    if discarded and discarded[1] in _CLASSES:
        return _CLASSES[discarded[1]](text)
    return NotNowError(text) if _NOT_NOW.search(text) else error


@contextmanager
def not_now() -> Iterator[None]:
    """Raises the server's refusals as `classified`."""
    try:
        yield
    except redis.exceptions.ResponseError as error:
        raise classified(error) from None


@contextmanager
def closed_under_way() -> Iterator[None]:
    """Raises ConnectionError where redis-py's asyncio client stumbles over a connection that was closed meanwhile.

    By the server, or by another task that found the cluster's layout changed; it is left an AttributeError or a
    TypeError then, of redis-py's or asyncio's code.
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_globals["__name__"].partition(".")[0] not in ("redis", "asyncio"):
            raise
        raise redis.exceptions.ConnectionError(f"connection closed meanwhile: {error}") from error


def patiently(call: Callable[[], T], who: str, *, sleep: Callable[[float], object] = time.sleep) -> T:
    """`call()`, again until the server answers: for what may simply be done twice. `who` is for the log."""
    backoff = Backoff(sleep=sleep)
    while True:
        try:
            result = call()
        except RETRYABLE as error:
            retried(who, error, backoff)
            backoff.wait()
        else:
            backoff.reset()
            return result
