"""Fetches payloads: only the columns that a stage needs, in slices that the server can buffer."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import WireError
from ..store.replies import read_hashes
from ..trajectory.columns import HEADER, KNOWN_COLUMNS, Array
from ..trajectory.packet import StoredPacket, check_column, decode_column
from ..trajectory.payload import parse_header
from .run import Run

#: Bytes of payload asked for before the reply is read: the server buffers all of it.
REPLY_BYTES: Final = 8 << 20


class FetchedPacket(NamedTuple):
    """What a payload holds: columns as arrays, rows of all members end to end, or why they cannot be read."""

    packet: StoredPacket
    columns: dict[str, Array]  # checked; views of the received bytes
    header: bytes = b""  # JSON, if it was asked for
    problem: str | None = None


def fetch_columns(
    run: Run, packets: Sequence[StoredPacket], names: Sequence[str] | None, *, header: bool = False
) -> Iterator[FetchedPacket]:
    """The named columns of each packet, as far as it has them (None = all), and its header if asked for.

    Asks for at most REPLY_BYTES before it reads the replies. A packet that cannot be read has a `problem`.
    """
    wanted = [
        packet.columns if names is None else [name for name in names if name in packet.columns]
        for packet in packets
    ]
    header = header or not all(wanted)  # a read names one field at least
    know_columns(run, wanted)
    fields = [[HEADER, *(name.encode() for name in names)][not header :] for names in wanted]
    replies = fetch_replies(
        run, [packet.key for packet in packets], [packet.size for packet in packets], fields
    )
    for packet, columns, reply in zip(packets, wanted, replies, strict=True):
        yield _decode(packet, columns, header, reply, run.manifest.columns)


def fetch_replies(
    run: Run, keys: Sequence[str], sizes: Sequence[int], fields: Sequence[Sequence[bytes]]
) -> Generator[Sequence[bytes | None] | None]:
    """The values of `fields` of each of the hashes `keys`; None where the key holds something else.

    sizes: bytes of each. Asks for at most REPLY_BYTES before it reads the replies.
    """
    for part in slices(sizes):
        commands = [("HMGET", key, *names) for key, names in zip(keys[part], fields[part], strict=True)]
        yield from read_hashes(run.connection.scripts, commands)


def slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Values of these `sizes` in parts of at most REPLY_BYTES, larger ones alone."""
    start = total = 0
    for stop, size in enumerate(sizes):
        if stop > start and total + size > REPLY_BYTES:
            yield slice(start, stop)
            start, total = stop, 0
        total += size
    if len(sizes):
        yield slice(start, len(sizes))


def know_columns(run: Run, names: Iterable[Iterable[str]]) -> None:
    """Read the manifest again if one of these columns is unknown: somebody has registered it since."""
    if not set().union(*names) <= KNOWN_COLUMNS.keys() | run.manifest.columns.keys():
        run.refresh()


def split_reply(
    reply: Sequence[bytes | None] | None, header: bool = True
) -> tuple[bytes, Sequence[bytes | None]]:
    """Header (b"" if it was not asked for) and columns of a packet's payload. Raises WireError if it is gone."""
    if reply is None or (reply and all(value is None for value in reply)):
        raise WireError("payload is gone, or is no hash")
    if not header:
        return b"", reply
    if reply[0] is None:
        raise WireError("payload has no header field")
    return reply[0], reply[1:]


def _decode(
    packet: StoredPacket,
    names: Sequence[str],
    header: bool,
    reply: Sequence[bytes | None] | None,
    kinds: Mapping[str, str],
) -> FetchedPacket:
    """reply: the header if asked for, then the columns; None where the key is no hash."""
    columns = {}
    try:
        text, raw_columns = split_reply(reply, header)
        if header:
            parse_header(text, packet.members)
        for name, raw in zip(names, raw_columns, strict=True):
            columns[name] = decode_column(packet, name, raw, kinds)
            if name in KNOWN_COLUMNS:
                check_column(packet, name, columns[name])
    except WireError as error:
        return FetchedPacket(packet, {}, problem=str(error))
    return FetchedPacket(packet, columns, text)
