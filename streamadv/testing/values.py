"""What a simulated server stores, as plain containers, and how commands on it are registered.

A command takes bytes and returns what RESP2 would carry: whole numbers, bytes, None, lists, `Status`; it raises
`Refusal`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final, NamedTuple

Id = tuple[int, int]

LAST_ID: Final = (2**64 - 1, 2**64 - 1)


class Refusal(Exception):
    """An error that the server answers."""


class Status(bytes):
    """A reply such as OK."""


OK: Final = Status(b"OK")


class Command(NamedTuple):
    """One command: what does it, whether it writes, and whether it is refused above maxmemory."""

    call: Callable[..., Any]
    writes: bool
    needs_memory: bool


COMMANDS: Final[dict[bytes, Command]] = {}


def command(*, writes: bool = False, needs_memory: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Register a method of `Store` as the command of its name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_").upper().encode()
        COMMANDS[name] = Command(function, writes or needs_memory, needs_memory)
        return function

    return register


class Pending:
    __slots__ = ("consumer", "count", "when")

    def __init__(self, consumer: bytes, when: int, count: int) -> None:
        self.consumer, self.when, self.count = consumer, when, count


class ConsumerGroup:
    def __init__(self, last: Id) -> None:
        self.last = last
        self.pending: dict[Id, Pending] = {}
        self.consumers: dict[bytes, int] = {}  # -> when it was heard of

    def copy(self) -> ConsumerGroup:
        other = ConsumerGroup(self.last)
        other.pending = {i: Pending(p.consumer, p.when, p.count) for i, p in self.pending.items()}
        other.consumers = dict(self.consumers)
        return other


class Stream:
    """Entries by id; `ids` has their order."""

    def __init__(self) -> None:
        self.ids: list[Id] = []
        self.entries: dict[Id, list[bytes]] = {}
        self.last: Id = (0, 0)
        self.groups: dict[bytes, ConsumerGroup] = {}

    def copy(self) -> Stream:
        other = Stream()
        other.ids, other.entries, other.last = list(self.ids), dict(self.entries), self.last
        other.groups = {name: group.copy() for name, group in self.groups.items()}
        return other

    def after(self, last: Id, count: int | None) -> list[Id]:
        start = bisect_right(self.ids, last)
        return self.ids[start:] if count is None else self.ids[start : start + count]


class SortedSet(dict[bytes, float]):
    """Members with scores."""

    def in_order(self) -> list[tuple[bytes, float]]:
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


WRONG_TYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"
NO_INTEGER: Final = "ERR value is not an integer or out of range"
_WHOLE: Final = re.compile(rb"-?(0|[1-9]\d{0,18})").fullmatch
BAD_ID: Final = "ERR Invalid stream ID specified as stream command argument"


def id_text(entry: Id) -> bytes:
    """An id as it travels."""
    return b"%d-%d" % entry


def id_of(text: bytes, missing: int = 0) -> Id:
    """An id from its text. missing: the second number where there is none."""
    first, dash, second = text.partition(b"-")
    if not first.isdigit() or (dash and not second.isdigit()):
        raise Refusal(BAD_ID)
    number = (int(first), int(second) if dash else missing)
    if number > LAST_ID:
        raise Refusal(BAD_ID)
    return number


def whole(text: bytes) -> int:
    """A whole number of 64 bits."""
    if not _WHOLE(text) or not -(2**63) <= (number := int(text)) < 2**63 or text == b"-0":
        raise Refusal(NO_INTEGER)
    return number


def real(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise Refusal("ERR value is not a valid float") from None


def score_text(score: float) -> bytes:
    """A score as it travels."""
    if score in (float("inf"), float("-inf")):
        return b"inf" if score > 0 else b"-inf"
    return b"%d" % score if score == int(score) and abs(score) < 1e17 else b"%.17g" % score


def copy_of(value: Any) -> Any:
    """A value that later writes leave alone."""
    if isinstance(value, SortedSet):
        return SortedSet(value)
    return value if isinstance(value, bytes) else value.copy()
