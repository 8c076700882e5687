"""The client of one server: calls and their replies over redis-py's connections, without its bookkeeping per command.

That bookkeeping costs as much as packing and sending a small call. Payloads are packed in Redis' protocol (RESP2), with
large values sent from where they lie: redis-py with hiredis copies every value twice before it sends it. For
trajectories of 32,768 tokens these copies are most of a producer's cost. Redis reads large values without a copy.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any, Final, cast

import hiredis
import redis
import redis.exceptions
from redis.exceptions import DataError, InvalidResponse

from .. import doors
from .retry import classified, closed_under_way, not_now

#: Keys of hashes and their fields: bytes, an array, or a tuple of arrays that lie end to end.
Payloads = Sequence[tuple[str, dict[Any, Any]]]
Piece = bytes | memoryview

# redis-py 5 retries after a lost reply only for listed errors. A listed error also closes its connection, which after
# READONLY leads to a former primary.
SENT_AGAIN_ON: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
)
#: Seconds before what was sent is sent again, at most.
AGAIN_S: Final = 0.1


class _Stack:
    """What redis-py's pool fills as a `queue.LifoQueue`, with locks of C alone: `Pool` takes from it."""

    def __init__(self, maxsize: int) -> None:
        self.queue: list[Any] = []
        self._maxsize = maxsize
        self.tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each item

    def put_nowait(self, item: Any) -> None:
        """Raises queue.Full."""
        if len(self.queue) >= self._maxsize:
            raise queue.Full
        self.queue.append(item)
        self.tokens.put(None)


class Pool(redis.BlockingConnectionPool):
    """redis-py's pool: what a client sends travels over one of these connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(queue_class=_Stack, **options)  # type: ignore[no-untyped-call]

    def get_connection(self, *_: Any, **__: Any) -> Any:
        """A connection that works as far as one can tell. Blocks until one is free.

        Raises what a server refuses the connection with, as `classified`.
        """
        self._checkpid()
        pool: Any = self.pool  # a process that is forked has another one
        pool.tokens.get()
        connection: Any = pool.queue.pop() or cast(Any, self).make_connection()
        try:
            if connection._sock is None:
                connection.connect()
            try:  # the server may have closed it, or sent replies that nobody has read
                is_dirty = bool(connection.can_read())
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
                is_dirty = True
            if is_dirty:
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


def replies(connection: Any, pieces: Sequence[Piece], count: int) -> Generator[Any]:
    """Send commands and give so many replies, refusals among them, each as soon as it has come.

    Who does not take all of them closes the iterator. Raises redis' ConnectionError or TimeoutError.
    """
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


def executed(execute: Callable[..., list[Any]], *args: Any, **options: Any) -> list[Any]:
    """What `execute` of a pipeline of redis-py returns or raises, with errors as `classified`."""
    with not_now():
        results = execute(*args, **options)
    refusal = redis.exceptions.ResponseError
    return [classified(result) if isinstance(result, refusal) else result for result in results]


class Client(redis.Redis):
    """A client of one server. What it sends goes past redis-py, which records and looks up much for each command."""

    attempts = 1  # at sending what goes past redis-py

    def transact(self, payloads: Payloads, call: Sequence[Any]) -> Any:
        """MULTI: write the hashes, then make `call`, whose reply is returned. Raises the first error there was."""
        return self._exchange(*pack_transaction(payloads, call), transaction_result, call)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's client."""
        return self.execute_together([(args, options)])[0]

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        """As redis-py's client."""
        pipe = _Pipeline(self.connection_pool, self.response_callbacks, transaction, None)
        pipe._client, pipe._has_multi = self, transaction
        return pipe

    def execute_together(
        self, commands: Sequence[tuple[Sequence[Any], Mapping[str, Any]]], raise_on_error: bool = True
    ) -> list[Any]:
        """Results of commands sent in one piece, each given as its arguments and redis-py's options.

        Raises the first error there is, or has each one among the results. ReadOnlyError is raised in any case, so that
        the connection, which leads to a former primary, is given up.
        """
        raised = Exception if raise_on_error else redis.exceptions.ReadOnlyError

        def results_of(replies: list[Any]) -> Any:
            """What redis-py makes of each reply; errors as `classified`."""
            results = replies[:]
            for number, (reply, (args, options)) in enumerate(zip(replies, commands, strict=True)):
                if isinstance(reply, redis.exceptions.ResponseError):
                    results[number] = classified(reply, args)
                elif args[0] in self.response_callbacks:
                    # Without what is for redis-py's cache.
                    others = {name: value for name, value in options.items() if name != "keys"}
                    results[number] = self.response_callbacks[args[0]](reply, **others)
            return next((result for result in results if isinstance(result, raised)), results)

        pieces = [piece for args, _ in commands for piece in Packer().pack(*args)]
        results: list[Any] = self._exchange(pieces, len(commands), results_of)
        return results

    def read(self, commands: Sequence[Sequence[Any]]) -> Generator[Any]:
        """Replies to commands that write nothing, each as soon as it has come; a refusal as an error among them.

        Who does not take all of them closes the iterator. Asks once: raises ConnectionError or TimeoutError.
        """
        pool: Any = self.connection_pool
        connection = pool.get_connection()
        try:
            packed = b"".join([piece for args in commands for piece in Packer().pack(*args)])
            with closing(replies(connection, [packed], len(commands))) as incoming:
                for command, reply in zip(commands, incoming, strict=True):
                    is_refused = isinstance(reply, redis.exceptions.ResponseError)
                    yield classified(reply, command) if is_refused else reply
        finally:
            pool.release(connection)

    def _exchange(
        self,
        pieces: Sequence[Piece],
        count: int,
        result_of: Callable[[list[Any]], Any],
        sent: Sequence[Any] = (),
    ) -> Any:
        """Send commands, and return or raise what `result_of` makes of so many replies. sent: the one that may fail.

        Again on the errors, and as often, as redis-py was told.
        """
        pool: Any = self.connection_pool
        connection = pool.get_connection()
        attempts = self.attempts
        try:
            while True:
                attempts -= 1
                try:
                    result = result_of(list(replies(connection, pieces, count)))
                    if isinstance(result, Exception):
                        raise result
                    return result
                except SENT_AGAIN_ON:
                    connection.disconnect()
                    if not attempts:
                        raise
                    doors.sleep(AGAIN_S * random.random())
        except redis.exceptions.ResponseError as error:
            raise classified(error, sent) from None
        finally:
            pool.release(connection)


class _Pipeline(redis.client.Pipeline):
    """Commands, which without MULTI are sent as a `Client` sends."""

    _client: Client
    _has_multi: bool

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """As redis-py's, with errors as `classified`."""
        if self._has_multi or self.watching or self.explicit_transaction or self.scripts:
            return executed(super().execute, raise_on_error)
        commands, self.command_stack = self.command_stack, []
        return self._client.execute_together(commands, raise_on_error) if commands else []


# Packing commands and reading replies

#: Values of this many bytes are chunks of their own. Below it, one more system call costs more than a copy.
LARGE: Final = 60_000
#: Smaller values are gathered up to so many bytes: for a larger piece the C library asks the kernel for memory.
GATHERED: Final = 2 * LARGE
#: Milliseconds that a payload lives whose script the server does not know: see `pack_transaction`.
UNREGISTERED_MS: Final = 60_000
#: A reader returns this while the rest of a reply has not come yet.
INCOMPLETE: Final = object()
#: Bytes that a reader keeps for the next replies: memory that is given back comes page by page again.
KEPT: Final = 1 << 20

_PEXPIRE: Final = b"\r\n*3\r\n$7\r\nPEXPIRE\r\n$%%d\r\n%%b\r\n$%d\r\n%d" % (
    len(str(UNREGISTERED_MS)),
    UNREGISTERED_MS,
)


class Packer:
    """A command packer of redis-py: `pack` makes the one chunk of a command."""

    def pack(self, *args: Any) -> Sequence[bytes]:
        """Raises redis' DataError unless all are str, bytes, buffers or numbers."""
        name = args[0] if isinstance(args[0], bytes) else args[0].encode()
        # 'XINFO GROUPS' is two words to Redis.
        return [hiredis.pack_command((*name.split(), *texts(args[1:])))]


def texts(args: Iterable[Any]) -> list[Any]:
    """Arguments of a command without numbers. Raises redis' DataError for what cannot be sent.

    The C library prints numbers by a call that runs signal handlers, and ends the process if one of them raises.
    """
    return [
        arg if (kind := type(arg)) is str or kind is bytes else str(arg) if kind is int else _encoded(arg)
        for arg in args
    ]


def pack_transaction(payloads: Payloads, call: Sequence[Any]) -> tuple[list[Piece], int]:
    """A MULTI that writes hashes (for their values see `Payloads`), then makes `call`, as pieces to be sent in order.

    Also how many replies it has: to MULTI, two writes of each hash, the call and EXEC.
    The hashes live for UNREGISTERED_MS, unless the call makes them last: a server that does not know the script of the
    call, because it has just taken over, executes the rest nevertheless.
    """
    pieces: list[Piece] = [b"*1\r\n$5\r\nMULTI"]
    for key_text, fields in payloads:
        key, size = key_text.encode(), 0
        payload: list[Piece] = [b"\r\n*%d\r\n$4\r\nHSET\r\n$%d\r\n%b" % (2 + 2 * len(fields), len(key), key)]
        for field, value in fields.items():
            parts = [as_buffer(part) for part in value] if isinstance(value, tuple) else [as_buffer(value)]
            length = sum(map(len, parts))
            payload += [b"%b%d\r\n" % (_named(field), length), *parts]
            size += length
        payload.append(_PEXPIRE % (len(key), key))
        pieces += payload if size >= LARGE else [b"".join(payload)]
    packed = hiredis.pack_command(tuple(texts(call)))
    return [*pieces, b"\r\n", packed, b"*1\r\n$4\r\nEXEC\r\n"], 3 + 2 * len(payloads)


@lru_cache(256)
def _named(field: str | bytes) -> bytes:
    """What comes before the length of a field's value."""
    name = field if isinstance(field, bytes) else field.encode()
    return b"\r\n$%d\r\n%b\r\n$" % (len(name), name)


def gathered(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in few chunks, large pieces as they are. Lazily: a chunk reuses the memory of the one before."""
    small: list[Piece] = []
    size = 0
    for piece in pieces:
        is_large = len(piece) >= LARGE
        if small and (is_large or size + len(piece) > GATHERED):
            yield b"".join(small)
            small, size = [], 0
        if is_large:
            yield piece
        else:
            small.append(piece)
            size += len(piece)
    if small:
        yield b"".join(small)


def transaction_result(replies: Sequence[Any]) -> Any:
    """The reply to the call of a transaction, or the first error: given the replies to MULTI, its commands and EXEC."""
    *queued, executed = replies
    if isinstance(executed, Exception):
        return next((reply for reply in queued if isinstance(reply, Exception)), executed)
    return next((reply for reply in executed if isinstance(reply, Exception)), executed[-1])


def make_reader(as_error: Callable[[str], Exception]) -> hiredis.Reader:
    """A reader of replies: `feed` it bytes; `gets` is a reply, a refusal as `as_error` makes it, or INCOMPLETE."""
    reader = hiredis.Reader(
        protocolError=InvalidResponse,
        replyError=as_error,
        errors="backslashreplace",
        notEnoughData=INCOMPLETE,
    )
    reader.setmaxbuf(KEPT)
    return reader


def as_buffer(value: Any) -> bytes | memoryview:
    """The bytes of a value of a payload; those of bytes and of an array in memory order uncopied."""
    if isinstance(value, tuple):
        return b"".join(map(as_buffer, value))
    if isinstance(value, bytes):
        return value
    return memoryview(value).cast("B") if value.nbytes else b""


def _encoded(arg: Any) -> bytes | memoryview:
    if isinstance(arg, str):
        return arg.encode()
    if isinstance(arg, memoryview | bytearray):
        return memoryview(arg).cast("B")
    if isinstance(arg, int | float) and not isinstance(arg, bool):
        return str(arg).encode()
    raise DataError(f"cannot send a {type(arg).__name__} to Redis: give text, bytes or a number")
