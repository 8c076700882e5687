"""Transient errors, such as those of a failover or a moving slot: which errors they are, and how long to wait."""

from __future__ import annotations

import re
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import redis.exceptions

from .. import doors, metrics
from ..errors import NotPermittedError
from ..messages import one_line
from .reasons import Reason
from .tls import causes
from .waiting import Blocked, Wait

T = TypeVar("T")


class NotNowError(redis.exceptions.ResponseError):
    """The server does not answer or write for now. The first word of its reply says why: see `classified`."""


class _NotPermitted(NotPermittedError, redis.exceptions.NoPermissionError):
    """Both what users catch and what redis-py raises."""


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
"""What the client raises for a server. RedisClusterException is listed because it does not derive from RedisError."""

# Too few replicas (min-replicas-to-write), failing snapshots, somebody's long script. redis-py may put the command in
# front, and the reply in the brackets of a tuple.
_NOT_NOW: Final = re.compile(r"""(?:^|: |\(['"])(NOREPLICAS|MISCONF|BUSY|STREAMEND) """)
# Of a script whose caller lacks a right; redis-py has a class for other refusals of access rules.
_NOT_PERMITTED: Final = re.compile(r"user executing the script can't|ACL failure in script")
_WORDS: Final = 16  # of a command, among them its first key
_IN_PIPELINE: Final = re.compile(r"Command # \d+ \((.*?)\) of pipeline caused error: ", re.DOTALL)
_RUN_OF_KEY: Final = re.compile(r"\{([A-Za-z0-9_./-]+)(?::\d+:\d+)?\}")
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

    stage: who waits, in the log and in the metric of failures. run: of whoever waits.
    """

    def __init__(self, stage: str, run: str, *, sleep: Callable[[float], object] = doors.sleep) -> None:
        super().__init__(Blocked(stage, "waiting for the server", run, first_s=0.0), sleep=sleep)
        self._stage = stage

    def delay_after(self, error: Exception) -> float:
        """Count and report one of RETRYABLE. Returns the seconds to the next attempt."""
        metrics.retried(self._stage, reason_of(error))
        self.because(server_reason(error))
        return self.delay()

    def pause_after(self, error: Exception) -> None:
        """Count and report one of RETRYABLE, and sleep until the next attempt is due."""
        self._sleep(self.delay_after(error))

    @contextmanager
    def attempt(self, undo: Callable[[], object] | None = None) -> Iterator[None]:
        """Ends the outage, or pauses after one of RETRYABLE, and swallows it: repeat the block. undo: called first."""
        try:
            yield
        except RETRYABLE as error:
            if undo is not None:
                undo()
            self.pause_after(error)
        else:
            self.over()


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


def classified(
    error: redis.exceptions.ResponseError, sent: Sequence[Any] = ()
) -> redis.exceptions.RedisError:
    """A server's error as a class that callers can catch: NotNowError where redis-py has none for a transient one.

    sent: the command and its keys, as far as known. What access rules refuse is a NotPermittedError. An error of EXEC
    gets the class that the command's own error would have (OutOfMemoryError, ReadOnlyError ...).
    """
    text = str(error)
    discarded = _DISCARDED.search(text)
    if discarded and discarded[1] in _CLASSES:
        return _CLASSES[discarded[1]](text)
    if isinstance(error, NotPermittedError):
        return error
    if isinstance(error, redis.exceptions.NoPermissionError) or _NOT_PERMITTED.search(text):
        return _NotPermitted(_not_permitted(text, sent))
    return NotNowError(text) if _NOT_NOW.search(text) else error


def _not_permitted(text: str, sent: Sequence[Any]) -> str:
    """The message for a command that access rules refuse."""
    if in_pipeline := _IN_PIPELINE.match(text):
        text, sent = text[in_pipeline.end() :], in_pipeline[1].split()
    words = [
        word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in sent[:_WORDS]
    ]
    del words[1 : 2 * (words[:1] == ["EVAL"])]  # a script's text
    key = _RUN_OF_KEY.search(" ".join([*words, text]))
    command, run, place = words[0] if words else "a command", "RUN", ""
    if key:
        run, place = key[1], f" of run {key[1]}"
    return one_line(
        f"{command}{place} is not permitted: {text.rstrip('.')}: use the user of the role that does this, "
        f"`streamadv config acl --run {run}` prints roles and users (producer: rollouts, replay; pipeline: workers, "
        "trainer, consume, dead, runs create; observer: status, exporter, evals; the owner: runs change, runs delete, "
        "status --check --deep)"
    )


@contextmanager
def closed_under_way() -> Iterator[None]:
    """Raises ConnectionError when a client of redis-py fails because its connection was closed meanwhile.

    The server closed it, or another thread, or a task that found the cluster's layout changed. redis-py or asyncio then
    raises an AttributeError or a TypeError.
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_globals["__name__"].partition(".")[0] not in ("redis", "asyncio"):
            raise
        raise redis.exceptions.ConnectionError(f"connection closed meanwhile: {error}") from error


@contextmanager
def not_now(sent: Sequence[Any] = ()) -> Iterator[None]:
    """Raises a server's errors as `classified`, and those of a client as `closed_under_way`."""
    try:
        with closed_under_way():
            yield
    except redis.exceptions.ResponseError as error:
        raise classified(error, sent) from None


def patiently(
    call: Callable[[], T], who: str, run: str, *, sleep: Callable[[float], object] = doors.sleep
) -> T:
    """Call until the server answers. Only for calls that may run twice. `who` of which run calls, for the log."""
    outage = Outage(who, run, sleep=sleep)
    while True:
        with outage.attempt():
            return call()
