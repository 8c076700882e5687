"""Fetching payloads: only the columns a stage needs, in slices the server can buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from .errors import BatchLostError, UndecodableGroupError, WireError
from .run import Run
from .wire import HEADER, Payload, Reference, decode_payload

#: Bytes of payload asked for before the reply is read: the server buffers all of it.
REPLY_BYTES: Final = 8 << 20


def fetch_payloads(run: Run, members: Sequence[Reference], columns: Sequence[str] | None) -> list[Payload]:
    """Payloads of `members` with the named columns (None = all).

    Raises BatchLostError when one is gone, UndecodableGroupError when one cannot be read.
    """
    payloads = []
    for member, fields in zip(members, fetch_fields(run, members, columns), strict=True):
        try:
            payloads.append(decode_payload(fields, columns))
        except WireError as error:
            raise UndecodableGroupError(member.group_id, str(error)) from error
    return payloads


def fetch_fields(
    run: Run, members: Sequence[Reference], columns: Sequence[str] | None
) -> Iterator[dict[bytes, bytes]]:
    """The stored fields of each payload: the header and the named columns (None = all).

    Asks for at most REPLY_BYTES before reading the replies. Raises BatchLostError when a payload is gone.
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
        for member, reply in zip(members[start:stop], pipe.execute(), strict=True):
            fields = reply if names is None else dict(zip(names, reply, strict=True))
            fields = {name: value for name, value in fields.items() if value is not None}
            if not fields:
                raise BatchLostError(
                    f"payload of {member.group_id}/{member.rollout_index} is gone: "
                    f"restart the trainer from its checkpoint"
                )
            yield fields
        start = stop
