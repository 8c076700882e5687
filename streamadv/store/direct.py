"""Values of hashes, received where they belong.

A parser copies a value on its way from the socket, and whoever lays it beside others copies it again. Where the sizes
of all values are known before they are read, the whole reply is: then the kernel writes them to their places.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from hiredis import pack_command
from redis.exceptions import RedisError

from .clients import Client

#: Pieces of memory that one system call fills at most: each costs time, filled or not.
MOST_PIECES: Final = 32


class HashRead(NamedTuple):
    """Fields of a hash, and for each of them the pieces of memory that its value fills one after another."""

    key: str
    fields: Sequence[bytes]
    places: Sequence[Sequence[memoryview]]
    others: Sequence[bytes] = ()
    """Further fields, whose sizes are not known."""


def receive(client: Any, reads: Sequence[HashRead]) -> list[Sequence[bytes | None]] | None:
    """Read values of hashes into their places. Returns the values of `others`, for each hash that has some a list.

    None if a value is missing or of another size, the server is away, or the client is none of a single server without
    TLS: ask in the ordinary way then, which says what is wrong. The places may hold anything after that.
    """
    if not isinstance(client, Client):
        return None
    pool: Any = client.connection_pool
    connection = pool.get_connection()
    replies = None
    try:
        # redis-py has no public name for it. A connection through TLS cannot fill pieces.
        sock = getattr(connection, "_sock", None)
        if isinstance(sock, socket.socket) and not isinstance(sock, ssl.SSLSocket):
            commands: list[Any] = [(b"HMGET", read.key, *read.fields) for read in reads]
            commands += [(b"HMGET", read.key, *read.others) for read in reads if read.others]
            connection.send_packed_command([b"".join(map(pack_command, commands))])
            if _fill(sock, reads):
                replies = [connection.read_response() for read in reads if read.others]
    except (OSError, RedisError):
        pass
    finally:
        if replies is None:  # there may be replies that nobody has read
            connection.disconnect()
        pool.release(connection)
    return replies


def _fill(sock: socket.socket, reads: Sequence[HashRead]) -> bool:
    """Receive the values with known sizes. False as soon as anything else comes."""
    pieces: list[memoryview] = []
    texts: list[
        tuple[int, bytes, memoryview]
    ] = []  # around the values: number of the piece, expected, received

    def expect(text: bytes) -> None:
        texts.append((len(pieces), text, memoryview(bytearray(len(text)))))
        pieces.append(texts[-1][-1])

    before = b""
    for read in reads:
        before += b"*%d\r\n" % len(read.fields)
        for places in read.places:
            expect(before + b"$%d\r\n" % sum(map(len, places)))
            pieces += places
            before = b"\r\n"
    expect(before)
    at = checked = 0
    while at < len(pieces):
        count = sock.recvmsg_into(pieces[at : at + MOST_PIECES])[0]
        if not count:
            return False
        while at < len(pieces) and count >= len(pieces[at]):
            count -= len(pieces[at])
            at += 1
        if count:
            pieces[at] = pieces[at][count:]
        while checked < len(texts) and texts[checked][0] <= at:
            number, expected, received = texts[checked]
            filled = len(expected) - (len(pieces[at]) if number == at else 0)
            if received[:filled] != expected[:filled]:
                return False
            if number == at:
                break
            checked += 1
    return True
