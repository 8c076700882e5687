"""Commands in Redis' protocol (RESP2), with large values sent from where they lie.

redis-py with hiredis copies every value twice before it sends it. For trajectories of 32,768 tokens these copies are
most of a producer's cost. Redis itself reads large values without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from hiredis import pack_command
from redis.exceptions import DataError, InvalidResponse

#: Keys of hashes and their fields: bytes, an array, or a list of arrays that lie end to end.
Payloads = Sequence[tuple[str, dict[Any, Any]]]

#: Values of this many bytes are chunks of their own. Below it, one more system call costs more than a copy.
LARGE: Final = 60_000
#: Smaller values are gathered up to so many bytes: for a larger piece the C library asks the kernel for memory.
GATHERED: Final = 2 * LARGE
#: Milliseconds that a payload lives whose script the server does not know: see `pack_transaction`.
UNREGISTERED_MS: Final = 60_000
#: Instead of a command with its arguments, `Packer` takes this and the chunks of `pack_transaction`.
TRANSACTION: Final = "MULTI"


_PEXPIRE: Final = b"*3\r\n$7\r\nPEXPIRE\r\n$%%d\r\n%%b\r\n$%d\r\n%d\r\n" % (
    len(str(UNREGISTERED_MS)),
    UNREGISTERED_MS,
)


class Packer:
    """A command packer of redis-py: `pack` makes the chunks of one command."""

    def pack(self, *args: Any) -> Sequence[bytes | memoryview]:
        """The chunks, to be sent in order. Raises redis' DataError unless all are str, bytes, buffers or numbers."""
        if args[0] == TRANSACTION and len(args) > 1:
            return args[1]  # type: ignore[no-any-return]
        name = args[0] if isinstance(args[0], bytes) else args[0].encode()
        args = (*name.split(), *args[1:])  # 'XINFO GROUPS' is two words to Redis
        if name != b"HSET":
            with suppress(TypeError):  # it takes no buffers
                return [pack_command(args)]
        chunks: list[bytes | memoryview] = []
        pieces: list[bytes | memoryview] = [b"*%d\r\n" % len(args)]
        for arg in args:
            value = arg if isinstance(arg, bytes) else _encoded(arg)
            pieces.append(b"$%d\r\n" % len(value))
            if len(value) >= LARGE:
                chunks += [b"".join(pieces), value]
                pieces = [b"\r\n"]
            else:
                pieces += [value, b"\r\n"]
        return [*chunks, b"".join(pieces)]


def pack_transaction(payloads: Payloads, call: Sequence[Any]) -> Iterator[bytes | memoryview]:
    """The chunks of a MULTI that writes hashes (for their values see `Payloads`), then makes `call`.

    The hashes live for UNREGISTERED_MS, unless the call makes them last: a server that does not know the script of the
    call, because it has just taken over, executes the rest nevertheless. Generated lazily: each chunk reuses the memory
    freed by the previous one.
    """
    pieces: list[Any] = [b"*1\r\n$5\r\nMULTI\r\n"]
    gathered = 0
    for key_text, fields in payloads:
        key = key_text.encode()
        pieces.append(b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n" % (2 + 2 * len(fields), len(key), key))
        for field, value in fields.items():
            name = field if isinstance(field, bytes) else field.encode()
            parts = value if isinstance(value, list) else [value]
            sizes = [len(part) if isinstance(part, bytes) else part.nbytes for part in parts]
            pieces.append(b"$%d\r\n%b\r\n$%d\r\n" % (len(name), name, sum(sizes)))
            for part, size in zip(parts, sizes, strict=True):
                if size >= LARGE:
                    yield b"".join(pieces)
                    yield as_buffer(part)
                    pieces, gathered = [], 0
                    continue
                if gathered + size > GATHERED:
                    yield b"".join(pieces)
                    pieces, gathered = [], 0
                pieces.append(part)
                gathered += size
            pieces.append(b"\r\n")
        pieces.append(_PEXPIRE % (len(key), key))
    yield b"".join([*pieces, *Packer().pack(*call), b"*1\r\n$4\r\nEXEC\r\n"])


def replies_to_transaction(payloads: Payloads) -> int:
    """How many replies a transaction with these payloads has: to MULTI, two writes of each, the call and EXEC."""
    return 3 + 2 * len(payloads)


def transaction_result(replies: Sequence[Any]) -> Any:
    """The reply to the call of a transaction, or the first error: given the replies to MULTI, its commands and EXEC."""
    *queued, executed = replies
    if isinstance(executed, Exception):
        return next((reply for reply in queued if isinstance(reply, Exception)), executed)
    return next((reply for reply in executed if isinstance(reply, Exception)), executed[-1])


class Incomplete(Exception):
    """The rest of a reply has not come yet."""


def read_reply(data: bytes, at: int, as_error: Callable[[str], Exception]) -> tuple[Any, int]:
    """The reply that begins at data[at], and where it ends: bytes, a number, None, a list, or what `as_error` makes.

    Raises Incomplete, and redis' InvalidResponse for anything else.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    kind, line, at = data[at], data[at + 1 : end], end + 2
    if kind == ord("+"):
        return line, at
    if kind == ord("-"):
        return as_error(line.decode(errors="backslashreplace")), at
    if not line.removeprefix(b"-").isdigit():
        raise InvalidResponse(f"{line!r} is no number")
    number = int(line)
    if kind == ord(":"):
        return number, at
    if kind not in b"$*":
        raise InvalidResponse(f"{chr(kind)!r} begins no reply")
    if number < 0:
        return None, at
    if kind == ord("$"):
        end = at + number
        if len(data) < end + 2:
            raise Incomplete
        return data[at:end], end + 2
    items = []
    for _ in range(number):
        item, at = read_reply(data, at, as_error)
        items.append(item)
    return items, at


def as_buffer(value: Any) -> bytes | memoryview:
    """The bytes of a value of a payload; those of bytes and of an array in memory order uncopied."""
    if isinstance(value, list):
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
