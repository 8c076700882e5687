"""Makes packets from trajectories: decides which trajectories share a packet, and encodes the bytes to send."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic_core import from_json, to_json

from ..errors import TrajectoryError
from ..messages import brief
from .columns import HEADER, Array, versions_of
from .member_table import HEAD, MANY_ROWS, read_table
from .members import (
    HAS_REWARD,
    HAS_VERSION,
    MEMBER,
    NO_STATE,
    NO_STEPS,
    ROLE_FLAGS,
    ROW,
    STATUSES,
    STEP,
    Checked,
    Members,
    offsets,
    spans,
)
from .packet import MAX_HEADER_BYTES, MAX_PACKET_MEMBERS, REWARD, version_of
from .schema import Role

#: Size limit of a packet, as MAX_PACKET_MEMBERS; a single larger trajectory is a packet of its own.
MAX_PACKET_BYTES: Final = 256 << 10
#: A column of this many bytes is not copied before it is sent.
LARGE_COLUMN: Final = 32 << 10
_MEMBERS: Final = b',"members":['  # before the members' parts; no text in the JSON before holds a bare quote

_MEMBER: Final = struct.Struct("<HBBIIIdqqqq")
_ROW: Final = struct.Struct("<II")
_STEP: Final = struct.Struct("<IIIId")

NBYTES: Final = attrgetter("nbytes")


class Packet(NamedTuple):
    """An encoded packet."""

    positions: tuple[int, ...]  # of its members among the records of the push
    indices: tuple[int, ...]  # rollout indices, ascending
    members: str  # a line 'index kind reward role' for each, as scripts read them; reward '-' = none yet
    table: bytes  # b"" without a payload
    size: int  # bytes of the values of the payload; 0 without one
    fields: dict[Any, Any]  # of the payload: name -> array, tuple of arrays (end to end) or bytes
    parts: Sequence[Any] = ()  # what it was made of, for `merge_packets`; () for one that stays as it is


class Part(NamedTuple):
    """What a trajectory adds to its packet."""

    rollout_index: int
    position: int  # among the records of the push
    line: str  # of `Packet.members`
    kind: object = None  # parts with equal kinds may share a packet
    size: int = 0  # bytes of columns and header
    columns: Mapping[str, Array] = {}  # rows end to end; empty without a payload
    head: bytes = b""  # of the packet's header
    header: bytes = b""  # its own part of the header, JSON; b"" where there is nothing to say
    fields: Any = None  # a Checked
    steps_size: int = 0  # bytes that its steps need in the member table


def encode_packets(trajectories: Sequence[Checked], limit: int, filter_by: str = REWARD) -> list[Packet]:
    """Packets of the trajectories of one group, to be sent in this order; their extra columns are as the run has them.

    If a rollout_index stands in two trajectories, the second one is in a later packet. Raises TrajectoryError for more
    than `limit` bytes in a trajectory, for a header above MAX_HEADER_BYTES, and for a trajectory without the number
    `filter_by`.
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
        packets += _make_packets(first.values())
        parts = [part for part in parts if first[part.rollout_index] is not part]
    return packets


def ended_packets(indices: Sequence[int], kind: str, role: str = Role.TRAIN) -> list[Packet]:
    """Packets of rollouts that end without a trajectory. kind: failed, aborted or cancelled. role: of their group."""
    return _make_packets(
        [
            Part(index, position, member_line(index, kind, None, role))
            for position, index in enumerate(indices)
        ]
    )


def merge_packets(packets: Sequence[Packet]) -> list[Packet]:
    """The same members of one group in fewer packets.

    Packets with an index that stands in several of them stay as they are, in their order.
    """
    if len(packets) == 1:
        return list(packets)
    times = Counter([index for packet in packets for index in packet.indices])
    merged: list[Packet] = []
    parts: list[Part] = []
    for packet in packets:
        if packet.parts and all(times[index] == 1 for index in packet.indices):
            parts += packet.parts
        else:
            merged.append(packet)
    return merged + _make_packets(parts)


def _make_packets(parts: Iterable[Part]) -> list[Packet]:
    """The packets of trajectories of one group with different indices."""
    together: dict[object, list[Part]] = {}
    for part in sorted(parts, key=itemgetter(0)):
        together.setdefault(part.kind, []).append(part)
    packets = []
    for same in together.values():
        for start, stop in split_packets([part.size + part.steps_size for part in same]):
            own = same[start:stop]
            indices, positions, lines, _, sizes, columns, heads, headers, checked, _ = zip(*own, strict=True)
            table, size, fields, names = b"", 0, dict[Any, Any](), tuple(columns[0])
            if names:
                header = heads[0]
                if any(headers):
                    texts = b",".join([text or b"{}" for text in headers])
                    header = b"%b%b%b]}" % (header[:-1], _MEMBERS, texts)
                fields = {name: field_of([arrays[name] for arrays in columns]) for name in names}
                fields[HEADER] = header
                size = sum(sizes) - sum(map(len, headers)) + len(header)
                table = encode_table(members_of(checked, sizes), names)
            packets.append(Packet(positions, indices, "".join(lines), table, size, fields, own))
    return packets


def select_members(packet: Packet, chosen: Sequence[int]) -> Packet:
    """A packet of the `chosen` members of another one, by their places in it, ascending."""
    lines = packet.members.splitlines(keepends=True)
    positions = tuple(packet.positions[member] for member in chosen)
    indices = tuple(packet.indices[member] for member in chosen)
    text = "".join(lines[member] for member in chosen)
    if not packet.size:
        return Packet(positions, indices, text, b"", 0, {})
    members, names = read_table(packet.table)
    parts = from_json(packet.fields[HEADER])
    if "members" in parts:
        parts["members"] = [parts["members"][member] for member in chosen]
    header = to_json(parts)
    columns: dict[Any, Array] = {}
    for name in names:
        values = packet.fields[name]
        column = np.concatenate(values) if isinstance(values, tuple) else values
        counts = members.entries.get(name, members.rows["tokens"])
        first = offsets(counts)[members.first_row]
        columns[name] = column[spans(first, np.asarray(chosen, np.int64))]
    table = encode_table(members.select(chosen), names)
    size = sum(map(NBYTES, columns.values())) + len(header)
    return Packet(positions, indices, text, table, size, {**columns, HEADER: header})


def _part(position: int, trajectory: Checked, source: str | None, limit: int, filter_by: str) -> Part:
    """source: of the packet."""
    index, rows, steps = trajectory.rollout_index, trajectory.rows, trajectory.steps
    reward, role = trajectory.reward, trajectory.role
    has_failed = trajectory.status not in STATUSES
    if has_failed or (reward is None and trajectory.scored):
        why = str(trajectory.status) if has_failed else "unscorable"
        return Part(index, position, member_line(index, why, reward, role))
    of_rows = [
        {**row.columns, **{name: row.extras[name].data for name in sorted(row.extras)}}
        if row.extras
        else row.columns
        for row in rows
    ]
    columns = of_rows[0]
    if len(rows) > 1:
        columns = {name: np.concatenate([arrays[name] for arrays in of_rows]) for name in columns}
    header = _header(trajectory, source)
    head = _header_head(trajectory.group_size, source)
    size = sum(map(NBYTES, columns.values())) + len(header)
    keys = {step.state_key for step in steps} - {None}
    # What the member table needs. Turns of few tokens need more than the columns.
    steps_size = len(steps) * STEP.itemsize + sum(map(len, keys))  # type: ignore[arg-type]
    if size + steps_size > limit:
        what = "columns" if size > limit else "steps"
        raise TrajectoryError(
            f"trajectory {trajectory.group_id}/{index} has {size + steps_size} bytes, "
            f"max_trajectory_bytes is {limit}: drop {what} or raise it for the run"
        )
    header_size = len(head) + len(_MEMBERS) + len(header) + 1  # as `_make_packets` joins it
    if header_size > MAX_HEADER_BYTES:
        raise TrajectoryError(
            f"metadata: header of {trajectory.group_id}/{index} has {header_size} bytes, "
            f"at most {MAX_HEADER_BYTES} are allowed: move large data into an extra column"
        )
    value = reward if filter_by == REWARD or role == Role.EVAL else filter_value(filter_by, trajectory)
    return Part(
        index,
        position,
        member_line(index, "usable", value, role),
        (tuple(columns), reward is None, head),
        size,
        columns,
        head,
        header,
        trajectory,
        steps_size,
    )


# The header: JSON, of which a reader of single columns sees nothing


def _header(trajectory: Checked, source: str | None) -> bytes:
    """A trajectory's part of the header: what stands neither in the member table nor in a column."""
    rows, version = trajectory.rows, trajectory.model_version
    header: dict[str, Any] = {"metadata": trajectory.metadata} if trajectory.metadata else {}
    of_rows: dict[str, list[Any]] = {
        "agents": [row.agent for row in rows],
        "row_rewards": [row.reward for row in rows],
    }
    header |= {name: values for name, values in of_rows.items() if values.count(None) < len(values)}
    if version is not None:
        told = version_of(*version) if isinstance(version, tuple) else version  # by the member table
        if "versions" in rows[0].columns or version != told:
            header["model_version"] = version
    if trajectory.data_source != source:
        header["data_source"] = trajectory.data_source
    return to_json(header) if header else b""


@lru_cache(256)
def _header_head(group_size: int, data_source: str | None) -> bytes:
    """The header of a packet whose members add nothing to it."""
    head: dict[str, Any] = {"group_size": group_size}
    if data_source is not None:
        head["data_source"] = data_source
    return to_json(head)


# The member table, see `member_table.py`


def members_of(trajectories: Sequence[Checked], sizes: Sequence[int]) -> Members:
    """Usable trajectories as members. sizes: payload bytes of each. Nothing is checked."""
    records, rows, steps = [], list[tuple[int, int]](), []
    states: dict[str, int] = {}
    for one, size in zip(trajectories, sizes, strict=True):
        columns = [row.columns for row in one.rows]
        counts = [(len(row["input_ids"]), int(np.count_nonzero(row["response_mask"]))) for row in columns]
        rows += counts
        versions, reward = versions_of(one.model_version, columns), 0.0 if one.reward is None else one.reward
        flags = ROLE_FLAGS[one.role] | HAS_REWARD * (one.reward is not None)
        flags |= HAS_VERSION * (versions is not None)
        record = (one.rollout_index, STATUSES.index(one.status), flags, len(counts), len(one.steps), size)
        tokens, trainable = map(sum, zip(*counts, strict=True))
        records.append(_MEMBER.pack(*record, reward, *(versions or (0, 0)), tokens, trainable))
        for row, start, end, step_reward, key in one.steps:
            state = NO_STATE if key is None else states.setdefault(key, len(states))
            steps.append(_STEP.pack(row, start, end, state, step_reward))
    named = dict.fromkeys(chain.from_iterable([one.rewards for one in trajectories]))
    extras = [row.extras for one in trajectories for row in one.rows]
    counted = [name for name, column in extras[0].items() if not column.per_token] if extras else ()
    return Members(
        np.frombuffer(b"".join(records), MEMBER),
        np.frombuffer(b"".join([_ROW.pack(*pair) for pair in rows]), ROW),
        np.frombuffer(b"".join(steps), STEP) if steps else NO_STEPS,
        tuple(states),
        {name: np.array([one.rewards.get(name, np.nan) for one in trajectories]) for name in named},
        {name: np.array([len(row[name].data) for row in extras], np.uint32) for name in counted},
    )


def encode_table(members: Members, columns: Sequence[str]) -> bytes:
    """The member table. columns: names of the payload's columns."""
    count = len(members.table)
    has_many_rows = len(members.rows) != count
    names = (tuple(columns), members.states, tuple(members.rewards), tuple(members.entries))
    text = _text(*names) if members.states else _cached_text(*names)
    parts = [
        members.table.tobytes(),
        members.rows.tobytes() if has_many_rows else b"",
        members.steps.tobytes(),
        *(np.asarray(values, "<f8").tobytes() for values in members.rewards.values()),
        *(np.asarray(counts, "<u4").tobytes() for counts in members.entries.values()),
        text,
    ]
    size = HEAD.size + sum(map(len, parts))
    return b"".join([HEAD.pack(size, count, MANY_ROWS * has_many_rows, len(text)), *parts])


def _text(
    columns: tuple[str, ...], states: tuple[str, ...], rewards: tuple[str, ...], entries: tuple[str, ...]
) -> bytes:
    names = {"columns": tuple(sorted(columns)), "states": states, "rewards": rewards, "entries": entries}
    return json.dumps({name: texts for name, texts in names.items() if texts}).encode()


_cached_text: Final = lru_cache(256)(_text)


# What a packet is made of


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


def filter_value(name: str, trajectory: Checked) -> float | None:
    """The number by which a run with `filter_by` = `name` judges a trajectory; None while it has no reward.

    Raises TrajectoryError if it has no such reward, and no number of this name in its metadata.
    """
    if trajectory.reward is None:
        return None
    value = trajectory.rewards.get(name, trajectory.metadata.get(name))
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TrajectoryError(
            f"trajectory {trajectory.group_id}/{trajectory.rollout_index} has no reward and no number {brief(name)}, "
            "by which the run filters (filter_by)"
        )
    return float(value)


def member_line(index: int, kind: str, reward: float | None, role: str) -> str:
    """A line of `Packet.members`. kind: usable, or why the slot ended: failed, aborted, cancelled, unscorable."""
    return f"{index} {kind} {'-' if reward is None else repr(reward)} {role}\n"


def split_packets(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of members, given their bytes, that make a packet each. They are spread evenly."""
    if len(sizes) <= MAX_PACKET_MEMBERS and sum(sizes) <= MAX_PACKET_BYTES:
        return [(0, len(sizes))]
    filled = _fill(sizes, MAX_PACKET_BYTES)
    spread = _fill(sizes, min(MAX_PACKET_BYTES, sum(sizes) // len(filled) + max(sizes) - 1))
    return spread if len(spread) == len(filled) else filled


def _fill(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Ranges of at most `limit` bytes; a larger member is one by itself."""
    ranges: list[tuple[int, int]] = []
    start = total = 0
    for position, size in enumerate(sizes):
        if position > start and (position - start == MAX_PACKET_MEMBERS or total + size > limit):
            ranges.append((start, position))
            start, total = position, 0
        total += size
    return [*ranges, (start, len(sizes))]
