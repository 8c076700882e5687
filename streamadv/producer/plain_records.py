"""Plain records straight to packets: the short way of what almost every push brings.

A plain record is a dict of one row: arrays of their columns' dtypes, a float as reward, and metadata of Python's own
types. `plain_packets` makes the same packets of it as `encode_packets` does of the validated `Trajectory`, at a
fraction of the cost. Everything else, and everything wrong, is left to the full checks, which alone word the errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite
from typing import Any, Final

import numpy as np
from pydantic_core import to_json

from ..trajectory.columns import KNOWN_COLUMNS, REQUIRED_COLUMNS, check_values
from ..trajectory.fields import MAX_SHORT_TEXT, MAX_VERSION, is_plain
from ..trajectory.members import STATUSES, pack_record
from ..trajectory.packet import Packet, member_line, parts_of
from ..trajectory.packet_encoding import MAX_HEADER_BYTES, Part, header_head, make_packets
from ..trajectory.schema import MAX_GROUP_SIZE, Role
from .tickets import Ticket

#: Fields of a plain record beside its columns.
_SCALARS: Final = frozenset(
    ("rollout_index", "reward", "reward_later", "status", "role", "model_version", "metadata")
)
#: Roles of members by that of their group.
_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    Role.TRAIN: (Role.TRAIN, Role.BASELINE),
    Role.EVAL: (Role.EVAL,),
}
_NO_METADATA: Final[Mapping[str, Any]] = {}

#: Names and dtypes, in the order of writing.
Columns = tuple[tuple[str, np.dtype[Any]], ...]


def plain_packets(records: Sequence[Any], ticket: Ticket, limit: int) -> list[Packet] | None:
    """The packets of plain records with different slots, at most `limit` bytes each; None if they are not all that."""
    if type(records) not in (list, tuple) or not records or type(records[0]) is not dict:
        return None
    columns = _columns_of(tuple(records[0]))
    if columns is None or not _is_plain_ticket(ticket):
        return None
    keys, head = records[0].keys(), header_head(ticket.group_size, ticket.data_source)
    parts: dict[int, Part] = {}  # by rollout index
    metadata = header = None
    for position, record in enumerate(records):
        if type(record) is not dict or record.keys() != keys:
            return None
        own = record.get("metadata", _NO_METADATA)
        if own is not metadata or header is None:  # records often share theirs
            metadata, header = own, _header(own, ticket.metadata)
        part = None if header is None else _part(position, record, ticket, columns, head, header, limit)
        if part is None or part.rollout_index in parts:
            return None
        parts[part.rollout_index] = part
    packets = make_packets(parts.values())
    return packets if all(_has_right_values(packet, columns) for packet in packets) else None


def _has_right_values(packet: Packet, columns: Columns) -> bool:
    """Whether arrays lie as they are sent, and hold what they may."""
    try:
        for name, _ in columns:
            for array in parts_of(packet.fields[name]):
                if not array.flags.c_contiguous:
                    return False
                check_values(name, array)
    except ValueError:
        return False
    return True


@lru_cache(64)
def _columns_of(names: tuple[Any, ...]) -> Columns | None:
    """The columns among the names of a record's fields, in the order of writing; None where one is not plain."""
    # `versions` say which policies made a trajectory: the full way looks at their values.
    columns = {name: dtype for name, dtype in KNOWN_COLUMNS.items() if name in names and name != "versions"}
    is_plain = set(names) <= columns.keys() | _SCALARS and columns.keys() >= set(REQUIRED_COLUMNS)
    return tuple(columns.items()) if is_plain else None


def is_plain_group(group_id: Any, data_source: Any) -> bool:
    """Whether these need no further checks."""
    return (
        type(group_id) is str
        and 1 <= len(group_id) <= 200
        and group_id.isascii()
        and group_id.isprintable()
        and " " not in group_id
        and (
            data_source is None
            or (type(data_source) is str and len(data_source) <= MAX_SHORT_TEXT and data_source.isascii())
        )
    )


def _is_plain_ticket(ticket: Ticket) -> bool:
    return (
        is_plain_group(ticket.group_id, ticket.data_source)
        and type(ticket.group_size) is int
        and 1 <= ticket.group_size <= MAX_GROUP_SIZE
        and type(ticket.slots) is int
        and ticket.role in _ROLES
        and type(ticket.metadata) is dict
    )


def _part(
    position: int,
    record: Mapping[str, Any],
    ticket: Ticket,
    columns: Columns,
    head: bytes,
    header: bytes,
    limit: int,
) -> Part | None:
    """What a record adds to its packet; the values of its columns are not checked."""
    get = record.get
    index, reward = get("rollout_index", ticket.rollout_index), get("reward")
    status, role = get("status", "completed"), get("role", ticket.role)
    version = get("model_version", ticket.model_version)
    if (
        type(index) is not int
        or not 0 <= index < ticket.slots
        or index >= 2 * MAX_GROUP_SIZE
        or type(reward) is not float
        or not isfinite(reward)
        or get("reward_later", False) is not False
        or type(status) is not str
        or status not in STATUSES
        or type(role) is not str
        or role not in _ROLES[ticket.role]
        or not (version is None or (type(version) is int and 0 <= version < MAX_VERSION))
    ):
        return None
    ids = record["input_ids"]
    if type(ids) is not np.ndarray or ids.ndim != 1 or not len(ids):
        return None
    arrays, shape, width = {}, ids.shape, 0  # bytes of a token
    for name, dtype in columns:
        arrays[name] = array = record[name]
        width += dtype.itemsize
        if type(array) is not np.ndarray or array.shape != shape:
            return None
        if array.dtype is not dtype and array.dtype != dtype:
            return None
    size = len(ids) * width + len(header)
    if size > limit:
        return None
    versions = None if version is None else (version, version)
    ones = np.count_nonzero(arrays["response_mask"])
    packed = pack_record(index, status, role, reward, versions, size, len(ids), ones)
    line = member_line(index, "usable", reward, role)
    return Part(index, position, line, None, size, packed, arrays, head, header)


def _header(metadata: Any, shared: Mapping[str, Any]) -> bytes | None:
    """A record's part of the header; None for metadata that is not plain."""
    if type(metadata) is not dict:
        return None
    if not metadata and not shared:
        return b""
    merged = {**shared, **metadata}
    header = to_json({"metadata": merged}) if is_plain(merged) else None
    return header if header is not None and len(header) < MAX_HEADER_BYTES // 2 else None
