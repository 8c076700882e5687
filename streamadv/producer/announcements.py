"""Waits for admission without polling: the trainer announces in each shard that it may have made room.

Producers block on the shard's stream `admission` (`lua/lib/announce.lua`). A process has one listener for each shard,
which reads while any thread or task waits for that shard. If the server fails, the listener reports it, pauses and
reads on. The stream keeps its newest entry, so no announcement is lost meanwhile. An announcement only ends a pause
early; a producer that misses it asks again when the pause is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any, Final

from redis.exceptions import ResponseError

from .. import clock, doors
from ..forks import renewed_at_fork
from ..messages import one_line
from ..store.connection import AsyncConnection, Connection
from ..store.reasons import Reason
from ..store.retry import RETRYABLE, Outage
from .requests import STAGE

#: Duration of one read. After it, a listener without waiting callers ends.
BLOCK_MS: Final = 1000
#: Seconds by which a refusal that came before an announcement has reached its wait.
LATE_S: Final = 1.0
#: Id of an entry: milliseconds, number.
Id = tuple[int, int]
NONE_YET: Final = b"0-0"


def _parsed(entry: bytes) -> Id:
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)


def _newest_in(reply: Any) -> Id | None:
    """The id of the entry that a read has brought, or None."""
    if not reply:
        return None
    ((_, entries),) = reply  # of one stream
    return _parsed(entries[0][0])


class _Stream:
    """A shard's announcements, as this process knows them."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.newest: Id = (0, 0)  # entry that anybody here knows of
        self.waiting = 0
        self._since = -math.inf  # when the newest one was new

    def note(self, entry: Id) -> None:
        if entry > self.newest:
            self.newest, self._since = entry, clock.now()

    def note_refusal(self, entry: Id) -> None:
        """Note the entry that a refusal names. An older entry than ours means that the server lost the newer ones."""
        if entry < self.newest and clock.now() > self._since + LATE_S:
            self.newest = entry
        self.note(entry)

    @property
    def following(self) -> dict[Any, Any]:
        """The argument of a read for what comes next."""
        return {self.key: "{}-{}".format(*self.newest)}


def _delay_after(error: Exception, outage: Outage) -> float:
    """Count and report a read that failed. Returns the seconds to the next one. Raises what is no server's error."""
    if isinstance(error, RETRYABLE):
        return outage.delay_after(error)
    if not isinstance(error, ResponseError):
        raise error
    outage.because(Reason("unannounced", one_line(str(error))))
    return outage.delay()


def _rest_of_block(started: float) -> float:
    """Seconds to wait after a read that brought nothing: a server that does not block must not be asked in a loop."""
    return max(0.0, started + BLOCK_MS / 1000 - clock.now())


class Announcements:
    """For threads. While somebody waits for a shard, a daemon thread listens to it."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection, self._run = connection, run
        self._changed = renewed_at_fork(doors.Condition())  # guards what is below
        self._streams: dict[str, _Stream] = {}
        self._listened_to: set[str] = set()
        self._closing = renewed_at_fork(doors.Event())

    def wait(self, key: str, after: bytes, seconds: float) -> None:
        """Return after so many seconds, or once there is an entry after this one, or at the end."""
        seen = _parsed(after or NONE_YET)
        with self._changed:
            stream = self._streams.setdefault(key, _Stream(key))
            stream.note_refusal(seen)
            stream.waiting += 1
            if key not in self._listened_to:
                self._listened_to.add(key)
                doors.Thread(
                    target=self._listen, args=(stream,), name="streamadv-admission", daemon=True
                ).start()
            try:
                self._changed.wait_for(
                    lambda: self._closing.is_set() or stream.newest > seen, timeout=seconds
                )
            finally:  # else an interrupt would leave the listener for ever
                stream.waiting -= 1

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()

    def _listen(self, stream: _Stream) -> None:
        outage = Outage(STAGE, self._run)
        while self._is_needed(stream):
            started = clock.now()
            try:
                client = self._connection.blocking(BLOCK_MS)
                entry = _newest_in(client.xread(stream.following, count=1, block=BLOCK_MS))
            except Exception as error:
                if not self._closing.is_set():  # else its connection was closed under it
                    self._closing.wait(_delay_after(error, outage))
                continue
            outage.over()
            if entry is None:
                self._closing.wait(_rest_of_block(started))
                continue
            with self._changed:
                stream.note(entry)
                self._changed.notify_all()

    def _is_needed(self, stream: _Stream) -> bool:
        with self._changed:
            if stream.waiting and not self._closing.is_set():
                return True
            self._listened_to.discard(stream.key)
            return False


class AsyncAnnouncements:
    """For tasks of one event loop. While somebody waits for a shard, a task listens to it."""

    def __init__(self, connection: AsyncConnection, run: str) -> None:
        self._connection, self._run = connection, run
        self._streams: dict[str, _Stream] = {}
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, asyncio.Future[None]] = {}  # done with the next entry

    async def wait(self, key: str, after: bytes, seconds: float, over: Awaitable[None]) -> None:
        """As `Announcements.wait`; `over` ends it too."""
        seen = _parsed(after or NONE_YET)
        stream = self._streams.setdefault(key, _Stream(key))
        stream.note_refusal(seen)
        if stream.newest > seen:
            return
        stream.waiting += 1
        try:
            news = self._news.setdefault(key, asyncio.get_running_loop().create_future())
            if key not in self._listeners:
                self._listeners[key] = asyncio.create_task(self._listen(stream))
            await asyncio.wait(
                {asyncio.ensure_future(over), news}, timeout=seconds, return_when="FIRST_COMPLETED"
            )
        finally:
            stream.waiting -= 1

    async def close(self) -> None:
        """End the listeners."""
        listeners = list(self._listeners.values())
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)

    async def _listen(self, stream: _Stream) -> None:
        outage = Outage(STAGE, self._run)
        try:
            while stream.waiting:
                started = clock.now()
                try:
                    client = self._connection.blocking
                    entry = _newest_in(await client.xread(stream.following, count=1, block=BLOCK_MS))
                except Exception as error:
                    await asyncio.sleep(_delay_after(error, outage))
                    continue
                outage.over()
                if entry is None:
                    await asyncio.sleep(_rest_of_block(started))
                    continue
                stream.note(entry)
                self._news.pop(stream.key).set_result(None)
                self._news[stream.key] = asyncio.get_running_loop().create_future()
        finally:
            self._listeners.pop(stream.key, None)
