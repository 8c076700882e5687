"""One connection of an asyncio process, shared by many calls: what its tasks send in one turn is one write.

redis-py's asyncio client lends each call a connection of its own and waits for it, which is most of the cost of a
small call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import redis.asyncio
from redis.exceptions import ConnectionError, InvalidResponse, ReadOnlyError, ResponseError, TimeoutError

from .exchange import (
    INCOMPLETE,
    Packer,
    Payloads,
    Piece,
    gathered,
    make_reader,
    pack_transaction,
    transaction_result,
)
from .retry import classified, not_now

CLOSED: Final = "connection closed"


@dataclass(eq=False, slots=True)
class _Call:
    """A call, and what has come of its replies."""

    pieces: Sequence[Piece]
    expected: int
    future: asyncio.Future[Any]
    replies: list[Any] = field(default_factory=list)

    def end(self) -> Any:
        """Hand on the result, once all replies are there, and return it."""
        result = self.replies[0] if self.expected == 1 else transaction_result(self.replies)
        if isinstance(result, Exception):
            fail(self.future, classified(result) if isinstance(result, ResponseError) else result)
        elif not self.future.done():
            self.future.set_result(result)
        return result


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Raise `error` in whoever waits for `future`, unless that is done."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: nobody looks at it when the caller is cancelled in the same turn


class Pipelined:
    """Sends calls over one connection, which it opens when needed; the replies come in the order of the calls.

    Nothing is sent twice. When the connection breaks, or nothing has moved for `timeout` seconds while replies are due,
    every call under way raises one of RETRYABLE; the next call opens it again. Use it from one event loop.

    client: of redis-py, with a pool; it knows how to connect.
    """

    def __init__(self, client: redis.asyncio.Redis, timeout: float) -> None:
        self._client = client
        self._timeout = timeout
        self._unsent: list[_Call] = []
        self._wire: _Wire | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_scheduled = False

    def transact(self, payloads: Payloads, call: Sequence[Any]) -> asyncio.Future[Any]:
        """MULTI: write the hashes, then make `call`, whose reply is the result; or the first error there was."""
        return self._send(*pack_transaction(payloads, call))

    def evalsha(self, *arguments: Any) -> asyncio.Future[Any]:
        """As redis-py's client."""
        return self._send(Packer().pack("EVALSHA", *arguments), 1)

    def eval(self, *arguments: Any) -> asyncio.Future[Any]:
        """As redis-py's client."""
        return self._send(Packer().pack("EVAL", *arguments), 1)

    def close(self) -> None:
        """Close the connection. Calls under way raise ConnectionError."""
        if self._opening is not None:
            self._opening.cancel()
        if self._wire is not None:
            self._wire.abort(ConnectionError(CLOSED))
        self._fail_unsent(ConnectionError(CLOSED))

    def _send(self, pieces: Sequence[Piece], replies: int) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        call = _Call(pieces, replies, loop.create_future())
        self._unsent.append(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._write)
        return call.future

    def _write(self) -> None:
        self._is_scheduled = False
        if self._wire is not None and self._wire.is_open:
            unsent, self._unsent = self._unsent, []
            self._wire.write([call for call in unsent if not call.future.done()])
        elif self._opening is None and self._unsent:
            self._wire = None
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)

    async def _open(self) -> None:
        """Have redis-py connect, which knows about passwords, certificates and Sentinels; then take over."""
        connection: Any = self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        with not_now():
            await connection.connect()
            self._wire = _Wire(connection._writer, connection._parser.parse_error, self._timeout)
            connection._writer = connection._reader = None  # not its own any more

    def _opened(self, opening: asyncio.Task[None]) -> None:
        """Connected or not; it may have been cancelled before it began."""
        self._opening = None
        problem = None if opening.cancelled() else opening.exception()
        if self._wire is not None:
            self._write()
        else:
            self._fail_unsent(problem if isinstance(problem, Exception) else ConnectionError(CLOSED))

    def _fail_unsent(self, problem: Exception) -> None:
        unsent, self._unsent = self._unsent, []
        for call in unsent:
            fail(call.future, problem)


class _Wire(asyncio.Protocol):
    """One connection, until it breaks.

    writer: of asyncio, whose transport it takes over. as_error: makes an exception of the text of an error.
    """

    def __init__(
        self, writer: asyncio.StreamWriter, as_error: Callable[[str], Exception], timeout: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer  # kept, because it closes its transport when it goes
        self._transport = writer.transport
        self._reader = make_reader(as_error)
        self._timeout = timeout
        self._waiting: deque[_Call] = deque()  # for replies
        self._total = 0  # bytes received
        self._moved: tuple[int, int] | None = None  # bytes received, bytes not yet sent
        self._moved_at = 0.0
        self._watching: asyncio.TimerHandle | None = None
        self.is_open = True
        self._transport.set_protocol(self)

    def write(self, calls: Sequence[_Call]) -> None:
        """Send calls in few pieces."""
        self._waiting.extend(calls)
        for chunk in gathered(piece for call in calls for piece in call.pieces):
            self._transport.write(chunk)
        for call in calls:
            call.pieces = ()
        if self._watching is None:
            self._moved, self._moved_at = None, self._loop.time()
            self._watch()

    def data_received(self, data: bytes) -> None:
        self._total += len(data)
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not INCOMPLETE:
                if not self._waiting:
                    raise InvalidResponse("a reply that nobody waits for")
                call = self._waiting[0]
                call.replies.append(reply)
                if len(call.replies) == call.expected:
                    self._waiting.popleft()
                    if isinstance(call.end(), ReadOnlyError):  # the next connection may lead to the primary
                        self.abort(ConnectionError("the server is no longer the primary"))
        except InvalidResponse as error:
            self.abort(ConnectionError(str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        self.abort(ConnectionError(f"connection lost: {error or 'closed by the server'}"))

    def abort(self, problem: Exception) -> None:
        """Close the connection. What has been sent may have been carried out or not."""
        self.is_open = False
        self._transport.abort()
        if self._watching is not None:
            self._watching.cancel()
        while self._waiting:
            fail(self._waiting.popleft().future, problem)

    def _watch(self) -> None:
        """Abort when nothing has moved for too long. Looks again in a while as long as replies are due."""
        self._watching = None
        if not self._waiting or not self.is_open:
            return
        moved = (self._total, self._transport.get_write_buffer_size())
        if moved != self._moved:
            self._moved, self._moved_at = moved, self._loop.time()
        if self._loop.time() - self._moved_at >= self._timeout:
            self.abort(TimeoutError(f"no reply within {self._timeout:g} s"))
        else:
            self._watching = self._loop.call_later(self._timeout / 4, self._watch)
