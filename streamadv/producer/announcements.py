"""Waiting for admission without polling: the trainer announces in each shard that it may have made room.

Producers block on the shard's stream `admission` (`lua/lib/announce.lua`), one read for all threads or tasks of a
process. An announcement ends a pause early, no more: who misses one asks again when the pause is over.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable
from typing import Any, Final

from redis.exceptions import ResponseError

from .. import clock
from ..store.connection import AsyncConnection, Connection
from ..store.retry import RETRYABLE

#: Of one read. After it a listener that nobody waits for any more ends.
BLOCK_MS: Final = 1000
#: Id of an entry: milliseconds, number.
Id = tuple[int, int]
NONE_YET: Final = b"0-0"

_ERRORS: Final[tuple[type[Exception], ...]] = (*RETRYABLE, ResponseError, OSError, ValueError)


def _parsed(entry: bytes) -> Id:
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)


def _newest_in(reply: Any) -> bytes | None:
    """The id of the entry that a read has brought, or None."""
    streams = list(reply.values()) if isinstance(reply, dict) else [stream[1] for stream in reply or ()]
    entries = streams[0] if streams else []
    while entries and isinstance(entries[0], list):  # redis-py nests them in another way for RESP3
        entries = entries[0]
    return entries[0][0] if entries else None


class Announcements:
    """For threads. A daemon thread listens to a shard while somebody waits there."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._newest: dict[str, Id] = {}
        self._waiting: Counter[str] = Counter()
        self._heard: set[str] = set()  # that have a listener
        self._is_closed = False

    def wait(self, key: str, after: bytes, seconds: float) -> None:
        """Return after so many seconds, or once there is an entry after this one, or at the end."""
        seen = _parsed(after or NONE_YET)
        with self._changed:
            self._newest[key] = max(
                seen, self._newest.get(key, seen)
            )  # an older refusal may come to wait later
            self._waiting[key] += 1
            if key not in self._heard:
                self._heard.add(key)
                threading.Thread(
                    target=self._listen,
                    args=(key, after or NONE_YET),
                    name="streamadv-admission",
                    daemon=True,
                ).start()
            self._changed.wait_for(lambda: self._is_closed or self._newest[key] > seen, timeout=seconds)
            self._waiting[key] -= 1

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _listen(self, key: str, after: bytes) -> None:
        while self._is_needed(key):
            started = clock.now()
            try:
                client = self._connection.blocking(BLOCK_MS)
                entry = _newest_in(client.xread({key: after}, count=1, block=BLOCK_MS))
            except _ERRORS:  # who waits asks again when the pause is over
                entry = None
            except Exception:
                if self._is_closed:  # its connection was closed under it
                    return
                raise
            with self._changed:
                if entry is not None:
                    after, self._newest[key] = entry, _parsed(entry)
                    self._changed.notify_all()
                elif clock.now() - started < BLOCK_MS / 2000:  # an error, or a server that does not block
                    self._heard.discard(key)
                    return

    def _is_needed(self, key: str) -> bool:
        with self._changed:
            if self._waiting[key] and not self._is_closed:
                return True
            self._heard.discard(key)
            return False


class AsyncAnnouncements:
    """For tasks of one event loop. A task listens to a shard while another one waits there."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._newest: dict[str, Id] = {}
        self._waiting: Counter[str] = Counter()
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, asyncio.Future[None]] = {}  # done with the next entry

    async def wait(self, key: str, after: bytes, seconds: float, over: Awaitable[None]) -> None:
        """As `Announcements.wait`; `over` ends it too."""
        seen = _parsed(after or NONE_YET)
        self._newest[key] = max(seen, self._newest.get(key, seen))  # an older refusal may come to wait later
        if self._newest[key] > seen:
            return
        self._waiting[key] += 1
        try:
            news = self._news.setdefault(key, asyncio.get_running_loop().create_future())
            if key not in self._listeners:
                self._listeners[key] = asyncio.create_task(self._listen(key, after or NONE_YET))
            await asyncio.wait(
                {asyncio.ensure_future(over), news}, timeout=seconds, return_when="FIRST_COMPLETED"
            )
        finally:
            self._waiting[key] -= 1

    async def close(self) -> None:
        """End the listeners."""
        listeners = list(self._listeners.values())
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)

    async def _listen(self, key: str, after: bytes) -> None:
        try:
            while self._waiting[key]:
                started = clock.now()
                try:
                    entry = _newest_in(
                        await self._connection.blocking.xread({key: after}, count=1, block=BLOCK_MS)
                    )
                except _ERRORS:
                    entry = None
                if entry is not None:
                    after, self._newest[key] = entry, _parsed(entry)
                    self._news.pop(key).set_result(None)
                    self._news[key] = asyncio.get_running_loop().create_future()
                elif clock.now() - started < BLOCK_MS / 2000:
                    return
        finally:
            self._listeners.pop(key, None)
