"""Sends commands over redis-py's connections without redis-py's bookkeeping per command.

That bookkeeping costs more than packing and sending a small call.
"""

from __future__ import annotations

import queue
import ssl
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, cast

import hiredis
import redis
import redis.exceptions

from .resp import INCOMPLETE, Piece, gathered, make_reader
from .retry import classified, closed_under_way

#: Most pieces in one call of sendmsg.
MAX_PIECES: Final = 1024
#: Bytes of one read.
RECEIVED: Final = 64 << 10


class _Stack:
    """A `queue.LifoQueue` as redis-py's pool uses it, with locks of C alone."""

    def __init__(self, maxsize: int) -> None:
        self.queue: list[Any] = []
        self._maxsize = maxsize
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each item

    def get(self) -> Any:
        """The item put last; waits for one."""
        self._tokens.get()
        return self.queue.pop()

    def put_nowait(self, item: Any) -> None:
        """Raises queue.Full."""
        if len(self.queue) >= self._maxsize:
            raise queue.Full
        self.queue.append(item)
        self._tokens.put(None)


class Pool(redis.BlockingConnectionPool):
    """redis-py's pool: what a client sends travels over one of these connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(queue_class=_Stack, **options)  # type: ignore[no-untyped-call]

    def get_connection(self, *_: Any, **__: Any) -> Any:
        """A connection that works as far as one can tell. Blocks until one is free.

        Raises what a server refuses the connection with, as `classified`.
        """
        self._checkpid()
        connection: Any = self.pool.get() or cast(Any, self).make_connection()
        try:
            if connection._sock is None:
                connection.connect()
            if _is_dirty(connection):
                connection.disconnect()
                connection.connect()
        except BaseException as error:
            connection.disconnect()  # after an interrupt it may be no more than half ready
            self.release(connection)
            if isinstance(error, redis.exceptions.ResponseError):
                raise classified(error) from None
            with closed_under_way():
                raise
        return connection

    def release(self, connection: Any) -> None:
        """Take it back; a copy of the pool in a forked process takes none of its parent's."""
        self._checkpid()
        if connection.pid == self.pid:
            self.pool.put_nowait(connection)
        else:
            connection.disconnect()
            self.pool.put_nowait(None)


def _is_dirty(connection: Any) -> bool:
    """Whether a connection was closed by the server, or has replies that nobody has read."""
    try:
        return bool(connection.can_read())
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
        return True


def exchange(connection: Any, pieces: Sequence[Piece], count: int) -> list[Any]:
    """Send commands and read so many replies, refusals among them. Raises redis' ConnectionError or TimeoutError."""
    return list(replies(connection, pieces, count))


def replies(connection: Any, pieces: Sequence[Piece], count: int) -> Generator[Any]:
    """`exchange`, giving each reply as soon as it has come. Who does not take all of them closes the iterator."""
    try:
        if connection._sock is None:
            connection.connect()
        sock = _socket_of(connection)
        _send(sock, pieces)
        yield from _receive(sock, count, _reader_of(connection))
    except BaseException as error:  # after an interrupt too: what is not read yet would answer another call
        connection.disconnect()
        connection.streamadv_reader = None
        if isinstance(error, TimeoutError):
            raise redis.exceptions.TimeoutError(f"no reply: {error}") from error
        if isinstance(error, OSError):
            raise redis.exceptions.ConnectionError(f"connection lost: {error}") from error
        with closed_under_way():
            raise


def _socket_of(connection: Any) -> Any:
    """The socket of an open connection. Raises redis' ConnectionError if another thread has closed it meanwhile."""
    if (sock := connection._sock) is None:
        raise redis.exceptions.ConnectionError("connection closed meanwhile")
    return sock


def _send(sock: Any, pieces: Sequence[Piece]) -> None:
    """Send pieces from where they lie, as far as the kernel takes them at once."""
    sent = 0 if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(pieces[:MAX_PIECES])
    if sent == sum(map(len, pieces)):
        return
    rest = []
    for piece in pieces:
        if sent < len(piece):
            rest.append(memoryview(piece)[sent:])
        sent = max(0, sent - len(piece))
    for chunk in gathered(rest):
        sock.sendall(chunk)


def _reader_of(connection: Any) -> hiredis.Reader:
    """The connection's own reader, which is empty between two calls: making one takes longer than a small call."""
    reader: hiredis.Reader | None = getattr(connection, "streamadv_reader", None)
    if reader is None:
        reader = connection.streamadv_reader = make_reader(connection._parser.parse_error)
    return reader


def _receive(sock: Any, count: int, reader: hiredis.Reader) -> Iterator[Any]:
    while count:
        reply = reader.gets()
        if reply is INCOMPLETE:
            data = sock.recv(RECEIVED)
            if not data:
                raise redis.exceptions.ConnectionError("connection closed by the server")
            reader.feed(data)
        elif isinstance(reply, redis.exceptions.ConnectionError):  # the server is loading its data
            raise reply
        else:
            count -= 1
            yield reply
