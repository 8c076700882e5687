"""Plain records and trajectories straight to packets: the short way of what almost every push brings.

A plain record is a dict of one row: arrays of their columns' dtypes, a float as reward, and metadata of Python's own
types. `plain_packets` makes the same packets of it as `encode_packets` does of the validated `Trajectory`, at a
fraction of the cost; `plain_trajectories` likewise of a `Trajectory`. Everything else, and everything wrong, is left to
the full checks, which alone word the errors.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from pydantic_core import to_json

from .columns import HEADER, KNOWN_COLUMNS, REQUIRED_COLUMNS, check_values
from .member_table import plain_table
from .members import HAS_REWARD, HAS_VERSION, MEMBER, ROLE_FLAGS, STATUSES
from .packet import Packet, field_of, member_line, split_packets
from .packet_encoding import MAX_HEADER_BYTES, header_head, join_headers
from .schema import MAX_GROUP_SIZE, Role, Trajectory

#: Fields of a plain record beside its columns.
_SCALARS: Final = frozenset(
    ("rollout_index", "reward", "reward_later", "status", "role", "model_version", "metadata")
)
_STATUS: Final = {str(status): number for number, status in enumerate(STATUSES)}
_FLAGS: Final = {str(role): flag for role, flag in ROLE_FLAGS.items()}
#: Roles of members by that of their group.
_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    Role.TRAIN: (str(Role.TRAIN), str(Role.BASELINE)),
    Role.EVAL: (str(Role.EVAL),),
}
_RECORD: Final = struct.Struct("<HBBIIIdqqqq")
assert _RECORD.size == MEMBER.itemsize
_MAX_VERSION: Final = 2**53
_MAX_BYTES: Final = 2**32 - 1  # that an entry of the member table can say
#: Less than the full checks allow: what is deeper is theirs.
_MAX_DEPTH: Final = 24
_NO_METADATA: Final[Mapping[str, Any]] = {}


#: Names and dtypes, in the order of writing.
Columns = tuple[tuple[str, np.dtype[Any]], ...]


class Defaults(Protocol):
    """What a ticket says of the records of its group."""

    @property
    def group_id(self) -> str: ...
    @property
    def rollout_index(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def model_version(self) -> int | None: ...
    @property
    def role(self) -> str: ...
    @property
    def data_source(self) -> str | None: ...
    @property
    def metadata(self) -> dict[str, Any]: ...


class _Member(NamedTuple):
    """A plain record, checked but for the values of its columns."""

    rollout_index: int
    position: int  # among the records
    size: int  # bytes of the columns and of its part of the header
    entry: bytes  # of the member table
    text: str
    header: bytes
    record: Mapping[str, Any]


def plain_packets(records: Sequence[Any], defaults: Defaults, limit: int) -> list[Packet] | None:
    """The packets of plain records with different slots, at most `limit` bytes each; None if they are not all that."""
    if type(records) not in (list, tuple) or not records or type(records[0]) is not dict:
        return None
    columns = _columns_of(tuple(records[0]))
    if columns is None or not _is_plain_ticket(defaults):
        return None
    width = sum(dtype.itemsize for _, dtype in columns)
    keys = records[0].keys()
    members: list[_Member] = []
    metadata = header = None
    for position, record in enumerate(records):
        if type(record) is not dict or record.keys() != keys:
            return None
        own = record.get("metadata", _NO_METADATA)
        if own is not metadata or header is None:  # records often share theirs
            metadata, header = own, _header(own, defaults.metadata)
        member = None if header is None else _member(position, record, defaults, columns, width, header)
        if member is None or member.size > limit:
            return None
        members.append(member)
    return _packets(members, defaults.group_size, defaults.data_source, columns)


def plain_trajectories(trajectories: Sequence[Trajectory], limit: int) -> list[Packet] | None:
    """The packets of trajectories of one group, if they are of the common kind: one row, a reward, no versions."""
    group, row = trajectories[0], next(iter(trajectories[0].rows), None)
    columns = None if row is None else _columns_of(tuple(row.columns))
    if columns is None:
        return None
    width = sum(dtype.itemsize for _, dtype in columns)
    members: list[_Member] = []
    for position, trajectory in enumerate(trajectories):
        member = _member_of(position, trajectory, group.data_source, columns, width)
        if member is None or member.size > limit:
            return None
        members.append(member)
    return _packets(members, group.group_size, group.data_source, columns)


def _packets(
    members: list[_Member], group_size: int, data_source: str | None, columns: Columns
) -> list[Packet] | None:
    """None if two members have one slot."""
    members.sort(key=itemgetter(0))
    if len({member.rollout_index for member in members}) < len(members):
        return None
    packets = []
    for start, stop in split_packets([None] * len(members), [member.size for member in members]):
        packet = _packet(members[start:stop], header_head(group_size, data_source), columns)
        if packet is None:
            return None
        packets.append(packet)
    return packets


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
            or (type(data_source) is str and len(data_source) <= 200 and data_source.isascii())
        )
    )


def _is_plain_ticket(ticket: Defaults) -> bool:
    return (
        is_plain_group(ticket.group_id, ticket.data_source)
        and type(ticket.group_size) is int
        and 1 <= ticket.group_size <= MAX_GROUP_SIZE
        and type(ticket.slots) is int
        and ticket.role in _ROLES
        and type(ticket.metadata) is dict
    )


def _member(
    position: int,
    record: Mapping[str, Any],
    defaults: Defaults,
    columns: Columns,
    width: int,
    header: bytes,
) -> _Member | None:
    get = record.get
    index, reward = get("rollout_index", defaults.rollout_index), get("reward")
    status, role = get("status", "completed"), get("role", defaults.role)
    version = get("model_version", defaults.model_version)
    if (
        type(index) is not int
        or not 0 <= index < defaults.slots
        or index >= 2 * MAX_GROUP_SIZE
        or type(reward) is not float
        or not isfinite(reward)
        or get("reward_later", False) is not False
        or type(status) is not str
        or status not in _STATUS
        or type(role) is not str
        or role not in _ROLES[defaults.role]
        or not (version is None or (type(version) is int and 0 <= version < _MAX_VERSION))
    ):
        return None
    ids = record["input_ids"]
    if type(ids) is not np.ndarray or ids.ndim != 1 or not len(ids):
        return None
    shape = ids.shape
    for name, dtype in columns:
        array = record[name]
        if type(array) is not np.ndarray or array.shape != shape:
            return None
        if array.dtype is not dtype and array.dtype != dtype:
            return None
    return _made(position, index, len(ids), width, reward, status, role, version, header, record)


def _made(
    position: int,
    index: int,
    tokens: int,
    width: int,
    reward: float,
    status: str,
    role: str,
    version: int | None,
    header: bytes,
    record: Mapping[str, Any],
) -> _Member | None:
    size, version_flag = tokens * width + len(header), 0 if version is None else HAS_VERSION
    if size > _MAX_BYTES:
        return None
    flags, number = HAS_REWARD | _FLAGS[role] | version_flag, version or 0
    ones = np.count_nonzero(record["response_mask"])
    entry = _RECORD.pack(index, _STATUS[status], flags, 1, 0, size, reward, number, number, tokens, ones)
    text = member_line(index, "usable", reward, role)
    return _Member(index, position, size, entry, text, header, record)


def _member_of(
    position: int, trajectory: Trajectory, data_source: str | None, columns: Columns, width: int
) -> _Member | None:
    rows, reward, version = trajectory.rows, trajectory.reward, trajectory.model_version
    if (
        len(rows) != 1
        or type(reward) is not float
        or not trajectory.status.usable
        or trajectory.steps
        or trajectory.rewards
        or trajectory.data_source != data_source
        or isinstance(version, tuple)
    ):
        return None
    row = rows[0]
    values = row.__dict__  # attribute access goes through pydantic
    if row.__pydantic_extra__ or values["agent"] is not None or values["reward"] is not None:
        return None
    if [name for name in KNOWN_COLUMNS if values[name] is not None] != [name for name, _ in columns]:
        return None
    header = to_json({"metadata": trajectory.metadata}) if trajectory.metadata else b""
    tokens, index = len(values["input_ids"]), trajectory.rollout_index
    status, role = trajectory.status, trajectory.role
    return _made(position, index, tokens, width, reward, status, role, version, header, values)


def _header(metadata: Any, shared: Mapping[str, Any]) -> bytes | None:
    """A record's part of the header; None for metadata that is not plain."""
    if type(metadata) is not dict:
        return None
    if not metadata and not shared:
        return b""
    merged = {**shared, **metadata}
    return to_json({"metadata": merged}) if _is_plain(merged, _MAX_DEPTH) else None


def is_plain_metadata(metadata: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether this is a dict of so many levels at most that needs no further checks."""
    return type(metadata) is dict and _is_plain(metadata, depth)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether this is what JSON preserves, in Python's own types."""
    kind = type(value)
    if kind is str:
        return value.isascii() or _is_unicode(value)
    if kind is float:
        return isfinite(value)
    if kind is dict and depth > 0:
        for key, item in value.items():
            if type(key) is not str or not _is_plain(key, 0) or not _is_plain(item, depth - 1):
                return False
        return True
    if kind is list:
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or kind is bool or (kind is int and value.bit_length() <= 64)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _packet(members: Sequence[_Member], head: bytes, columns: Columns) -> Packet | None:
    """The packet of these members; None if a column has wrong values, or the header is too large."""
    fields: dict[Any, Any] = {}
    for name, _ in columns:
        fields[name] = column = field_of([member.record[name] for member in members])
        for part in column if isinstance(column, list) else [column]:
            if not part.flags.c_contiguous:
                return None
            try:
                check_values(name, part)
            except ValueError:
                return None
    headers = [member.header for member in members]
    fields[HEADER] = header = join_headers(head, headers)
    if len(header) > MAX_HEADER_BYTES:
        return None
    size = sum([member.size for member in members]) - sum(map(len, headers)) + len(header)
    return Packet(
        tuple([member.position for member in members]),
        tuple([member.rollout_index for member in members]),
        "".join([member.text for member in members]),
        plain_table([member.entry for member in members], tuple([name for name, _ in columns])),
        size,
        fields,
    )
