"""The requests that a producer's steps yield, and the one place where a request is sent again.

Steps are generators: they yield requests and receive replies. `Producer` and `AsyncProducer` carry out single
attempts; `attempts` decides what happens between two attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from redis.exceptions import OutOfMemoryError

from ..store.keys import ShardKeys
from ..store.retry import RETRYABLE, Outage
from ..store.scripts import ScriptCall
from .encode import Push
from .extra_columns import ColumnsPush

if TYPE_CHECKING:
    from .announcements import Place

STAGE: Final = "producer"


class GroupCall(NamedTuple):
    """A call of a script that may open a group: `begin`, `columns`, `push` or `cancel`.

    `make` is called for each attempt, because the limits of admission change. Above maxmemory, where the server
    refuses these scripts, the reply is OUT_OF_MEMORY.
    """

    make: Callable[[], ScriptCall | Push | ColumnsPush]


class Pause(NamedTuple):
    """Wait so many seconds, or until the producer is closed."""

    seconds: float


class Rest(NamedTuple):
    """Wait so many seconds, also once it is closed."""

    seconds: float


class AdmissionPause(NamedTuple):
    """Wait so many seconds, or until the trainer announces in a shard that it may have made room."""

    seconds: float
    stream: str
    after: bytes  # the announcement that the refusal knew of; b"0-0" = none
    place: Place  # in the line of those who wait for it


class Memory(NamedTuple):
    """Ask the server for its memory figures; {} where INFO is missing."""


class ServerIds(NamedTuple):
    """Ask which server has each shard; None where it does not tell."""

    shards: Sequence[ShardKeys]


T = TypeVar("T")
Attempt = ScriptCall | Push | ColumnsPush | Pause | Rest | AdmissionPause | Memory | ServerIds
Request = Attempt | GroupCall
Steps = Generator[Request, Any, T]

OUT_OF_MEMORY: Final = [b"busy", b"maxmemory", b"0", b"0", b""]


def attempts(
    steps: Steps[T], check_open: Callable[[], None], run: str, *, patient: bool
) -> Generator[Attempt, Any, T]:
    """Yield each request of `steps` as often as it takes; receives the reply or an exception.

    Calls are repeated until the server answers. Of an impatient one the steps hear that it does not, as of every other
    error. `check_open` is called before each attempt and raises to end the steps.
    """
    outage: Outage | None = None  # made when there is one: most calls succeed at once
    reply: Any = None
    while True:
        try:
            request = steps.throw(reply) if isinstance(reply, Exception) else steps.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        while True:
            check_open()
            attempt = request.make() if isinstance(request, GroupCall) else request
            reply = yield attempt
            if not isinstance(reply, Exception):
                break
            if isinstance(reply, OutOfMemoryError) and isinstance(request, GroupCall):
                reply = OUT_OF_MEMORY
                break
            if not isinstance(reply, RETRYABLE) or not patient:
                break
            outage = outage or Outage(STAGE, run)
            yield Pause(outage.delay_after(reply))
        if outage is not None and not isinstance(reply, Exception):
            outage.over()
