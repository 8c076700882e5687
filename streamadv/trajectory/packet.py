"""A packet: the trajectories of one group that one push sends together, and how to read its columns.

A packet's trajectories have the same columns, and either all or none of them have a reward. Its payload is one hash:
a field for each column, with the raw little-endian bytes of all members' rows end to end, and a `header`, JSON that
only readers of whole trajectories parse. Rollouts that ended without a usable trajectory make a packet without a
payload.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self

import numpy as np

from ..errors import WireError
from ..messages import brief
from .columns import EXTRA_DTYPES, KNOWN_COLUMNS, MAX_DIMENSIONS, Array, check_values, count_ones
from .members import Members, offsets

#: Size limits of a packet; a single larger trajectory is a packet of its own.
MAX_PACKET_MEMBERS: Final = 64
MAX_PACKET_BYTES: Final = 256 << 10
#: A column of this many bytes is not copied before it is sent.
LARGE_COLUMN: Final = 32 << 10


#: What filters judge unless the run says otherwise, see `filter_value`.
REWARD: Final = "reward"


class Packet(NamedTuple):
    """An encoded packet."""

    positions: tuple[int, ...]  # of its members among the records of the push
    indices: tuple[int, ...]  # rollout indices, ascending
    members: str  # a line 'index kind reward role' for each, as scripts read them; reward '-' = none yet
    table: bytes  # b"" without a payload
    size: int  # bytes of the values of the payload; 0 without one
    fields: dict[Any, Any]  # of the payload: name -> array, tuple of arrays (end to end) or bytes
    parts: Sequence[Any] = ()  # what it was made of, for `merge_packets`; () for one that stays as it is

    def frozen(self) -> tuple[Any, ...]:
        """For `thaw`: nothing but plain tuples, so that the garbage collector leaves it alone while it is kept."""
        return (*self[:5], tuple(self.fields.items()))

    @classmethod
    def thaw(cls, frozen: tuple[Any, ...]) -> Self:
        """The packet of which `frozen` made this."""
        return cls._make((*frozen[:-1], dict(frozen[-1]), ()))


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


NBYTES: Final = attrgetter("nbytes")


def field_of(arrays: Sequence[Array]) -> Array | tuple[Array, ...]:
    """A column of a packet, given each member's part of it.

    Small parts are copied into one array. Large columns are sent from where they lie: a copy would cost as much as
    sending, and a producer keeps what it has sent for a while.
    """
    if sum(map(NBYTES, arrays)) >= LARGE_COLUMN:
        return tuple(arrays) if len(arrays) > 1 else arrays[0]
    if len(arrays) == 1:
        return arrays[0].copy()
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    try:  # np.concatenate takes half a microsecond for each array
        return np.ndarray(shape, arrays[0].dtype, bytearray().join(arrays))  # type: ignore[arg-type]
    except TypeError:  # one has gaps in memory
        return np.concatenate(arrays)


def parts_of(column: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays of a column as `field_of` gives it."""
    return column if isinstance(column, tuple) else (column,)


def filter_value(
    name: str, reward: float | None, rewards: Mapping[str, float], metadata: Mapping[str, Any]
) -> float | None:
    """The number by which a run with `filter_by` = `name` judges a member; None while it has no reward.

    Raises ValueError if the member has no such reward, and no number of this name in its metadata.
    """
    if name == REWARD or reward is None:
        return reward
    value = rewards.get(name, metadata.get(name))
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"has no reward and no number {brief(name)}, by which the run filters (filter_by)")
    return float(value)


def member_line(index: int, kind: str, reward: float | None, role: str) -> str:
    """A line of `Packet.members`. kind: usable, or why the slot ended: failed, aborted, cancelled, unscorable."""
    return f"{index} {kind} {'-' if reward is None else repr(reward)} {role}\n"


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


def split_packets(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of members, given their bytes, that make a packet each. They are spread evenly."""
    filled = _fill(sizes, MAX_PACKET_BYTES)
    if len(filled) == 1:
        return filled
    spread = _fill(sizes, min(MAX_PACKET_BYTES, sum(sizes) // len(filled) + max(sizes) - 1))
    return spread if len(spread) == len(filled) else filled


def _fill(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Ranges of at most `limit` bytes; a larger member is one by itself."""
    if len(sizes) <= MAX_PACKET_MEMBERS and sum(sizes) <= limit:
        return [(0, len(sizes))]
    ranges: list[tuple[int, int]] = []
    start = total = 0
    for position, size in enumerate(sizes):
        if position > start and (position - start == MAX_PACKET_MEMBERS or total + size > limit):
            ranges.append((start, position))
            start, total = position, 0
        total += size
    return [*ranges, (start, len(sizes))]
