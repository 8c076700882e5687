"""The column decoder: whatever stands in a payload hash, it is a trajectory or a WireError."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from pydantic_core import from_json

from streamadv.errors import WireError
from streamadv.trajectory.columns import HEADER
from streamadv.trajectory.payload import MAX_HEADER_BYTES, decode_payload, payload_trajectory
from streamadv.trajectory.schema import Trajectory

from .examples import payloads
from .mutations import as_json, cases, chance_of, damaged_bytes, damaged_value, one_line_error, pick

#: Python memory that reading a payload takes at most, in bytes, for each byte of its header; columns are views.
BYTES_PER_HEADER_BYTE = 100
FIXED_BYTES = 1 << 20


def read(fields: dict[bytes, bytes]) -> Trajectory | None:
    """As the trainer and `consume` read it: every accepted payload has an interchange form."""

    def call() -> Trajectory:
        trajectory = payload_trajectory(decode_payload(fields))
        trajectory.to_json()
        return trajectory

    return one_line_error(call, WireError, fields)


def damaged_payload(chance: random.Random) -> dict[bytes, bytes]:
    """A payload with its header's structure damaged, and now and then a column's bytes, added or taken."""
    fields = dict(pick(payloads(), chance))
    header: Any = damaged_value(from_json(fields[HEADER]), chance)
    fields[HEADER] = as_json(header)
    name = chance.choice([*fields, b"junk", b"\xff"])
    match chance.randrange(8):
        case 0:
            fields.pop(name, None)
        case 1:
            fields[name] = chance.randbytes(chance.choice((0, 1, 4, 20, 4096)))
    return fields


def test_damaged_bytes() -> None:
    accepted = 0
    for number in cases("payload, bytes"):
        chance = chance_of("payload, bytes", number)
        fields = dict(pick(payloads(), chance))
        name = chance.choice(list(fields))
        fields[name] = damaged_bytes(fields[name], chance)
        accepted += read(fields) is not None
    assert accepted  # some damage is none: other token ids, another reward


def test_damaged_structure() -> None:
    for number in cases("payload, structure"):
        read(damaged_payload(chance_of("payload, structure", number)))


@pytest.mark.slow
def test_memory_is_bounded_by_what_was_received() -> None:
    """Whatever lengths and shapes a header announces, nothing is allocated for them."""
    huge = [
        b'{"rows":' + b"[" * (MAX_HEADER_BYTES - 8),
        b'{"metadata":{"a":[' + b"[]," * 300_000 + b"0]}}",
        b'{"metadata":{"a":[' + b"0," * 500_000 + b"0]}}",
        b'{"rows":[' + b'{"length":134217728},' * 4095 + b'{"length":1}]}',
        b"9" * MAX_HEADER_BYTES,
        b" " * (MAX_HEADER_BYTES + 1),
    ]
    found = [{**payloads()[0], HEADER: header} for header in huge]
    found += [damaged_payload(chance_of("memory", number)) for number in cases("payload, memory")]
    for fields in found:
        tracemalloc.start()
        try:
            read(fields)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        header_bytes = len(fields.get(HEADER, b""))
        columns = sum(map(len, fields.values())) - header_bytes
        assert peak <= BYTES_PER_HEADER_BYTE * header_bytes + 4 * columns + FIXED_BYTES, (peak, header_bytes)
