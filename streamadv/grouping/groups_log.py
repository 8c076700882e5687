"""The groups log of a shard: complete groups with their packets, until a trainer commits them.

The grouper appends to it (`lua/lib/complete.lua`), rank 0 of the trainer names batches from it, and whoever works on a
batch reads its groups here again by their pointers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import BaseModel, FiniteFloat, TypeAdapter

from ..errors import BatchLostError, WireError
from ..messages import brief, first_problem
from ..run import Run
from ..store.keys import RunKeys
from ..trajectory.members import (
    BASELINE,
    HAS_REWARD,
    HAS_VERSION,
    NO_MEMBERS,
    NO_STATE,
    STATUSES,
    Members,
    decode_table,
    members_problem,
)
from ..trajectory.packet import StoredPacket
from ..trajectory.reference import Reference, StepSpan
from ..trajectory.schema import Role

ENTRY_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class StoredScore(BaseModel):
    """A reward that `producer.score` brought, as `lua/group/score.lua` stores it."""

    reward: FiniteFloat
    rewards: dict[str, FiniteFloat] = {}


_SCORES: Final = TypeAdapter(dict[str, StoredScore])
_GROUP_FIELDS: Final = (
    *(b"group_id", b"size", b"data_source", b"opened_ms", b"outcome", b"epoch", b"version", b"count"),
    *(b"payloads", b"tables", b"scores"),
)
_TABLE_SIZE: Final = struct.Struct("<I")


class Pointer(NamedTuple):
    """The place of a group in the groups logs of a run."""

    shard: int
    entry: str
    group_id: str
    trajectories: int
    tokens: int = 0  # of all of them


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """An entry of a groups log; members sorted by rollout_index.

    Member m is member `position_of[m]` of packet `packet_of[m]`.
    """

    shard: int
    entry: str
    group_id: str
    size: int
    data_source: str | None
    outcome: str
    opened_ms: int
    epoch: int
    version: int | None
    payloads: tuple[tuple[str, int], ...]  # key and bytes of every packet
    count: int  # of trajectories, also where the members cannot be read
    packets: tuple[StoredPacket, ...] = ()
    members: Members = NO_MEMBERS
    packet_of: tuple[int, ...] = ()
    position_of: tuple[int, ...] = ()
    problem: str | None = None  # why the members could not be read
    malformed: bool = False  # it is no group at all

    @property
    def pointer(self) -> Pointer:
        tokens = int(self.members.table["tokens"].sum())
        return Pointer(self.shard, self.entry, self.group_id, len(self.members), tokens)

    @property
    def references(self) -> list[Reference]:
        """The members one by one. Costs some microseconds each: loops over a batch use `members`."""
        return [
            reference_of(self.group_id, self.data_source, self.members, position)
            for position in range(len(self.members))
        ]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.payloads)

    @property
    def logged_ms(self) -> int:
        """When it was completed: the log assigns the id by the server's clock."""
        return int(self.entry.partition("-")[0])

    @property
    def position(self) -> tuple[int, int, int]:
        """Sorts groups by age, and those of one shard as they stand in its log: one script logs many in a ms."""
        return self.logged_ms, self.shard, int(self.entry.partition("-")[2])

    @property
    def begun_epoch(self) -> int:
        """Fencing epoch in which the group was begun. Its tickets tell it if a server has lost it with the group."""
        return max([self.epoch, *(packet.epoch for packet in self.packets)])


def parse_group(keys: RunKeys, shard: int, entry: bytes, fields: Mapping[bytes, bytes]) -> LoggedGroup:
    """Parse an entry of a groups log and fill in rewards that came after the push.

    An entry that is no group is `malformed`; a group whose members cannot be read has a `problem`.
    """
    try:
        missing = [name for name in _GROUP_FIELDS if name not in fields]
        if missing:
            raise ValueError(f"{missing[0].decode()} is missing")
        return _parse_group(keys, shard, entry, fields)
    except ValueError as error:
        return LoggedGroup(
            shard=shard,
            entry=entry.decode(),
            group_id="",
            size=0,
            data_source=None,
            outcome="",
            opened_ms=0,
            epoch=0,
            version=None,
            payloads=(),
            count=0,
            problem=first_problem(error),
            malformed=True,
        )


class _PayloadLine(NamedTuple):
    """A packet of a group as scripts log it: all that commit needs to know of it."""

    key: str
    size: int
    epoch: int
    mask: str  # '1' for each member that counts for the group, else '0'


def _parse_group(keys: RunKeys, shard: int, entry: bytes, fields: Mapping[bytes, bytes]) -> LoggedGroup:
    group_id = fields[b"group_id"].decode()
    if not group_id or keys.shard_of(group_id) != shard:
        raise ValueError(f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}")
    lines = _payload_lines(fields[b"payloads"].decode(), keys.shard(shard).payload(""))
    count = sum(line.mask.count("1") for line in lines)
    if int(fields[b"count"]) != count:
        raise ValueError(
            f"count is {brief(fields[b'count'])}, {count} members count by the masks of its packets"
        )
    members: _Members | None = None
    problem = None
    try:
        members = _read_members(lines, fields[b"tables"], fields[b"scores"])
    except (ValueError, WireError) as error:
        problem = first_problem(error) if isinstance(error, ValueError) else str(error)
    return LoggedGroup(
        shard=shard,
        entry=entry.decode(),
        group_id=group_id,
        size=int(fields[b"size"]),
        data_source=fields[b"data_source"].decode() or None,
        outcome=fields[b"outcome"].decode(),
        opened_ms=int(fields[b"opened_ms"]),
        epoch=int(fields[b"epoch"]),
        version=int(fields[b"version"]) if fields[b"version"] else None,
        payloads=tuple((line.key, line.size) for line in lines),
        count=count,
        problem=problem,
        **(members._asdict() if members else {}),
    )


def _payload_lines(text: str, prefix: str) -> list[_PayloadLine]:
    """Raises ValueError."""
    lines = []
    for line in text.split("\n"):
        key, size, epoch, mask = line.split(" ")
        if not key.startswith(prefix) or not 0 < int(size) < 1 << 40 or not mask.strip("01") == "":
            raise ValueError("payloads is not a list of payload keys, their bytes, epochs and masks")
        lines.append(_PayloadLine(key, int(size), int(epoch), mask))
    return lines


class _Members(NamedTuple):
    """The fields of a LoggedGroup that tell of its members."""

    packets: tuple[StoredPacket, ...]
    members: Members
    packet_of: tuple[int, ...]
    position_of: tuple[int, ...]


def _read_members(lines: Sequence[_PayloadLine], tables: bytes, scores: bytes) -> _Members:
    """Those that count, sorted by index. Raises ValueError and WireError for what no producer has pushed."""
    packets = _read_packets(lines, tables)
    members = Members.concat([packet.members for packet in packets])
    mask = "".join(line.mask for line in lines)
    packet_of = np.repeat(np.arange(len(packets)), [len(packet.members) for packet in packets])
    position_of = np.concatenate([np.arange(len(packet.members)) for packet in packets])
    if len(packets) > 1 or "0" in mask:
        live = np.flatnonzero(np.frombuffer(mask.encode(), np.uint8) == ord("1"))
        live = live[np.argsort(members.table["index"][live], kind="stable")]
        members, packet_of, position_of = members.select(live), packet_of[live], position_of[live]
        if (np.diff(members.table["index"].astype(np.int64)) <= 0).any():
            raise ValueError("a rollout_index stands in it twice")
    if scores != b"{}":
        members = _with_scores(members, _SCORES.validate_json(scores))
    if not (members.table["flags"] & HAS_REWARD).all():
        raise ValueError("a member has no reward")
    return _Members(tuple(packets), members, tuple(packet_of.tolist()), tuple(position_of.tolist()))


def _read_packets(lines: Sequence[_PayloadLine], tables: bytes) -> list[StoredPacket]:
    packets, at = [], 0
    for line in lines:
        if len(tables) - at < _TABLE_SIZE.size:
            raise ValueError(f"tables end before packet {line.key}")
        (size,) = _TABLE_SIZE.unpack_from(tables, at)
        members, columns = decode_table(memoryview(tables)[at : at + size])
        problem = members_problem(members, line.size)
        if problem is not None:
            raise ValueError(f"packet {line.key}: {problem}")
        if len(line.mask) != len(members):
            raise ValueError(f"packet {line.key} has {len(members)} members, its mask {line.mask}")
        packets.append(StoredPacket(line.key, line.size, line.epoch, columns, members))
        at += size
    if at != len(tables):
        raise ValueError(f"tables have {len(tables) - at} bytes that belong to no packet")
    return packets


def _with_scores(members: Members, scores: Mapping[str, StoredScore]) -> Members:
    """The members with rewards that came after their push."""
    table = members.table.copy()
    rewards = {name: values.copy() for name, values in members.rewards.items()}
    for position, index in enumerate(table["index"].tolist()):
        score = scores.get(str(index))
        if score is None:
            continue
        table["reward"][position] = score.reward
        table["flags"][position] |= HAS_REWARD
        for name, values in rewards.items() if score.rewards else ():
            values[position] = score.rewards.get(name, np.nan)
        for name in score.rewards.keys() - rewards.keys():
            rewards[name] = np.full(len(table), np.nan)
            rewards[name][position] = score.rewards[name]
    return replace(members, table=table, rewards=rewards)


def reference_of(group_id: str, data_source: str | None, members: Members, position: int) -> Reference:
    """The member at `position` by itself."""
    member = members.select([position])
    record = member.table[0]
    flags = int(record["flags"])
    return Reference(
        group_id=group_id,
        rollout_index=int(record["index"]),
        row_lengths=tuple(member.rows["tokens"].tolist()),
        row_trainable=tuple(member.rows["trainable"].tolist()),
        status=STATUSES[int(record["status"])],
        reward=float(record["reward"]) if flags & HAS_REWARD else None,
        rewards={
            name: float(values[0]) for name, values in member.rewards.items() if not np.isnan(values[0])
        },
        role=Role.BASELINE if flags & BASELINE else Role.TRAIN,
        versions=(int(record["oldest"]), int(record["newest"])) if flags & HAS_VERSION else None,
        data_source=data_source,
        steps=tuple(
            StepSpan(row, start, end, reward, None if state == NO_STATE else member.states[state])
            for row, start, end, state, reward in member.steps.tolist()
        ),
    )


def read_log(run: Run, shard: int, after: str, count: int) -> list[LoggedGroup]:
    """Up to `count` groups of a shard's log after the entry `after` ('0-0' = from the start)."""
    key = run.keys.shard(shard).groups
    entries: Any = run.connection.scripts.xrange(key, f"({after}", "+", count)
    return [parse_group(run.keys, shard, entry, fields) for entry, fields in entries]


def read_groups(run: Run, pointers: Sequence[Pointer]) -> list[LoggedGroup]:
    """The groups of a batch, in its order. Raises BatchLostError if the server no longer has one."""
    groups = []
    for pointer, group in zip(pointers, find_groups(run, pointers), strict=True):
        if group is None or group.group_id != pointer.group_id:
            raise BatchLostError(
                f"group {pointer.group_id} of a named batch is gone: restart the trainer from its checkpoint"
            )
        groups.append(group)
    return groups


def find_groups(run: Run, pointers: Sequence[Pointer]) -> list[LoggedGroup | None]:
    """The groups pointed at, None where the log has no such entry (any more)."""
    entries = _read_ranges(run, pointers)
    others = [pointer for pointer in pointers if (pointer.shard, pointer.entry) not in entries]
    pipe = run.connection.scripts.pipeline(transaction=False)
    for pointer in others:
        pipe.xrange(run.keys.shard(pointer.shard).groups, pointer.entry, pointer.entry)
    for pointer, reply in zip(others, pipe.execute() if others else (), strict=True):
        if reply:
            entries[pointer.shard, pointer.entry] = reply[0][1]
    places = [(pointer.shard, pointer.entry) for pointer in pointers]
    return [
        parse_group(run.keys, place[0], place[1].encode(), entries[place]) if place in entries else None
        for place in places
    ]


def _read_ranges(run: Run, pointers: Sequence[Pointer]) -> dict[tuple[int, str], Mapping[bytes, bytes]]:
    """Entries by shard and id, as far as they follow each other in the log: one read for each shard.

    Those of a batch mostly do, because groups are named in the order of the log.
    """
    ids: dict[int, list[str]] = {}
    for pointer in pointers:
        ids.setdefault(pointer.shard, []).append(pointer.entry)
    entries: dict[tuple[int, str], Mapping[bytes, bytes]] = {}
    for shard, in_shard in ids.items():
        in_shard.sort(key=lambda entry: [int(part) for part in entry.split("-")])
        key = run.keys.shard(shard).groups
        reply: Any = run.connection.scripts.xrange(key, in_shard[0], in_shard[-1], len(in_shard))
        entries |= {(shard, entry.decode()): fields for entry, fields in reply}
    return entries
