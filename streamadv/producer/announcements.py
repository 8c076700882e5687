"""Waits for admission without polling: the trainer announces in each shard that it may have made room.

Of a producer's callers that a shard has refused, the first one blocks on the shard's stream `admission`
(`lua/lib/announce.lua`) and then asks again; the others stand in line behind it. Nobody waits longer than its pause:
then it asks as well, so an announcement that is lost costs a pause.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import chain
from math import ceil
from typing import Final

from .. import clock, doors
from ..store.connection import AsyncConnection, Connection
from .requests import AdmissionPause

#: Seconds of one read, at most: a producer that closes waits for its end.
BLOCK_S: Final = 0.5
#: Seconds between two reads: a server that does not block is not asked in a loop.
UNBLOCKED_S: Final = 0.01


class Place:
    """A caller's place in a line, until `close`."""

    def __init__(self) -> None:
        self.line: deque[Place] = deque()
        self.wake: Callable[[], object] = bool  # ends its wait for its turn

    @property
    def is_first(self) -> bool:
        return self.line[0] is self

    def close(self) -> None:
        """Let the next one have its turn."""
        if self in self.line:
            self.line.remove(self)
        for first in list(self.line)[:1]:
            first.wake()


class Lines:
    """Who waits for the same room, in the order they came. Threads may share it."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[Place]] = {}

    def join(self, place: Place, room: Hashable) -> None:
        """Stand at the end of the line for this room, unless it stands there already."""
        line = self._lines.setdefault(room, deque())
        if place.line is not line:
            place.close()
            place.line = line
            line.append(place)

    def wake(self) -> None:
        """End all waits for a turn."""
        for place in list(chain(*self._lines.values())):
            place.wake()

    def forget(self) -> None:
        """Who stands there is a thread of the process that this one is a copy of."""
        self._lines.clear()


def await_room(connection: Connection, pause: AdmissionPause, closing: threading.Event) -> None:
    """Return when the pause is over; of the first in line also once there is an announcement."""
    place, rest, turn = pause.place, pause.seconds, doors.Event()
    place.wake = turn.set
    if not place.is_first:
        since = clock.now()
        turn.wait(rest)
        rest -= clock.now() - since
    while place.is_first and rest > 0 and not closing.is_set():
        block_ms = ceil(min(rest, BLOCK_S) * 1000)
        if connection.blocking(block_ms).xread({pause.stream: pause.after}, count=1, block=block_ms):
            return
        closing.wait(UNBLOCKED_S)
        rest -= BLOCK_S


async def await_room_async(
    connection: AsyncConnection, pause: AdmissionPause, over: asyncio.Future[None]
) -> None:
    """As `await_room`. over: done once the producer is closed."""
    place, rest, turn = pause.place, pause.seconds, asyncio.Event()
    place.wake = turn.set
    if not place.is_first:
        since = clock.now()
        with suppress(TimeoutError):
            await asyncio.wait_for(turn.wait(), rest)
        rest -= clock.now() - since
    while place.is_first and rest > 0 and not over.done():
        block_ms = ceil(min(rest, BLOCK_S) * 1000)
        if await connection.blocking.xread({pause.stream: pause.after}, count=1, block=block_ms):
            return
        await asyncio.wait({over}, timeout=UNBLOCKED_S)
        rest -= BLOCK_S
