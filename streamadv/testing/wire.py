"""Connections of the world: redis-py's classes over sockets and transports that lead to a simulated server."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import hiredis
import redis.asyncio.connection
import redis.connection

from .server import Session, encode
from .strands import Process, Stuck

if TYPE_CHECKING:
    from .world import World

#: Seconds from a request to its effect.
TRIP_S: Final = 0.0005
URL: Final = "redis://world:1/0"

Commands = list[list[bytes]]


class Link:
    """One connection: requests go in, replies come out. `is_open` tells whether either end has closed it."""

    def __init__(self, network: World, process: Process) -> None:
        self.network = network
        self.process = process
        self.session = Session(network.server.generation)
        self.requests = hiredis.Reader()
        self.closed = False

    @property
    def is_open(self) -> bool:
        server = self.network.server
        return not self.closed and server.is_up and self.session.generation == server.generation

    def commands(self, data: bytes) -> Commands:
        """The whole commands in what has been sent."""
        self.requests.feed(data)
        found = []
        while (command := self.requests.gets()) is not False:
            found.append(command)
        return found

    def execute(self, command: list[bytes]) -> Any:
        return self.network.server.execute(self.session, command)


def block_of(command: list[bytes], reply: Any) -> tuple[float, list[bytes]] | None:
    """For how many seconds, and on which streams, a command that has brought nothing waits; None: it does not."""
    if reply is not None or command[0].upper() not in (b"XREAD", b"XREADGROUP"):
        return None
    names = [part.upper() for part in command]
    if b"BLOCK" not in names:
        return None
    streams = names.index(b"STREAMS") + 1
    seconds = int(command[names.index(b"BLOCK") + 1]) / 1000
    return seconds or math.inf, command[streams : streams + (len(command) - streams) // 2]


class Socket:
    """What production code does with a socket."""

    def __init__(self, link: Link, timeout: float) -> None:
        self._link = link
        self._timeout = timeout
        self._incoming = b""
        self._due: deque[list[bytes]] = deque()  # sent and not executed
        self._deviation: Sequence[Any] = ()

    def sendall(self, data: Any) -> None:
        link, network = self._link, self._link.network
        network.check()
        commands = link.commands(bytes(data))
        if not commands:
            return
        strand = network.current
        assert strand is not None
        self._deviation = network.deviation(link.process, strand.name, commands)
        kind = self._deviation[0] if self._deviation else ""
        network.park(network.time + (self._deviation[1] if kind == "slow" else TRIP_S))
        network.befall(link.process, self._deviation, after=False)
        network.check()
        if kind == "cut":
            link.closed = True
        if not link.is_open:
            raise ConnectionResetError("connection lost")
        self._due.extend(commands)
        self._go_on()

    def _go_on(self, is_over: bool = False) -> None:
        """Execute what is due; a command that waits stays, unless its time is over."""
        link, network = self._link, self._link.network
        pieces: list[bytes] = []
        while self._due and link.is_open:
            reply = link.execute(self._due[0])
            if block_of(self._due[0], reply) is not None and not is_over:
                break
            is_over = False
            self._due.popleft()
            encode(reply, pieces)
        self._incoming += b"".join(pieces)
        if not self._due and self._deviation:
            kind, *rest = self._deviation
            network.befall(link.process, self._deviation, after=True)
            self._deviation = ()
            if kind == "lost":
                link.closed = True
            elif kind == "late":
                network.park(network.time + rest[0])
            network.check()

    def recv(self, size: int) -> bytes:
        link, network = self._link, self._link.network
        network.check()
        timeout = network.time + self._timeout
        while not self._incoming:
            if not link.is_open:
                return b""
            if not self._due:
                raise RuntimeError("a read of what nobody has sent")
            self._wait(timeout)
            self._go_on()
        if not link.is_open:  # the reply was under way
            return b""
        data, self._incoming = self._incoming[:size], self._incoming[size:]
        return data

    def _wait(self, timeout: float) -> None:
        """Wait until the command that is due may bring something, or its time is over."""
        network = self._link.network
        waits = block_of(self._due[0], None)
        assert waits is not None
        strand = network.current
        assert strand is not None
        until = min(timeout, network.time + waits[0])
        network.wait_for_entries(waits[1], partial(network.wake, strand, token=strand.token))
        network.park(until)
        if network.time >= timeout:
            raise TimeoutError("timed out")
        if network.time >= until:
            self._go_on(is_over=True)

    def recv_into(self, place: Any, size: int = 0) -> int:
        view = memoryview(place).cast("B")
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def settimeout(self, timeout: float | None) -> None:
        pass

    def has_news(self) -> bool:
        return bool(self._incoming) or not self._link.is_open

    def close(self) -> None:
        self._link.closed = True


def open_link(network: World) -> Link:
    """A connection of the process that has its turn. Raises ConnectionRefusedError, Stuck."""
    if not network.is_inside():
        raise Stuck("a thread that is none of the world's opens a connection: end it before the world begins")
    network.check()
    if not network.server.is_up:
        raise ConnectionRefusedError("connection refused")
    return Link(network, network.process)


class Connection(redis.connection.Connection):
    """redis-py's, without a greeting."""

    network: ClassVar[World]

    def connect(self) -> None:
        if self._sock is None:
            try:
                link = open_link(self.network)
            except OSError as error:
                raise redis.exceptions.ConnectionError(f"Error connecting to world: {error}") from None
            self._sock: Any = Socket(link, self.socket_timeout or math.inf)
            self._parser.on_connect(self)

    def connect_check_health(self, *_: Any, **__: Any) -> None:
        """Called for a command on a closed connection."""
        self.connect()

    def disconnect(self, *_: Any, **__: Any) -> None:
        self._parser.on_disconnect()
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def can_read(self, timeout: float = 0) -> bool:
        return bool(self._sock.has_news())
