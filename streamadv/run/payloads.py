"""Fetching payloads: only the columns that a stage needs, in slices that the server can buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import UndecodableGroupError, WireError
from ..store.replies import replies_of
from ..trajectory.columns import HEADER, KNOWN_COLUMNS, Array
from ..trajectory.packet import StoredPacket, check_column, decode_column
from ..trajectory.payload import Payload, decode_payload
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
        for name, raw in zip(names, raw_columns, strict=True):
            columns[name] = decode_column(packet, name, raw, kinds)
            if name in KNOWN_COLUMNS:
                check_column(packet, name, columns[name])
    except WireError as error:
        return FetchedPacket(packet, {}, problem=str(error))
    return FetchedPacket(packet, columns, text)


def fetch_payloads(
    run: Run,
    members: Sequence[Reference],
    columns: Sequence[str] | None,
    places: Sequence[Mapping[str, Array]] | None = None,
) -> list[Payload]:
    """Payloads of `members` with the named columns (None = all).

    places: of each member, see `decode_payload`. Raises UndecodableGroupError, which names every unreadable member.
    """
    payloads = []
    problems: dict[tuple[str, int], str] = {}
    for index, (member, fields) in enumerate(zip(members, fetch_fields(run, members, columns), strict=True)):
        try:
            payloads.append(decode_member(member, fields, columns, places[index] if places else None))
        except WireError as error:
            problems[member.group_id, member.rollout_index] = str(error)
    if problems:
        raise UndecodableGroupError(problems)
    return payloads


def decode_member(
    member: Reference,
    fields: Mapping[bytes, bytes],
    columns: Sequence[str] | None,
    places: Mapping[str, Array] | None = None,
) -> Payload:
    """The payload of a member from its stored fields. Raises WireError."""
    try:
        if not fields:
            raise WireError("payload is gone, or is no hash")
        return decode_payload(fields, columns, member, places)
    except WireError as error:
        raise WireError(f"rollout {member.rollout_index}: {error}") from error


def fetch_fields(
    run: Run, members: Sequence[Reference], columns: Sequence[str] | None
) -> Iterator[dict[bytes, bytes]]:
    """The stored fields of each payload: the header and the named columns (None = all); {} when it is gone.

    Asks for at most REPLY_BYTES before reading the replies.
    """
    names = None if columns is None else [HEADER, *[name.encode() for name in columns]]
    start = 0
    while start < len(members):
        stop, size = start, 0
        pipe = run.connection.scripts.pipeline(transaction=False)
        while stop < len(members) and (stop == start or size + members[stop].size <= REPLY_BYTES):
            size += members[stop].size
            if names is None:
                pipe.hgetall(members[stop].key)
            else:
                pipe.hmget(members[stop].key, names)
            stop += 1
        for reply in replies_of(pipe):
            if names is None or reply is None:
                yield reply or {}
            else:
                yield {name: value for name, value in zip(names, reply, strict=True) if value is not None}
        start = stop
