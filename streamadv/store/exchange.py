"""A call and its replies over one of redis-py's connections, without redis-py's bookkeeping per command.

That bookkeeping costs as much as packing and sending a small call.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence
from typing import Any, cast

import redis
import redis.exceptions

from .resp import Piece, gathered
from .retry import classified, closed_under_way


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
        connection.send_packed_command(gathered(pieces), check_health=False)
        for _ in range(count):
            try:
                reply = connection.read_response()
            except redis.exceptions.ResponseError as refusal:
                reply = refusal
            yield reply
    except BaseException:  # after an interrupt too: what is not read yet would answer another call
        connection.disconnect()
        with closed_under_way():
            raise
