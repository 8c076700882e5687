"""The payload as readers of whole trajectories have it: scorers, `consume`, `batch.delivered`.

A packet's payload holds the columns of all its members end to end, and a header: JSON with what stands neither in the
member table nor in a column. Readers of single columns leave the header alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from ..errors import WireError
from ..messages import first_problem
from .columns import KNOWN_COLUMNS, Array
from .fields import Metadata, ShortText, Version
from .members import Members, offsets
from .packet import MAX_PACKET_MEMBERS, StoredPacket
from .packet_encoding import MAX_HEADER_BYTES, version_of
from .reference import Reference
from .schema import MAX_GROUP_SIZE, MAX_ROWS, Column, Row, Step, Trajectory

#: Of the streams, the payloads and the manifest. Within a version releases only add fields.
SCHEMA_VERSION: Final = 2


class MemberHeader(BaseModel):
    """One trajectory's part of the header, empty parts left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    metadata: Metadata = {}
    agents: tuple[ShortText | None, ...] = Field(default=(), max_length=MAX_ROWS)  # of its rows
    row_rewards: tuple[FiniteFloat | None, ...] = Field(default=(), max_length=MAX_ROWS)
    model_version: Version | tuple[Version, Version] | None = None  # where the member table does not tell
    data_source: ShortText | None = None  # where it is not the packet's


class PacketHeader(BaseModel):
    """The header of a packet's payload."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    group_size: int = Field(ge=1, le=MAX_GROUP_SIZE)
    data_source: ShortText | None = None
    members: tuple[MemberHeader, ...] = Field(default=(), max_length=MAX_PACKET_MEMBERS)  # of all, or of none


def parse_header(text: bytes, members: Members) -> PacketHeader:
    """The header of a payload of these members. Raises WireError if it is none."""
    if len(text) > MAX_HEADER_BYTES:
        raise WireError(f"payload header has {len(text)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = _parse_header(text)
    except ValidationError as error:
        raise WireError(f"payload header: {first_problem(error)}") from error
    if len(header.members) not in (0, len(members)):
        raise WireError(f"payload header has {len(header.members)} members, its packet {len(members)}")
    for member, rows in zip(header.members, members.table["rows"].tolist(), strict=False):
        if not {len(member.agents), len(member.row_rewards)} <= {0, rows}:
            raise WireError(
                f"payload header has agents or row_rewards of other rows than the packet's {rows}"
            )
    return header


@lru_cache(16)  # members of a packet are asked one after another
def _parse_header(text: bytes) -> PacketHeader:
    return PacketHeader.model_validate_json(text)


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
    entries: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # of each row, of columns not per token

    @property
    def header(self) -> Header:
        """Parsed when it is asked for: most payloads never are, and the garbage collector would walk it."""
        header = parse_header(self.header_json, self.packet.members)
        member = header.members[self.position] if header.members else MemberHeader()
        given = member.model_fields_set
        return Header(
            header.group_size,
            member.data_source if "data_source" in given else header.data_source,
            member.model_version if "model_version" in given else self._version(),
            member.metadata,
            member.agents,
            member.row_rewards,
        )

    def _version(self) -> int | tuple[int, int] | None:
        record = self.packet.members.select([self.position])
        if "versions" in self.packet.columns or not record.has_version[0]:
            return None
        return version_of(int(record.table["oldest"][0]), int(record.table["newest"][0]))


def payloads_of(packet: StoredPacket, columns: Mapping[str, Array], header: bytes) -> list[Payload]:
    """The payloads of a packet's members. columns: of all members, see `packet.decode_column`."""
    members = packet.members
    first_row = members.first_row
    bounds_of = {
        name: offsets(members.entries.get(name, members.rows["tokens"]))[first_row].tolist()
        for name in columns
    }
    rows = first_row.tolist()
    counts = {name: members.entries[name].tolist() for name in columns if name in members.entries}
    return [
        Payload(
            {
                name: column[bounds_of[name][position] : bounds_of[name][position + 1]]
                for name, column in columns.items()
            },
            packet,
            position,
            header,
            {name: count[rows[position] : rows[position + 1]] for name, count in counts.items()},
        )
        for position in range(len(members))
    ]


def payload_trajectory(
    reference: Reference, payload: Payload, outputs: Mapping[str, Array] | None = None, **fields: Any
) -> Trajectory:
    """A trajectory with all its columns, plus output columns and fields (batch, staleness).

    Raises WireError when header and columns contradict each other.
    """
    header = payload.header
    columns = {**payload.columns, **(outputs or {})}
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
        for number in range(len(reference.row_lengths)):
            values = {
                name: _of_row(reference, payload, name, array, number) for name, array in columns.items()
            }
            agent = header.agents[number] if header.agents else None
            reward = header.row_rewards[number] if header.row_rewards else None
            rows.append(Row(agent=agent, reward=reward, **values))
        steps = [Step(**span._asdict()) for span in reference.steps]
        return Trajectory.model_validate({**data, "rows": rows, "steps": steps, **fields})
    except ValidationError as error:
        raise WireError(f"payload header: {first_problem(error)}") from error


def _of_row(reference: Reference, payload: Payload, name: str, array: Array, row: int) -> Any:
    lengths = payload.entries.get(name, reference.row_lengths)
    start = sum(lengths[:row])
    part = array[start : start + lengths[row]]
    if name in KNOWN_COLUMNS or name not in payload.columns:
        return part
    return Column(data=part, per_token=name not in payload.entries)
