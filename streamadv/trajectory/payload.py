"""Reads a payload as whole trajectories, for scorers, `consume` and `batch.delivered`.

A packet's payload holds the columns of all its members end to end, and a header: JSON with the fields that are
neither in the member table nor in a column. Readers of single columns skip the header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from ..errors import WireError
from ..messages import brief, first_problem, one_line
from .columns import KNOWN_COLUMNS, LARGEST, Array
from .fields import MAX_METADATA_DEPTH, MAX_SHORT_TEXT, MAX_VERSION, is_plain
from .members import HAS_VERSION, Members, Reference, offsets
from .packet import StoredPacket
from .packet_encoding import MAX_HEADER_BYTES, version_of
from .schema import MAX_GROUP_SIZE, Column, Row, Step, Trajectory

#: Version of the format of streams, payloads and manifest. Within a version releases only add fields.
SCHEMA_VERSION: Final = 3


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
    """The payloads of a packet's members. columns: of all members, see `packet.decode_column`."""
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
