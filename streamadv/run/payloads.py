"""Fetching payloads: only the columns that a stage needs, in slices that the server can buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ..errors import UndecodableGroupError, WireError
from ..store.replies import replies_of
from ..trajectory.columns import HEADER, Array
from ..trajectory.payload import Payload, decode_payload
from ..trajectory.reference import Reference
from .run import Run

#: Bytes of payload asked for before the reply is read: the server buffers all of it.
REPLY_BYTES: Final = 8 << 20


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
