"""A packet: the trajectories of one group that one push sends together, and how to read it.

A packet's trajectories have the same columns, and either all or none of them have a reward. Its payload is one hash:
a field for each column, with the raw little-endian bytes of all members' rows end to end, and a `header`, JSON with the
fields that are neither in the member table nor in a column, which only readers of whole trajectories parse. Rollouts
that ended without a usable trajectory make a packet without a payload.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from ..errors import WireError
from ..messages import brief, first_problem, one_line
from .columns import EXTRA_DTYPES, KNOWN_COLUMNS, LARGEST, MAX_DIMENSIONS, Array, check_values, count_ones
from .fields import MAX_METADATA_DEPTH, MAX_SHORT_TEXT, MAX_VERSION, is_plain
from .members import HAS_VERSION, Members, Reference, offsets
from .schema import MAX_GROUP_SIZE, Column, Row, Step, Trajectory

#: Version of the format of streams, payloads and manifest. Within a version releases only add fields.
SCHEMA_VERSION: Final = 3

#: Size limit of a packet.
MAX_PACKET_MEMBERS: Final = 64
#: Size limit of a payload's header.
MAX_HEADER_BYTES: Final = 1 << 20

#: What filters judge unless the run says otherwise, see `packet_encoding.filter_value`.
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


# Whole trajectories, for scorers, `consume` and `batch.delivered`


def version_of(oldest: int, newest: int) -> int | tuple[int, int]:
    """The model_version of a trajectory with these versions and no column of them."""
    return oldest if oldest == newest else (oldest, newest)


def _is_source(value: Any) -> bool:
    return value is None or (type(value) is str and len(value) <= MAX_SHORT_TEXT)


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and -LARGEST <= value <= LARGEST)


def _is_version(value: Any) -> bool:
    span = value if type(value) is list and len(value) == 2 else [value]
    is_whole = all(type(version) is int and 0 <= version < MAX_VERSION for version in span)
    return value is None or (is_whole and span[0] <= span[-1])


_Checks = Mapping[str, Callable[[Any], bool]]
#: Checks of a header's fields. A newer release may add others, which are ignored.
_HEADER: Final[_Checks] = {
    "group_size": lambda value: type(value) is int and 1 <= value <= MAX_GROUP_SIZE,
    "data_source": _is_source,
    "members": lambda value: type(value) is list and all(type(part) is dict for part in value),
}
#: What each of its `members` may hold: of the trajectory's rows, or what neither table nor packet tells.
_MEMBER: Final[_Checks] = {
    "metadata": lambda value: type(value) is dict and is_plain(value, MAX_METADATA_DEPTH),
    "agents": lambda value: type(value) is list and all(map(_is_source, value)),
    "row_rewards": lambda value: type(value) is list and all(map(_is_number, value)),
    "model_version": _is_version,
    "data_source": _is_source,
}


def parse_header(text: bytes, members: Members) -> dict[str, Any]:
    """The header of a payload of these members, a JSON object. Raises WireError if it is none."""
    if len(text) > MAX_HEADER_BYTES:
        raise WireError(f"payload header has {len(text)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        return _parse_header(text, tuple(members.table["rows"].tolist()))
    except ValueError as error:
        raise WireError(f"payload header: {one_line(str(error))}") from error


@lru_cache(16)  # members of a packet are asked one after another
def _parse_header(text: bytes, rows: tuple[int, ...]) -> dict[str, Any]:
    """rows: of each member."""
    header = from_json(text)
    if type(header) is not dict or "group_size" not in header:
        raise ValueError("is no object with a group_size")
    _check(header, _HEADER)
    parts = header.get("members", [])
    if len(parts) not in (0, len(rows)):
        raise ValueError(f"has {len(parts)} members, its packet {len(rows)}")
    for position, part in enumerate(parts):
        _check(part, _MEMBER, position)
        for name in ("agents", "row_rewards"):
            if name in part and len(part[name]) not in (0, rows[position]):
                raise ValueError(
                    f"members.{position}.{name} has {len(part[name])} values for {rows[position]} rows"
                )
    return header


def _check(fields: Mapping[str, Any], checks: _Checks, member: int | None = None) -> None:
    for name, value in fields.items():
        if name in checks and not checks[name](value):
            where = name if member is None else f"members.{member}.{name}"
            raise ValueError(f"{where} is {brief(value)}, which no producer sends")


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says of one trajectory."""

    group_size: int
    data_source: str | None
    model_version: int | tuple[int, int] | None
    metadata: dict[str, Any]
    agents: Sequence[str | None]  # of its rows, or none
    row_rewards: Sequence[float | None]  # likewise


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A trajectory's data: one array per column, read-only, its rows end to end."""

    columns: dict[str, Array]
    packet: StoredPacket
    position: int  # in the packet
    header_json: bytes  # of the packet

    @property
    def header(self) -> Header:
        """Parsed when it is asked for: most payloads never are, and the garbage collector would walk it."""
        header = parse_header(self.header_json, self.packet.members)
        own = header["members"][self.position] if header.get("members") else {}
        version, record = own.get("model_version"), self.packet.members.table[self.position]
        if (
            "model_version" not in own
            and "versions" not in self.packet.columns
            and record["flags"] & HAS_VERSION
        ):
            version = version_of(int(record["oldest"]), int(record["newest"]))
        return Header(
            header["group_size"],
            own.get("data_source", header.get("data_source")),
            tuple(version) if isinstance(version, list) else version,
            own.get("metadata", {}),
            tuple(own.get("agents", ())),
            own.get("row_rewards", ()),
        )


def payloads_of(packet: StoredPacket, columns: Mapping[str, Array], header: bytes) -> list[Payload]:
    """The payloads of a packet's members. columns: of all members, see `decode_column`."""
    members = packet.members
    first_row = members.first_row[1:-1]  # of each member but the first
    parts = {
        name: np.split(column, offsets(members.entries.get(name, members.rows["tokens"]))[first_row])
        for name, column in columns.items()
    }
    return [
        Payload({name: cut[position] for name, cut in parts.items()}, packet, position, header)
        for position in range(len(members))
    ]


def payload_trajectory(
    reference: Reference, payload: Payload, outputs: Mapping[str, Array] | None = None, **fields: Any
) -> Trajectory:
    """A trajectory with all its columns, plus output columns and fields (batch, staleness, outcome, reason).

    Raises WireError when header and columns contradict each other.
    """
    header = payload.header
    entries = payload.packet.members.select([payload.position]).entries  # of columns not per token
    rows = []
    data: dict[str, Any] = {
        "group_id": reference.group_id,
        "group_size": header.group_size,
        "rollout_index": reference.rollout_index,
        "status": reference.status,
        "reward": reference.reward,
        "rewards": reference.rewards,
        "role": reference.role,
        "data_source": header.data_source,
        "model_version": header.model_version,
        "metadata": header.metadata,
    }
    try:
        columns: dict[str, list[Any]] = {}  # by row
        for name, array in {**payload.columns, **(outputs or {})}.items():
            parts = np.split(array, np.cumsum(entries.get(name, reference.row_lengths))[:-1])
            is_extra = name in payload.columns and name not in KNOWN_COLUMNS
            columns[name] = (
                [Column(data=part, per_token=name not in entries) for part in parts] if is_extra else parts
            )
        for number in range(len(reference.row_lengths)):
            values = {name: parts[number] for name, parts in columns.items()}
            agent = header.agents[number] if header.agents else None
            reward = header.row_rewards[number] if header.row_rewards else None
            rows.append(Row(agent=agent, reward=reward, **values))
        steps = [Step(**span._asdict()) for span in reference.steps]
        return Trajectory.model_validate({**data, "rows": rows, "steps": steps, **fields})
    except ValidationError as error:
        raise WireError(f"payload header: {first_problem(error)}") from error
