"""From trajectories to packets: which of them travel together, and the bytes that are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic_core import from_json, to_json

from ..errors import TrajectoryError
from .columns import HEADER, KNOWN_COLUMNS, Array
from .member_table import decode_table, encode_table, plain_parts, plain_table, trace_of, with_trace
from .members import STATUSES, STEP, members_of, offsets, record_of, spans
from .packet import (
    NBYTES,
    REWARD,
    Packet,
    field_of,
    filter_value,
    member_line,
    parts_of,
    split_packets,
)
from .schema import Column, Role, Row, Step, Trajectory

#: Of the header of a payload.
MAX_HEADER_BYTES: Final = 1 << 20
_MEMBERS: Final = b',"members":['  # before the members' parts; no text in the JSON before holds a bare quote


class Part(NamedTuple):
    """What a trajectory adds to its packet."""

    rollout_index: int
    position: int  # among the records of the push
    line: str  # of `Packet.members`
    kind: object = None  # equal for those that may share a packet
    size: int = 0  # bytes of columns and header
    record: bytes = b""  # its MEMBER
    columns: Mapping[str, Any] = {}  # rows end to end; empty without a payload
    head: bytes = b""  # of the packet's header
    header: bytes = b""  # its own part of the header, JSON; b"" where there is nothing to say
    trajectory: Trajectory | None = None  # None for a plain record
    steps_size: int = 0  # bytes that its steps need in the member table
    is_plain: bool = True  # its member table has nothing behind the record


def encode_packets(trajectories: Sequence[Trajectory], limit: int, filter_by: str = REWARD) -> list[Packet]:
    """Packets of the trajectories of one group, to be sent in this order.

    If a rollout_index stands in two trajectories, the second one is in a later packet. Raises TrajectoryError for more
    than `limit` bytes in a trajectory, for a header above MAX_HEADER_BYTES, for rows that differ in their columns, and
    for a trajectory without the number `filter_by`.
    """
    source = trajectories[0].data_source
    parts = [
        _part(position, trajectory, source, limit, filter_by)
        for position, trajectory in enumerate(trajectories)
    ]
    packets: list[Packet] = []
    while parts:
        first: dict[int, Part] = {}  # by rollout index
        for part in parts:
            first.setdefault(part.rollout_index, part)
        packets += make_packets(first.values())
        parts = [part for part in parts if first[part.rollout_index] is not part]
    return packets


def ended_packets(indices: Sequence[int], kind: str, role: str = Role.TRAIN) -> list[Packet]:
    """Packets of rollouts that end without a trajectory. kind: failed, aborted or cancelled. role: of their group."""
    return make_packets(
        [
            Part(index, position, member_line(index, kind, None, role))
            for position, index in enumerate(indices)
        ]
    )


def make_packets(parts: Iterable[Part]) -> list[Packet]:
    """The packets of trajectories of one group with different indices."""
    together: dict[object, list[Part]] = {}
    for part in sorted(parts, key=itemgetter(0)):
        together.setdefault(part.kind, []).append(part)
    packets = []
    for same in together.values():
        ranges = split_packets([part.size + part.steps_size for part in same])
        packets += [_packet(same[start:stop]) for start, stop in ranges]
    return packets


def _packet(parts: Sequence[Part]) -> Packet:
    indices, positions, lines, _, sizes, records, columns, heads, headers, *rest = zip(*parts, strict=True)
    text, names = "".join(lines), tuple(columns[0])
    if not names:
        return Packet(positions, indices, text, b"", 0, {})
    fields: dict[Any, Any] = {name: field_of([own[name] for own in columns]) for name in names}
    fields[HEADER] = header = _join_headers(heads[0], headers)
    size = sum(sizes) - sum(map(len, headers)) + len(header)
    trajectories, _, are_plain = rest
    is_plain = all(are_plain)
    table = plain_table(records, names) if is_plain else encode_table(members_of(trajectories, sizes), names)
    return Packet(positions, indices, text, table, size, fields)


def select_members(packet: Packet, chosen: Sequence[int]) -> Packet:
    """A packet of the `chosen` members of another one, by their places in it, ascending."""
    lines = packet.members.splitlines(keepends=True)
    positions = tuple(packet.positions[member] for member in chosen)
    indices = tuple(packet.indices[member] for member in chosen)
    text = "".join(lines[member] for member in chosen)
    if not packet.size:
        return Packet(positions, indices, text, b"", 0, {})
    members, names = decode_table(packet.table)
    header = _select_header(packet.fields[HEADER], chosen)
    columns: dict[Any, Array] = {}
    for name in names:
        column = np.concatenate(parts_of(packet.fields[name]))
        counts = members.entries.get(name, members.rows["tokens"])
        first = offsets(counts)[members.first_row]
        columns[name] = column[spans(first, np.asarray(chosen, np.int64))]
    table = with_trace(encode_table(members.select(chosen), names), trace_of(packet.table))
    size = sum(map(NBYTES, columns.values())) + len(header)
    return Packet(positions, indices, text, table, size, {**columns, HEADER: header})


def merge_packets(packets: Sequence[Packet]) -> list[Packet]:
    """The same members of one group in fewer packets: those of one member each that differ in nothing but values.

    Packets with an index that stands in several of them stay as they are, in their order.
    """
    if len(packets) == 1:
        return list(packets)
    times = Counter([index for packet in packets for index in packet.indices])
    merged, parts = [], []
    for packet in packets:
        part = _part_of(packet) if times[packet.indices[0]] == 1 else None
        if part is None:
            merged.append(packet)
        else:
            parts.append(part)
    return merged + make_packets(parts)


def _part_of(packet: Packet) -> Part | None:
    """What the packet was made of; None for one that stays as it is."""
    plain = plain_parts(packet.table) if len(packet.indices) == 1 else None
    if plain is None:
        return None
    record, names = plain
    header = packet.fields[HEADER]
    head, found, own = header.partition(_MEMBERS)
    head, own = head + b"}" if found else head, own.removesuffix(b"]}")
    columns = {name: column for name, column in packet.fields.items() if name != HEADER}
    size = packet.size - len(header) + len(own)
    kind = names, head, " - " in packet.members
    return Part(packet.indices[0], 0, packet.members, kind, size, record, columns, head, own)


def _part(position: int, trajectory: Trajectory, source: str | None, limit: int, filter_by: str) -> Part:
    """source: of the packet."""
    fields = trajectory.__dict__  # attribute access goes through pydantic
    index, rows, steps = fields["rollout_index"], fields["rows"], fields["steps"]
    reward, role, kind = fields["reward"], fields["role"], kind_of(trajectory)
    if kind != "usable":
        return Part(index, position, member_line(index, kind, reward, role))
    columns, header = _columns(rows), _header(fields, source)
    head = header_head(fields["group_size"], source)
    size = sum(map(NBYTES, columns.values())) + len(header)
    steps_size = _bytes_of_steps(steps) if steps else 0
    if size + steps_size > limit:
        what = "columns" if size > limit else "steps"
        raise TrajectoryError(
            f"trajectory {trajectory.group_id}/{index} has {size + steps_size} bytes, "
            f"max_trajectory_bytes is {limit}: drop {what} or raise it for the run"
        )
    header_size = len(head) + len(_MEMBERS) + len(header) + 1  # as `_join_headers` makes it
    if header_size > MAX_HEADER_BYTES:
        raise TrajectoryError(
            f"metadata: header of {trajectory.group_id}/{index} has {header_size} bytes, "
            f"at most {MAX_HEADER_BYTES} are allowed: move large data into an extra column"
        )
    value = reward
    if filter_by != REWARD and role is not Role.EVAL:
        try:
            value = filter_value(filter_by, reward, trajectory.rewards, trajectory.metadata)
        except ValueError as error:
            raise TrajectoryError(f"trajectory {trajectory.group_id}/{index} {error}") from error
    kinds = None
    if extras := rows[0].extras:
        kinds = frozenset([(name, *_kind_of_extra(extra)) for name, extra in extras.items()])
    return Part(
        index,
        position,
        member_line(index, kind, value, role),
        (tuple(columns), kinds, reward is None),
        size,
        record_of(trajectory, size, columns["response_mask"]),
        columns,
        head,
        header,
        trajectory,
        steps_size,
        len(rows) == 1
        and not (steps or fields["rewards"])
        and (not extras or all(extra.per_token for extra in extras.values())),
    )


def _bytes_of_steps(steps: Sequence[Step]) -> int:
    """What they need in the member table. Turns of few tokens need more than the columns."""
    keys = {step.state_key for step in steps} - {None}
    return len(steps) * STEP.itemsize + sum(map(len, keys))  # type: ignore[arg-type]


def kind_of(trajectory: Trajectory) -> str:
    """usable, or why the slot ends without a trajectory: failed, aborted, unscorable."""
    if trajectory.status not in STATUSES:
        return str(trajectory.status)
    return "unscorable" if trajectory.reward is None and trajectory.scored else "usable"


def _columns(rows: Sequence[Row]) -> dict[str, Array]:
    """The stored columns, rows end to end. Raises TrajectoryError where rows differ."""
    # What an earlier run computed, as in a file written by `consume`, is not stored.
    columns = []
    for row in rows:
        values = row.__dict__
        columns.append({name: array for name in KNOWN_COLUMNS if (array := values[name]) is not None})
    for name in sorted(extras) if (extras := rows[0].extras) else ():
        if len({_kind_of_extra(row.extras[name]) for row in rows}) > 1:
            raise TrajectoryError(f"extra column {name} differs between rows in dtype, shape or per_token")
        for row, arrays in zip(rows, columns, strict=True):
            arrays[name] = row.extras[name].data
    if len(rows) == 1:
        return columns[0]
    return {name: np.concatenate([arrays[name] for arrays in columns]) for name in columns[0]}


def _kind_of_extra(column: Column) -> tuple[str, tuple[int, ...], bool]:
    return column.data.dtype.str, column.data.shape[1:], column.per_token


# The header: JSON, of which a reader of single columns sees nothing


def _header(fields: Mapping[str, Any], source: str | None) -> bytes:
    """A trajectory's part of the header: what stands neither in the member table nor in a column."""
    rows, version = fields["rows"], fields["model_version"]
    header = {"metadata": fields["metadata"]} if fields["metadata"] else {}
    first = rows[0].__dict__
    for name, field in (("agents", "agent"), ("row_rewards", "reward")):
        if len(rows) > 1 or first[field] is not None:
            values = [row.__dict__[field] for row in rows]
            if values.count(None) < len(values):
                header[name] = values
    if version is not None:
        told = version_of(*version) if isinstance(version, tuple) else version  # by the member table
        if first["versions"] is not None or version != told:
            header["model_version"] = version
    if fields["data_source"] != source:
        header["data_source"] = fields["data_source"]
    return to_json(header) if header else b""


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


def _join_headers(head: bytes, headers: Sequence[bytes]) -> bytes:
    """The header of a packet: `header_head` with each member's part."""
    if not any(headers):
        return head
    return b"%b%b%b]}" % (head[:-1], _MEMBERS, b",".join([header or b"{}" for header in headers]))


def _select_header(header: bytes, chosen: Sequence[int]) -> bytes:
    parts = from_json(header)
    if "members" in parts:
        parts["members"] = [parts["members"][member] for member in chosen]
    return to_json(parts)
