"""From trajectories to packets: which of them travel together, and the bytes that are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic_core import from_json, to_json

from ..errors import TrajectoryError
from .columns import HEADER, OUTPUT_COLUMNS, REQUIRED_COLUMNS, Array
from .member_table import decode_table, encode_table, join_tables, plain_text, trace_of, with_trace
from .members import STEP, members_of, offsets, spans
from .packet import (
    REWARD,
    Packet,
    end_to_end,
    field_of,
    filter_value,
    member_line,
    split_packets,
    stored_bytes,
)
from .schema import Column, Role, Trajectory

#: Of the header of a payload.
MAX_HEADER_BYTES: Final = 1 << 20
_MEMBERS: Final = b',"members":['  # before the members' parts; no text in the JSON before holds a bare quote


class _Part(NamedTuple):
    """What a trajectory adds to its packet."""

    kind: object  # equal for trajectories that may share a packet
    columns: Mapping[str, Array]  # rows end to end; empty without a payload
    header: bytes  # JSON of its own part of the header, b"" where that is empty
    size: int  # bytes of both; 0 without a payload


@dataclass(frozen=True, slots=True)
class _Group:
    """What the trajectories of a push have in common."""

    size: int
    data_source: str | None
    filter_by: str = REWARD  # what the run's filters judge


def encode_packets(trajectories: Sequence[Trajectory], limit: int, filter_by: str = REWARD) -> list[Packet]:
    """Packets of the trajectories of one group, to be sent in this order.

    If a rollout_index stands in two trajectories, the second one is in a later packet. Raises TrajectoryError for more
    than `limit` bytes in a trajectory, for a header above MAX_HEADER_BYTES, for rows that differ in their columns, and
    for a trajectory without the number `filter_by`.
    """
    group = _Group(trajectories[0].group_size, trajectories[0].data_source, filter_by)
    parts = [_part(trajectory, group, limit) for trajectory in trajectories]
    order = _order([trajectory.rollout_index for trajectory in trajectories], [part.kind for part in parts])
    sizes = [
        part.size + _bytes_of_steps(trajectory) for part, trajectory in zip(parts, trajectories, strict=True)
    ]
    ranges = split_packets([key for key, _ in order], [sizes[position] for _, position in order])
    packets = []
    for start, stop in ranges:
        positions = [position for _, position in order[start:stop]]
        members = [trajectories[position] for position in positions]
        packets.append(_packet(group, positions, members, [parts[position] for position in positions]))
    return packets


def ended_packets(indices: Sequence[int], kind: str, role: str = Role.TRAIN) -> list[Packet]:
    """Packets of rollouts that end without a trajectory. kind: failed, aborted or cancelled. role: of their group."""
    order = sorted(range(len(indices)), key=indices.__getitem__)
    return [
        Packet(
            tuple(order[start:stop]),
            tuple(indices[position] for position in order[start:stop]),
            "".join(member_line(indices[p], kind, None, role) for p in order[start:stop]),
            b"",
            0,
            {},
        )
        for start, stop in split_packets([kind] * len(order), [0] * len(order))
    ]


def select_members(packet: Packet, chosen: Sequence[int]) -> Packet:
    """A packet of the `chosen` members of another one, by their places in it, ascending."""
    lines = packet.members.splitlines(keepends=True)
    positions = tuple(packet.positions[member] for member in chosen)
    indices = tuple(packet.indices[member] for member in chosen)
    text = "".join(lines[member] for member in chosen)
    if not packet.size:
        return Packet(positions, indices, text, b"", 0, {})
    members, names = decode_table(packet.table)
    header = packet.fields[HEADER]
    fields: dict[Any, Any] = {}
    for name in names:
        column = end_to_end(packet.fields[name])
        counts = members.entries.get(name, members.rows["tokens"])
        first = offsets(counts)[members.first_row]
        fields[name] = column[spans(first, np.asarray(chosen, np.int64))]
    fields[HEADER] = _select_header(header, chosen)
    table = with_trace(encode_table(members.select(chosen), names), trace_of(packet.table))
    return Packet(positions, indices, text, table, stored_bytes(fields), fields)


def merge_packets(packets: Sequence[Packet]) -> list[Packet]:
    """The same members of one group in fewer packets: those of one member each that differ in nothing but values.

    Packets with an index that stands in several of them stay as they are, in their order.
    """
    times = Counter([index for packet in packets for index in packet.indices])
    kinds: dict[Any, list[Packet]] = {}
    merged = []
    for packet in packets:
        kind = _kind_to_merge(packet)
        if kind is None or times[packet.indices[0]] > 1:
            merged.append(packet)
        else:
            kinds.setdefault(kind, []).append(packet)
    for same in kinds.values():
        same.sort(key=attrgetter("indices"))
        ranges = split_packets([None] * len(same), [packet.size for packet in same])
        merged += [_merged(same[start:stop]) for start, stop in ranges]
    return merged


def _kind_to_merge(packet: Packet) -> object | None:
    """Equal for packets that may become one; None for one that stays as it is."""
    text = plain_text(packet.table) if len(packet.indices) == 1 else None
    if text is None:
        return None
    return text, packet.fields[HEADER].partition(_MEMBERS)[0].rstrip(b"}"), " - " in packet.members


def _merged(packets: Sequence[Packet]) -> Packet:
    """One packet of several that may become one, given by ascending indices."""
    first = packets[0]
    if len(packets) == 1:
        return first
    fields: dict[Any, Any] = {
        name: field_of([packet.fields[name] for packet in packets]) for name in first.fields if name != HEADER
    }
    headers = [packet.fields[HEADER].partition(_MEMBERS) for packet in packets]
    head = next((header for header, found, _ in headers if not found), headers[0][0] + b"}")
    fields[HEADER] = join_headers(head, [own[:-2] for _, _, own in headers])
    return Packet(
        tuple(range(len(packets))),
        tuple([packet.indices[0] for packet in packets]),
        "".join([packet.members for packet in packets]),
        join_tables([packet.table for packet in packets]),
        stored_bytes(fields),
        fields,
    )


def _part(trajectory: Trajectory, group: _Group, limit: int) -> _Part:
    if kind_of(trajectory) != "usable":
        return _Part(None, {}, b"", 0)
    columns = _columns(trajectory)
    own = _header(trajectory, group)
    header = to_json(own) if own else b""
    size = sum(array.nbytes for array in columns.values()) + len(header)
    stored = size + _bytes_of_steps(trajectory)
    if stored > limit:
        what = "columns" if size > limit else "steps"
        raise TrajectoryError(
            f"trajectory {trajectory.group_id}/{trajectory.rollout_index} has {stored} bytes, "
            f"max_trajectory_bytes is {limit}: drop {what} or raise it for the run"
        )
    extras = [(name, *_kind_of_extra(column)) for name, column in trajectory.rows[0].extras.items()]
    kind = (tuple(sorted(columns)), tuple(sorted(extras)), trajectory.reward is None)
    return _Part(kind, columns, header, size)


def _bytes_of_steps(trajectory: Trajectory) -> int:
    """What its steps need in the member table. Turns of few tokens need more than the columns."""
    keys = {step.state_key for step in trajectory.steps} - {None}
    return len(trajectory.steps) * STEP.itemsize + sum(map(len, keys))  # type: ignore[arg-type]


def kind_of(trajectory: Trajectory) -> str:
    """usable, or why the slot ends without a trajectory: failed, aborted, unscorable."""
    if not trajectory.status.usable:
        return str(trajectory.status)
    return "unscorable" if trajectory.scored and trajectory.reward is None else "usable"


def _order(indices: Sequence[int], kinds: Sequence[object]) -> list[tuple[tuple[int, int], int]]:
    """The positions in the order of sending, each with a key that is equal for those that may share a packet."""
    seen: Counter[int] = Counter()
    numbers: dict[object, int] = {}
    order = []
    for position, (index, kind) in enumerate(zip(indices, kinds, strict=True)):
        order.append(((seen[index], numbers.setdefault(kind, len(numbers))), index, position))
        seen[index] += 1
    return [(key, position) for key, _, position in sorted(order)]


def _line(member: Trajectory, filter_by: str) -> str:
    kind, value = kind_of(member), member.reward
    if kind == "usable" and member.role is not Role.EVAL:
        try:
            value = filter_value(filter_by, member.reward, member.rewards, member.metadata)
        except ValueError as error:
            where = f"{member.group_id}/{member.rollout_index}"
            raise TrajectoryError(f"trajectory {where} {error}") from error
    return member_line(member.rollout_index, kind, value, member.role)


def _packet(
    group: _Group, positions: Sequence[int], members: Sequence[Trajectory], parts: Sequence[_Part]
) -> Packet:
    indices = tuple(member.rollout_index for member in members)
    text = "".join(_line(member, group.filter_by) for member in members)
    names = list(parts[0].columns)
    if not names:
        return Packet(tuple(positions), indices, text, b"", 0, {})
    fields: dict[Any, Any] = {name: field_of([part.columns[name] for part in parts]) for name in names}
    fields[HEADER] = join_headers(header_head(group.size, group.data_source), [part.header for part in parts])
    if len(fields[HEADER]) > MAX_HEADER_BYTES:
        raise TrajectoryError(
            f"metadata: header of {members[0].group_id}/{indices[0]} has {len(fields[HEADER])} bytes, "
            f"at most {MAX_HEADER_BYTES} are allowed: move large data into an extra column"
        )
    table = encode_table(members_of(members, [part.size for part in parts]), names)
    return Packet(tuple(positions), indices, text, table, stored_bytes(fields), fields)


def _columns(trajectory: Trajectory) -> dict[str, Array]:
    """The stored columns, rows end to end. Raises TrajectoryError where rows differ."""
    rows = trajectory.rows
    for name in rows[0].extras:
        if len({_kind_of_extra(row.extras[name]) for row in rows}) > 1:
            raise TrajectoryError(f"extra column {name} differs between rows in dtype, shape or per_token")
    arrays = [{**row.columns, **{name: column.data for name, column in row.extras.items()}} for row in rows]
    missing = [name for name in REQUIRED_COLUMNS if name not in arrays[0]]
    if missing:
        raise TrajectoryError(f"{missing[0]}: every row needs it")
    return {
        name: array if len(arrays) == 1 else np.concatenate([row[name] for row in arrays])
        for name, array in arrays[0].items()
        # What an earlier run computed, as in a file written by `consume`, is not stored.
        if name not in OUTPUT_COLUMNS
    }


def _kind_of_extra(column: Column) -> tuple[str, tuple[int, ...], bool]:
    return column.data.dtype.str, column.data.shape[1:], column.per_token


# The header: JSON, of which a reader of single columns sees nothing


def _header(trajectory: Trajectory, group: _Group) -> dict[str, Any]:
    """A trajectory's part of the header: what stands neither in the member table nor in a column."""
    rows, span = trajectory.rows, trajectory.version_span
    parts = {
        "metadata": trajectory.metadata,
        "agents": [row.agent for row in rows] if any(row.agent is not None for row in rows) else [],
        "row_rewards": [row.reward for row in rows] if any(row.reward is not None for row in rows) else [],
    }
    header: dict[str, Any] = {name: part for name, part in parts.items() if part}
    versions = None if span is None or rows[0].versions is not None else version_of(*span)
    if trajectory.model_version != versions:
        header["model_version"] = trajectory.model_version
    if trajectory.data_source != group.data_source:
        header["data_source"] = trajectory.data_source
    return header


def version_of(oldest: int, newest: int) -> int | tuple[int, int]:
    """The model_version of a trajectory with these versions and no column of them."""
    return oldest if oldest == newest else (oldest, newest)


@lru_cache(256)
def header_head(group_size: int, data_source: str | None) -> bytes:
    """The header of a packet whose members add nothing to it."""
    head: dict[str, Any] = {"group_size": group_size}
    if data_source is not None:
        head["data_source"] = data_source
    return to_json(head)


def join_headers(head: bytes, headers: Sequence[bytes]) -> bytes:
    """The header of a packet: `header_head` with each member's part."""
    if not any(headers):
        return head
    return b"%b%b%b]}" % (head[:-1], _MEMBERS, b",".join(header or b"{}" for header in headers))


def _select_header(header: bytes, chosen: Sequence[int]) -> bytes:
    parts = from_json(header)
    if "members" in parts:
        parts["members"] = [parts["members"][member] for member in chosen]
    return to_json(parts)
