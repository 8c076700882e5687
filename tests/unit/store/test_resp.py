"""Commands as Redis reads them, whatever their size."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import DataError, InvalidResponse, ResponseError

from streamadv.store.exchange import (
    INCOMPLETE,
    LARGE,
    Packer,
    as_buffer,
    gathered,
    make_reader,
    pack_transaction,
)

Argument = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.binary(max_size=8),
    st.integers(),
    st.floats(allow_nan=False),
    st.sampled_from([0, LARGE - 1, LARGE]).map(lambda size: memoryview(bytes(size))),
    st.binary(max_size=8).map(bytearray),
)


def plain(args: tuple[Any, ...]) -> bytes:
    """What redis-py's own packer sends."""
    encode = redis.connection.Encoder("utf-8", "strict", False).encode
    serializer = redis.connection.PythonRespSerializer(6000, encode)  # type: ignore[no-untyped-call]
    values = [bytes(arg) if isinstance(arg, bytearray) else arg for arg in args]
    return b"".join(serializer.pack(*values))


@pytest.mark.parametrize("command", ["HSET", "EVAL", "XINFO GROUPS", b"HSET", b"XINFO GROUPS"])
@given(args=st.lists(Argument, max_size=6))
def test_the_bytes_are_those_redis_py_sends(command: str | bytes, args: list[Any]) -> None:
    assert b"".join(Packer().pack(command, *args)) == plain((command, *args))


def test_a_large_value_is_sent_from_where_it_lies() -> None:
    array = np.arange(LARGE, dtype=np.int32)
    pieces, _ = pack_transaction([("key", {"small": b"1", "large": array})], ["PING"])
    assert [chunk.obj for chunk in gathered(pieces) if isinstance(chunk, memoryview)] == [array]


@pytest.mark.parametrize("arg", [None, True, object(), [1]])
@pytest.mark.parametrize("command", ["HSET", "SET"])
def test_what_has_no_bytes_is_refused(command: str, arg: Any) -> None:
    with pytest.raises(DataError):
        Packer().pack(command, "key", arg)


class Interrupted(float):
    """A number during whose printing a signal handler raises."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt


def test_an_interrupt_while_numbers_are_printed_is_raised_and_ends_no_process() -> None:
    if (child := os.fork()) == 0:
        status = 1
        try:
            for count in range(60):
                try:
                    Packer().pack("EVALSHA", "a" * count, Interrupted(1.0), *["x" * 30] * count)
                except KeyboardInterrupt:
                    continue
                break
            else:
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


Arrays = st.sampled_from([(0,), (3,), (2, 0), (2, 3), (LARGE // 3,), (LARGE,)]).map(np.ones)
Value = st.one_of(st.binary(max_size=8), Arrays, st.lists(Arrays, min_size=1, max_size=4).map(tuple))
Fields = st.dictionaries(
    st.one_of(st.text("aä", max_size=3), st.just(b"header")), Value, min_size=1, max_size=5
)


@given(payloads=st.lists(st.tuples(st.sampled_from(["key", "ä-{x}"]), Fields), max_size=4))
def test_a_transaction_is_its_commands_one_after_the_other(payloads: list[Any]) -> None:
    call = ("EVAL", "return 1", 1, "key", 0.5, b"\0")
    writes = []
    for key, fields in payloads:
        parts = [part for pair in fields.items() for part in pair]
        writes.append(
            (
                "HSET",
                key,
                *(part if isinstance(part, str | bytes) else bytes(as_buffer(part)) for part in parts),
            )
        )
        writes.append(("PEXPIRE", key, 60_000))
    commands = [("MULTI",), *writes, call, ("EXEC",)]
    assert b"".join(pack_transaction(payloads, call)[0]) == b"".join(map(plain, commands))


REPLIES = (
    b"+OK\r\n:-7\r\n$-1\r\n*-1\r\n$0\r\n\r\n$4\r\na\r\nb\r\n-ERR no\r\n"
    b"*3\r\n:1\r\n*2\r\n+a\r\n-NOSCRIPT x\r\n$1\r\n-\r\n"
)


def read(*parts: bytes) -> list[Any]:
    replies, reader = [], make_reader(ResponseError)
    for part in parts:
        reader.feed(part)
        while (reply := reader.gets()) is not INCOMPLETE:
            replies.append(reply)
    return replies


@given(cut=st.integers(0, len(REPLIES)))
def test_replies_are_read_wherever_the_bytes_are_cut(cut: int) -> None:
    assert repr(read(REPLIES[:cut], REPLIES[cut:])) == repr(
        [
            *(b"OK", -7, None, None, b"", b"a\r\nb", ResponseError("ERR no")),
            [1, [b"a", ResponseError("NOSCRIPT x")], b"-"],
        ]
    )


@pytest.mark.parametrize("data", [b"?\r\n", b"$x\r\n", b":\r\n", b"*1\r\n!x\r\n"])
def test_what_is_no_reply_is_an_error(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read(data)


@given(st.lists(st.sampled_from([b"", b"a", bytes(LARGE - 1), bytes(LARGE), memoryview(bytes(LARGE + 1))])))
def test_gathered_pieces_are_the_same_bytes_and_large_ones_are_not_copied(pieces: list[Any]) -> None:
    chunks = list(gathered(pieces))
    assert b"".join(chunks) == b"".join(pieces)
    assert [piece for piece in pieces if len(piece) >= LARGE] == [
        chunk for chunk in chunks if any(chunk is piece for piece in pieces) and len(chunk) >= LARGE
    ]
