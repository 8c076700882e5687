"""The commands of a simulated server, without those of streams, by a clock that is given.

Expired keys go when somebody asks for them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from .values import (
    COMMANDS,
    OK,
    WRONG_TYPE,
    Command,
    Refusal,
    SortedSet,
    Status,
    command,
    real,
    score_text,
    whole,
)


class Keyspace:
    """The data of one server. now_ms: its clock."""

    def __init__(self, now_ms: Callable[[], int], info: Callable[[], str]) -> None:
        self.now_ms = now_ms
        self.info_text = info
        self.data: dict[bytes, Any] = {}
        self.ends: dict[bytes, int] = {}  # when keys expire
        self.added: set[bytes] = set()  # streams that entries came to

    # Looking up

    def _get(self, key: bytes, kind: type[Any]) -> Any:
        if self.ends:
            self._expire(key)
        value = self.data.get(key)
        if value is not None and type(value) is not kind:
            raise Refusal(WRONG_TYPE)
        return value

    def _make(self, key: bytes, kind: type[Any]) -> Any:
        value = self._get(key, kind)
        if value is None:
            value = self.data[key] = kind()
        return value

    def _expire(self, key: bytes) -> None:
        end = self.ends.get(key)
        if end is not None and self.now_ms() >= end:
            self._drop(key)

    def _drop(self, key: bytes) -> bool:
        self.ends.pop(key, None)
        return self.data.pop(key, None) is not None

    def _tidy(self, key: bytes, value: Any) -> None:
        if not value:
            self._drop(key)

    def _remove(self, key: bytes, kind: type[Any], names: Sequence[bytes]) -> int:
        value = self._get(key, kind)
        if value is None:
            return 0
        gone = sum(value.pop(name, None) is not None for name in names)
        self._tidy(key, value)
        return gone

    # Server

    @command()
    def ping(self, *_: bytes) -> Any:
        return Status(b"PONG")

    @command()
    def time(self) -> Any:
        now = self.now_ms()
        return [b"%d" % (now // 1000), b"%d" % (now % 1000 * 1000)]

    @command()
    def info(self, *_: bytes) -> Any:
        return self.info_text().encode()

    # Keys

    @command()
    def keys(self, pattern: bytes) -> Any:
        for key in list(self.ends):
            self._expire(key)
        match = re.compile(fnmatch.translate(pattern.decode("latin1")).encode("latin1"), re.DOTALL).match
        return [key for key in self.data if match(key)]

    @command()
    def scan(self, _cursor: bytes, *options: bytes) -> Any:
        given = {name.upper(): value for name, value in zip(options[::2], options[1::2], strict=True)}
        return [b"0", self.keys(given.get(b"MATCH", b"*"))]

    @command()
    def exists(self, *keys: bytes) -> Any:
        for key in keys:
            self._expire(key)
        return sum(key in self.data for key in keys)

    @command(writes=True)
    def _del(self, *keys: bytes) -> Any:
        for key in keys:
            self._expire(key)
        return sum([self._drop(key) for key in keys])

    @command(writes=True)
    def rename(self, key: bytes, target: bytes) -> Any:
        self._expire(key)
        if key not in self.data:
            raise Refusal("ERR no such key")
        self._drop(target)
        self.data[target] = self.data.pop(key)
        if key in self.ends:
            self.ends[target] = self.ends.pop(key)
        return OK

    @command(writes=True)
    def persist(self, key: bytes) -> Any:
        self._expire(key)
        return int(self.ends.pop(key, None) is not None)

    @command(writes=True)
    def pexpire(self, key: bytes, milliseconds: bytes) -> Any:
        self._expire(key)
        if key not in self.data:
            return 0
        self.ends[key] = self.now_ms() + whole(milliseconds)
        return 1

    @command()
    def pttl(self, key: bytes) -> Any:
        self._expire(key)
        if key not in self.data:
            return -2
        return self.ends[key] - self.now_ms() if key in self.ends else -1

    # Strings

    @command()
    def get(self, key: bytes) -> Any:
        return self._get(key, bytes)

    @command()
    def getrange(self, key: bytes, first: bytes, last: bytes) -> Any:
        return (self._get(key, bytes) or b"")[int(first) : int(last) + 1]

    @command(needs_memory=True)
    def setrange(self, key: bytes, offset: bytes, value: bytes) -> Any:
        before = self._get(key, bytes) or b""
        head = before[: int(offset)].ljust(int(offset), b"\0")
        self.data[key] = head + value + before[len(head) + len(value) :]
        return len(self.data[key])

    # Hashes

    @command(needs_memory=True)
    def hset(self, key: bytes, *pairs: bytes) -> Any:
        if not pairs or len(pairs) % 2:
            raise Refusal("ERR wrong number of arguments for 'hset' command")
        fields = self._make(key, dict)
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    @command(needs_memory=True)
    def hsetnx(self, key: bytes, field: bytes, value: bytes) -> Any:
        fields = self._make(key, dict)
        if field in fields:
            return 0
        fields[field] = value
        return 1

    @command(needs_memory=True)
    def hincrby(self, key: bytes, field: bytes, by: bytes) -> Any:
        fields = self._make(key, dict)
        total = whole(fields.get(field, b"0")) + whole(by)
        fields[field] = b"%d" % total
        return total

    @command(writes=True)
    def hdel(self, key: bytes, *names: bytes) -> Any:
        return self._remove(key, dict, names)

    # Lists

    @command(needs_memory=True)
    def rpush(self, key: bytes, *items: bytes) -> Any:
        stored = self._make(key, list)
        stored.extend(items)
        return len(stored)

    @command(needs_memory=True)
    def lpushx(self, key: bytes, *items: bytes) -> Any:
        stored = self._get(key, list)
        if stored is None:
            return 0
        stored[:0] = reversed(items)
        return len(stored)

    @command(writes=True)
    def lrem(self, key: bytes, count: bytes, item: bytes) -> Any:
        stored, limit = self._get(key, list), whole(count)
        if stored is None:
            return 0
        if limit < 0:
            raise Refusal("ERR this world removes from the head only")
        places = [place for place, each in enumerate(stored) if each == item]
        places = places[:limit] if limit else places
        for place in reversed(places):
            del stored[place]
        self._tidy(key, stored)
        return len(places)

    # Sorted sets

    @command(needs_memory=True)
    def zadd(self, key: bytes, *pairs: bytes) -> Any:
        scores = {name: real(score) for score, name in zip(pairs[::2], pairs[1::2], strict=True)}
        members = self._make(key, SortedSet)
        before = len(members)
        members.update(scores)
        return len(members) - before

    @command(writes=True)
    def zrem(self, key: bytes, *names: bytes) -> Any:
        return self._remove(key, SortedSet, names)


def _slice(items: list[Any], first: int, last: int) -> list[Any]:
    count = len(items)
    first, last = (max(0, count + at) if at < 0 else at for at in (first, last))
    return items[first : last + 1] if last >= 0 else []


def _members(items: Sequence[tuple[bytes, float]], options: Sequence[bytes]) -> list[bytes]:
    if any(option.upper() == b"WITHSCORES" for option in options):
        return [part for name, score in items for part in (name, score_text(score))]
    return [name for name, _ in items]


def _in_order(members: SortedSet, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
    return _members(_slice(members.in_order(), whole(first), whole(last)), options)


def _by_score(members: SortedSet, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
    def is_inside(score: float) -> bool:
        above = score > real(low[1:]) if low[:1] == b"(" else score >= real(low)
        return above and (score < real(high[1:]) if high[:1] == b"(" else score <= real(high))

    inside = [item for item in members.in_order() if is_inside(item[1])]
    given = [option.upper() for option in options]
    if b"LIMIT" in given:
        at = given.index(b"LIMIT")
        start, count = whole(options[at + 1]), whole(options[at + 2])
        inside = inside[start:] if count < 0 else inside[start : start + count]
    return _members(inside, options)


def _score(members: SortedSet, name: bytes) -> bytes | None:
    score = members.get(name)
    return None if score is None else score_text(score)


def _reader(kind: type[Any], read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda store, key, *args: read(store._get(key, kind) or kind(), *args)


#: Commands that read what one key holds, or nothing of its kind.
_READ: Final[dict[bytes, tuple[type[Any], Callable[..., Any]]]] = {
    b"HGET": (dict, dict.get),
    b"HMGET": (dict, lambda fields, *names: [fields.get(name) for name in names]),
    b"HGETALL": (dict, lambda fields: [part for pair in fields.items() for part in pair]),
    b"HKEYS": (dict, list),
    b"HLEN": (dict, len),
    b"HEXISTS": (dict, lambda fields, name: int(name in fields)),
    b"LLEN": (list, len),
    b"LRANGE": (list, lambda items, first, last: _slice(items, whole(first), whole(last))),
    b"ZSCORE": (SortedSet, _score),
    b"ZCARD": (SortedSet, len),
    b"ZRANGE": (SortedSet, _in_order),
    b"ZRANGEBYSCORE": (SortedSet, _by_score),
    b"ZSCAN": (SortedSet, lambda members, *_: [b"0", _members(members.in_order(), [b"WITHSCORES"])]),
}
COMMANDS[b"UNLINK"] = COMMANDS[b"DEL"]
COMMANDS.update({name: Command(_reader(*how), False, False) for name, how in _READ.items()})
