"""A packet: the trajectories of one group that one push sends together, and how to read its columns.

A packet's trajectories have the same columns, and either all or none of them have a reward. Its payload is one hash:
a field for each column, with the raw little-endian bytes of all members' rows end to end, and a `header`, JSON that
only readers of whole trajectories parse. Rollouts that ended without a usable trajectory make a packet without a
payload.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import WireError
from ..messages import brief
from .columns import EXTRA_DTYPES, KNOWN_COLUMNS, MAX_DIMENSIONS, Array, check_values, count_ones
from .members import Members, offsets

#: Size limit of a packet.
MAX_PACKET_MEMBERS: Final = 64

#: What filters judge unless the run says otherwise, see `filter_value`.
REWARD: Final = "reward"


@dataclass(frozen=True, slots=True, eq=False)
class StoredPacket:
    """A packet as the streams refer to it."""

    key: str  # of the payload
    size: int  # bytes of the payload
    epoch: int  # the trainer's fencing epoch in the ticket
    columns: tuple[str, ...]
    members: Members  # all of them, also those that do not count


class ColumnKind(NamedTuple):
    """How to read an extra column, as the run's manifest has it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of one entry
    per_token: bool


def column_kind(name: str, kinds: Mapping[str, str]) -> ColumnKind:
    """Of a stored column. kinds: extra columns of the manifest, as JSON. Raises WireError."""
    if name in KNOWN_COLUMNS:
        return ColumnKind(KNOWN_COLUMNS[name], (), True)
    if name not in kinds:
        raise WireError(f"column {name} is none that the run has registered")
    text = kinds[name]
    try:
        dtype, shape, per_token = json.loads(text)
        kind = ColumnKind(np.dtype(dtype), tuple(int(size) for size in shape), bool(per_token))
    except (ValueError, TypeError) as error:
        raise WireError(f"the manifest has {brief(text)} as an extra column") from error
    if dtype not in EXTRA_DTYPES or len(shape) >= MAX_DIMENSIONS or min(kind.shape, default=0) < 0:
        raise WireError(f"the manifest has {brief(text)} as an extra column")
    return kind


def decode_column(packet: StoredPacket, name: str, raw: bytes | None, kinds: Mapping[str, str]) -> Array:
    """A read-only view of `raw` as the column `name` of all members, rows end to end.

    kinds: extra columns of the manifest. Raises WireError for what is no such column.
    """
    kind = column_kind(name, kinds)
    if kind.per_token != (name not in packet.members.entries):
        raise WireError(f"column {name} is per token in the manifest or in the packet, not in both")
    counts = packet.members.rows["tokens"] if kind.per_token else packet.members.entries[name]
    entries = int(counts.sum(dtype=np.int64))
    needed = entries * math.prod(kind.shape) * kind.dtype.itemsize
    return np.frombuffer(sized(name, raw, needed), kind.dtype).reshape(entries, *kind.shape)


def decode_entries(name: str, raw: bytes | None, kinds: Mapping[str, str]) -> Array:
    """A read-only view of `raw` as a column that is not per token, of any number of entries. Raises WireError."""
    kind = column_kind(name, kinds)
    entry = math.prod(kind.shape) * kind.dtype.itemsize
    if kind.per_token or raw is None or not entry or len(raw) % entry:
        raise WireError(f"column {name} is missing in the payload, or not what the manifest says")
    return np.frombuffer(raw, kind.dtype).reshape(-1, *kind.shape)


def sized(name: str, raw: bytes | None, needed: int) -> bytes:
    """`raw`, a column as it was read. Raises WireError unless it is there and has `needed` bytes."""
    if raw is None:
        raise WireError(f"column {name} is missing in the payload")
    if len(raw) != needed:
        raise WireError(f"column {name} has {len(raw)} bytes, its packet says {needed}")
    return raw


def check_column(packet: StoredPacket, name: str, values: Array) -> None:
    """Raise WireError unless the values of a known column are what a producer may push."""
    try:
        check_values(name, values)
    except ValueError as error:
        raise WireError(f"column {name} {error}") from error
    if name == "response_mask":
        ones = count_ones(values, offsets(packet.members.rows["tokens"]))
        if not (ones == packet.members.rows["trainable"]).all():
            raise WireError("column response_mask has other numbers of ones than its packet says")
