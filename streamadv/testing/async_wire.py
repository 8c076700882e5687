"""Connections of the world for asyncio: transports, and an event loop by the world's clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import redis.asyncio.connection

from .server import encode
from .strands import Scheduler
from .waits import Event
from .wire import TRIP_S, Commands, Link, block_of, open_link

if TYPE_CHECKING:
    from .world import World

#: Waits that one coroutine may have while it ends.
CLOSES: Final = 20


class Transport(asyncio.Transport):
    """What asyncio writes into. Each request has its effect at a moment of its own."""

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop, label: str) -> None:
        super().__init__()
        self._link = link
        self._loop = loop
        self._label = label
        self._protocol: Any = None
        self._due: deque[tuple[Commands, Sequence[Any]]] = deque()
        self._is_under_way = False
        self._replied = 0.0  # when its last reply arrives
        self._is_closing = False

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        network = self._link.network
        if self._is_closing or self._link.process.dead:
            return
        unit: Commands = []
        for command in self._link.commands(bytes(data)):
            unit.append(command)
            if unit[0][0] != b"MULTI" or command[0] == b"EXEC":
                deviation = network.deviation(self._link.process, self._label, unit)
                self._due.append((unit, deviation))
                unit = []
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_under_way and self._due:
            self._is_under_way = True
            deviation = self._due[0][1]
            slow = deviation[1] if deviation and deviation[0] == "slow" else TRIP_S
            network = self._link.network
            network.at(max(network.time, self._replied) + slow, self._execute)

    def _execute(self) -> None:
        """Execute the first unit that is due, and deliver its replies."""
        link, network = self._link, self._link.network
        self._is_under_way = False
        if not self._due or self._is_closing or link.process.dead:
            return
        unit, deviation = self._due[0]
        network.befall(link.process, deviation, after=False)
        if deviation and deviation[0] == "cut":
            link.closed = True
        if link.process.dead:
            return
        if not link.is_open:
            self._lose()
            return
        replies = [link.execute(command) for command in unit]
        if (waits := block_of(unit[0], replies[0])) is not None:
            self._wait(unit[0], *waits)
        else:
            self._finish(replies, deviation)

    def _finish(self, replies: list[Any], deviation: Sequence[Any]) -> None:
        link, network = self._link, self._link.network
        self._due.popleft()
        network.befall(link.process, deviation, after=True)
        if link.process.dead:
            return
        kind = deviation[0] if deviation else ""
        if kind == "lost":
            link.closed = True
        if not link.is_open:
            self._lose()
            return
        pieces: list[bytes] = []
        for reply in replies:
            encode(reply, pieces)
        self._replied = network.time + (deviation[1] if kind == "late" else 0.0)
        network.at(self._replied, lambda: self._deliver(b"".join(pieces)))
        self._go_on()

    def _wait(self, command: list[bytes], seconds: float, keys: list[bytes]) -> None:
        network = self._link.network
        until, is_over = network.time + seconds, False

        def look() -> None:
            nonlocal is_over
            if is_over or self._is_closing or self._link.process.dead:
                return
            if not self._link.is_open:
                is_over = True
                self._lose()
                return
            reply = self._link.execute(command)
            if reply is not None or network.time >= until:
                is_over = True
                self._finish([reply], ())
            else:
                network.wait_for_entries(keys, look)

        network.wait_for_entries(keys, look)
        network.at(until, look)

    def _deliver(self, data: bytes) -> None:
        if not self._is_closing and not self._link.process.dead:
            self._loop.call_soon_threadsafe(self._received, data)

    def _received(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def _lose(self) -> None:
        self._due.clear()
        if not self._is_closing:
            self._is_closing = True
            error = ConnectionResetError("connection lost")
            self._loop.call_soon_threadsafe(self._protocol.connection_lost, error)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._link.closed = True
            if not self._loop.is_closed():
                self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close


class AsyncConnection(redis.asyncio.connection.Connection):
    """redis-py's for asyncio, without a greeting."""

    network: ClassVar[World]

    async def _connect(self) -> None:
        loop: Any = asyncio.get_running_loop()
        link = open_link(self.network)
        transport = Transport(link, loop, link.process.label("aio"))
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        self._parser.on_connect(self)  # type: ignore[no-untyped-call]

    async def on_connect(self) -> None:
        self._parser.on_connect(self)  # type: ignore[no-untyped-call]


class _Selector:
    """Waits for the loop's next call, or until somebody else has one for it."""

    def __init__(self, world: Scheduler) -> None:
        self._news = Event(world)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._news.wait(timeout)
        else:
            self._news.world.check()
        self._news.clear()
        return []

    def wake(self) -> None:
        self._news.set()

    def close(self) -> None:
        pass


class Loop(asyncio.BaseEventLoop):
    """An event loop by the world's clock. Made, run and closed by one strand."""

    def __init__(self, world: Scheduler) -> None:
        super().__init__()
        self._world = world
        self._selector = _Selector(world)
        self._clock_resolution = 1e-9
        self.set_exception_handler(lambda *_: None)

    def time(self) -> float:
        return self._world.time

    def _process_events(self, _events: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        self._selector.wake()

    def close(self) -> None:
        """As the base's; what is left of tasks is closed here and now, not when memory is collected."""
        asyncio._set_running_loop(self)
        for task in asyncio.all_tasks(self):
            for _ in range(CLOSES):
                try:
                    task.get_coro().close()
                    break
                except BaseException:  # it awaits something while it ends: that ends next
                    continue
        asyncio._set_running_loop(None)
        super().close()
