"""Fetching payloads: only the columns that a stage needs, in slices that the server can buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import UndecodableGroupError, WireError
from ..store.replies import replies_of
from ..trajectory.columns import HEADER, KNOWN_COLUMNS, Array
from ..trajectory.packet import StoredPacket, check_column, decode_column
from ..trajectory.payload import Payload, parse_header, payloads_of
from ..trajectory.reference import Reference
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
    wanted = [packet.columns if names is None else _common(names, packet) for packet in packets]
    header = header or not all(wanted)  # a read names one field at least
    if not set().union(*wanted) <= KNOWN_COLUMNS.keys() | run.manifest.columns.keys():
        run.refresh()  # somebody has registered an extra column since
    fields = [[HEADER, *(name.encode() for name in names)][not header :] for names in wanted]
    replies = fetch_replies(
        run, [packet.key for packet in packets], [packet.size for packet in packets], fields
    )
    for packet, columns, reply in zip(packets, wanted, replies, strict=True):
        yield _decode(packet, columns, header, reply, run.manifest.columns)


def fetch_replies(
    run: Run, keys: Sequence[str], sizes: Sequence[int], fields: Sequence[Sequence[bytes]]
) -> Iterator[Sequence[bytes | None] | None]:
    """The values of `fields` of each of the hashes `keys`; None where the key holds something else.

    sizes: bytes of each. Asks for at most REPLY_BYTES before it reads the replies.
    """
    start = 0
    while start < len(keys):
        stop, size = start, 0
        pipe = run.connection.scripts.pipeline(transaction=False)
        while stop < len(keys) and (stop == start or size + sizes[stop] <= REPLY_BYTES):
            size += sizes[stop]
            pipe.hmget(keys[stop], fields[stop])
            stop += 1
        yield from replies_of(pipe)
        start = stop


def _common(names: Sequence[str], packet: StoredPacket) -> list[str]:
    return [name for name in names if name in packet.columns]


def _decode(
    packet: StoredPacket,
    names: Sequence[str],
    header: bool,
    reply: Sequence[bytes | None] | None,
    kinds: Mapping[str, str],
) -> FetchedPacket:
    """reply: the header if asked for, then the columns; None where the key is no hash."""
    if reply is None or (reply and all(value is None for value in reply)):
        return FetchedPacket(packet, {}, problem="payload is gone, or is no hash")
    text, raw_columns = (reply[0], reply[1:]) if header else (b"", reply)
    if text is None:
        return FetchedPacket(packet, {}, problem="payload has no header field")
    columns = {}
    try:
        if header:
            parse_header(text, packet.members)
        for name, raw in zip(names, raw_columns, strict=True):
            columns[name] = decode_column(packet, name, raw, kinds)
            if name in KNOWN_COLUMNS:
                check_column(packet, name, columns[name])
    except WireError as error:
        return FetchedPacket(packet, {}, problem=str(error))
    return FetchedPacket(packet, columns, text)


def fetch_payloads(
    run: Run,
    references: Sequence[Reference],
    columns: Sequence[str] | None,
    places: Sequence[Mapping[str, Array]] | None = None,
) -> list[Payload]:
    """The payload of each trajectory with the named columns (None = all). Reads each packet once.

    places: for each, by name, where a column is copied to. Raises UndecodableGroupError, which names every trajectory
    that cannot be read.
    """
    packets = {reference.packet.key: reference.packet for reference in references}
    payloads: dict[str, list[Payload]] = {}
    broken: dict[str, str] = {}
    for packet, arrays, header, problem in fetch_columns(run, list(packets.values()), columns, header=True):
        if problem is None:
            payloads[packet.key] = payloads_of(packet, arrays, header)
        else:
            broken[packet.key] = problem
    if broken:
        raise UndecodableGroupError(
            {
                (reference.group_id, reference.rollout_index): f"rollout {reference.rollout_index}: {problem}"
                for reference in references
                if (problem := broken.get(reference.packet.key)) is not None
            }
        )
    found = [payloads[reference.packet.key][reference.position] for reference in references]
    for payload, arrays in zip(found, places or (), strict=False):
        for name in payload.columns.keys() & arrays.keys():
            arrays[name][:] = payload.columns[name]
            payload.columns[name] = arrays[name]
    return found
