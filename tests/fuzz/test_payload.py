"""The readers of payloads: whatever stands in a member table or a hash, it is trajectories or a WireError."""

from __future__ import annotations

import itertools
import json
import random
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

import pytest
from pydantic_core import from_json

from streamadv.errors import WireError
from streamadv.trajectory.columns import HEADER, KNOWN_COLUMNS
from streamadv.trajectory.member_table import list_table, read_table
from streamadv.trajectory.members import references_of
from streamadv.trajectory.packet import (
    MAX_HEADER_BYTES,
    StoredPacket,
    check_column,
    decode_column,
    parse_header,
    payload_trajectory,
    payloads_of,
)
from streamadv.trajectory.schema import Trajectory
from tests.support import members_problem

from .examples import payloads
from .mutations import as_json, cases, chance_of, damaged_bytes, damaged_value, one_line_error, pick

#: Python memory that reading a payload takes at most, in bytes, for each byte of its header and its member table;
#: columns are views.
BYTES_PER_BYTE = 100
FIXED_BYTES = 1 << 20
KINDS = {"experts": '["<i8",[2],true]', "pixels": '["|u1",[3,3],false]'}

Stored = tuple[bytes, dict[bytes, bytes]]


def read(found: Stored) -> list[Trajectory] | None:
    """As groups log, trainer and `consume` read it: every accepted payload has an interchange form."""
    table, fields = found

    def call() -> list[Trajectory]:
        members, names = read_table(table)
        size = sum(map(len, fields.values()))
        if (problem := members_problem(members, size)) is not None:
            raise WireError(problem)
        packet = StoredPacket("key", size, 0, names, members)
        if HEADER not in fields:
            raise WireError("payload has no header field")
        parse_header(fields[HEADER], members)
        columns = {name: decode_column(packet, name, fields.get(name.encode()), KINDS) for name in names}
        for name in KNOWN_COLUMNS.keys() & columns.keys():
            check_column(packet, name, columns[name])
        trajectories = [
            payload_trajectory(reference, payload)
            for reference, payload in zip(
                references_of(members, repeat(("g", None), len(members))),
                payloads_of(packet, columns, fields[HEADER]),
                strict=True,
            )
        ]
        for trajectory in trajectories:
            trajectory.to_json()
        return trajectories

    return one_line_error(call, WireError, fields)


def damaged_payload(chance: random.Random) -> Stored:
    """A payload with its header's structure damaged, and now and then a column's bytes, added or taken."""
    table, fields = pick(payloads(), chance)
    fields = dict(fields)
    header: Any = damaged_value(from_json(fields[HEADER]), chance)
    fields[HEADER] = as_json(header)
    name = chance.choice([*fields, b"junk", b"\xff"])
    match chance.randrange(8):
        case 0:
            fields.pop(name, None)
        case 1:
            fields[name] = chance.randbytes(chance.choice((0, 1, 4, 20, 4096)))
    return table, fields


def test_damaged_bytes() -> None:
    accepted = 0
    for number in cases("payload, bytes"):
        chance = chance_of("payload, bytes", number)
        table, fields = pick(payloads(), chance)
        name = chance.choice(list(fields))
        accepted += read((table, {**fields, name: damaged_bytes(fields[name], chance)})) is not None
    assert accepted  # some damage is none: other token ids, another reward


def test_damaged_member_tables() -> None:
    for number in cases("member table"):
        chance = chance_of("member table", number)
        table, fields = pick(payloads(), chance)
        table = damaged_bytes(table, chance)
        if chance.random() < 0.5 and len(table) >= 4:  # else most damage ends at the size
            table = struct.pack("<I", len(table)) + table[4:]
        read((table, fields))
        json.dumps(list_table(table, sum(map(len, fields.values()))))  # as `dead show` prints it


#: Numbers that a header or a record of a member table may announce.
ANNOUNCED = (0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, -1, -(2**63))


def announcing(table: bytes) -> Iterator[bytes]:
    """The table with every number of its head and of its first record replaced, its size right but once."""
    members, _ = read_table(table)
    head = [(struct.Struct("<I"), 4 * place) for place in range(4)]
    formats = {"u2": "<H", "u1": "<B", "u4": "<I", "f8": "<d", "i8": "<q"}
    fields = members.table.dtype.fields or {}
    record = [(struct.Struct(formats[kind.str[1:]]), 16 + at) for kind, at, *_ in fields.values()]
    for number, (form, at) in itertools.product(ANNOUNCED, [*head, *record]):
        with suppress(struct.error):  # no such number in so few bytes
            value = form.pack(number)
            yield table[:at] + value + table[at + len(value) :]


def test_whatever_a_member_table_announces_nothing_is_allocated_for_it() -> None:
    for table, fields in payloads():
        announced = list(announcing(table))
        tracemalloc.start()
        try:
            for changed in announced:
                read((changed, fields))
                list_table(changed, sum(map(len, fields.values())))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * FIXED_BYTES
        assert len(announced) > 60


def test_damaged_structure() -> None:
    for number in cases("payload, structure"):
        read(damaged_payload(chance_of("payload, structure", number)))


@pytest.mark.slow
def test_memory_is_bounded_by_what_was_received() -> None:
    """Whatever counts and lengths are announced, nothing is allocated for them."""
    huge = [
        b'{"members":' + b"[" * (MAX_HEADER_BYTES - 11),
        b'{"group_size":1,"members":[{"metadata":{"a":[' + b"[]," * 30_000 + b"0]}}]}",
        b'{"group_size":1,"members":[{"metadata":{"a":[' + b"0," * 50_000 + b"0]}}]}",
        b'{"group_size":1,"members":[' + b"{}," * 30_000 + b"{}]}",
        b'{"group_size":1,"members":[{"agents":[' + b"null," * 4095 + b"null]}]}",
        b"9" * MAX_HEADER_BYTES,
        b" " * (MAX_HEADER_BYTES + 1),
    ]
    table, fields = payloads()[0]
    found = [(table, {**fields, HEADER: header}) for header in huge]
    found += [damaged_payload(chance_of("memory", number)) for number in cases("payload, memory")]
    for number in cases("member table, memory"):
        chance = chance_of("member table, memory", number)
        table, fields = pick(payloads(), chance)
        found.append((damaged_bytes(table, chance), fields))
    for table, fields in found:
        tracemalloc.start()
        try:
            read((table, fields))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        parsed = len(fields.get(HEADER, b"")) + len(table)
        columns = sum(map(len, fields.values())) - len(fields.get(HEADER, b""))
        assert peak <= BYTES_PER_BYTE * parsed + 4 * columns + FIXED_BYTES, (peak, parsed)
