"""The groups log of a shard: complete groups with their packets, until a trainer commits them.

The grouper appends to it (`lua/lib/close.lua`). Rank 0 of the trainer names batches from it. Later stages read the
groups of a batch here again, by their pointers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import BaseModel, FiniteFloat, TypeAdapter

from ..errors import BatchLostError, WireError
from ..messages import brief, first_problem
from ..run import Run
from ..store.keys import EntryId, RunKeys
from ..store.replies import MAX_TEXT, as_text
from ..trajectory.columns import COLUMN_NAME
from ..trajectory.member_table import cut_tables, read_tables
from ..trajectory.members import NO_MEMBERS, Members, Named, Positions, offsets
from ..trajectory.packet import StoredPacket

#: Characters of the head of a group: its numbers, and the data source.
MAX_HEAD: Final = 100 + MAX_TEXT
#: Head of a logged group: see `log_group` in `lua/lib/close.lua`.
_HEAD: Final = re.compile(5 * r"([0-9]{1,15}) " + r"([a-z_]+) (.*)", re.DOTALL)


class StoredScore(BaseModel):
    """A reward that `producer.score` brought, as `lua/group/score.lua` stores it."""

    reward: FiniteFloat
    rewards: dict[str, FiniteFloat] = {}


_SCORES: Final = TypeAdapter(dict[str, StoredScore])


class Pointer(NamedTuple):
    """The place of a group in the groups logs of a run."""

    shard: int
    entry: str
    group_id: str
    trajectories: int
    tokens: int = 0  # of all of them


#: `oldest` of a group none of whose members has a version: no staleness is above any limit.
NO_VERSION: Final = 1 << 62


class GroupSums(NamedTuple):
    """What the members of a group add up to: naming and commit go by these numbers."""

    tokens: int
    oldest: int  # version of the trainable tokens, or NO_VERSION
    baselines: int
    longest_row: int  # in tokens


NO_SUMS: Final = GroupSums(0, NO_VERSION, 0, 0)


class StoredColumns(NamedTuple):
    """A group's own columns, as the log refers to them."""

    key: str  # of their payload
    size: int  # bytes of it
    names: tuple[str, ...]


@dataclass(slots=True, eq=False)
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
    payloads: tuple[tuple[str, int], ...]  # key and bytes of every packet, and of the group's columns
    count: int  # of trajectories, also where the members cannot be read
    packets: Sequence[StoredPacket] = ()
    members: Members = NO_MEMBERS
    packet_of: Sequence[int] | Positions = ()
    position_of: Sequence[int] | Positions = ()
    sums: GroupSums = NO_SUMS
    problem: str | None = None  # why the members could not be read
    malformed: bool = False  # it is no group at all
    columns: StoredColumns | None = None  # that all members share

    @property
    def pointer(self) -> Pointer:
        return Pointer(self.shard, self.entry, self.group_id, len(self.members), self.sums.tokens)

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.payloads)

    @property
    def logged_ms(self) -> int:
        """When it was completed: the log assigns the id by the server's clock."""
        return EntryId.of(self.entry).ms

    @property
    def position(self) -> tuple[int, int, int]:
        """Sorts groups by age, and those of one shard as they stand in its log: one script logs many in a ms."""
        ms, number = EntryId.of(self.entry)
        return ms, self.shard, number

    @property
    def begun_epoch(self) -> int:
        """Fencing epoch in which the group was begun. Its tickets tell it if a server has lost it with the group."""
        return max([self.epoch, *(packet.epoch for packet in self.packets)])


class PacketLine(NamedTuple):
    """A packet of a group as scripts log it."""

    key: str
    size: int
    epoch: int
    mask: str  # '1' for each member that counts for the group, else '0'


class StoredMembers(NamedTuple):
    """What an entry tells of the members of a group."""

    lines: Sequence[PacketLine]
    tables: Sequence[memoryview]  # of the packets
    scores: bytes


#: An entry of a shard's groups log as it was read: shard, id, fields.
RawEntry = tuple[int, bytes, Mapping[bytes, bytes]]


def parse_groups(keys: RunKeys, entries: Sequence[RawEntry]) -> list[LoggedGroup]:
    """Parse entries of groups logs, and fill in rewards that came after the push.

    An entry that is no group is `malformed`; a group whose members cannot be read has a `problem`.
    """
    prefixes = {shard: keys.shards[shard].payload("") for shard in {entry[0] for entry in entries}}
    parsed = [_parse_entry(keys, prefixes[entry[0]], *entry) for entry in entries]
    readable = [(group, stored) for group, stored in parsed if stored is not None]
    read_in_halves(readable, _fill_in)
    return [group for group, _ in parsed]


def _parse_entry(
    keys: RunKeys, payload_prefix: str, shard: int, entry: bytes, fields: Mapping[bytes, bytes]
) -> tuple[LoggedGroup, StoredMembers | None]:
    try:
        group_id = fields[b"group_id"].decode()
        if not group_id or keys.shard_of(group_id) != shard:
            raise ValueError(f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}")
        lines, columns = payload_lines(fields[b"payloads"].decode(), payload_prefix)
        head = _HEAD.fullmatch(text := as_text(fields[b"head"], MAX_HEAD))
        if head is None:
            needs = "size, count, opened at, epoch, version, outcome, data source"
            raise ValueError(f"head is {brief(text)}, needs {needs}")
        size, counted, opened_ms, epoch, version, outcome, data_source = head.groups()
        count = sum([line.mask.count("1") for line in lines])
        if int(counted) != count or count == 0:
            raise ValueError(f"count is {counted}, {count} members count by their masks")
        group = LoggedGroup(
            shard,
            entry.decode(),
            group_id,
            int(size),
            data_source or None,
            outcome,
            int(opened_ms),
            int(epoch),
            int(version),
            (*(line[:2] for line in lines), *(one[:2] for one in columns)),
            count,
            columns=columns[0] if columns else None,
        )
        return group, StoredMembers(lines, cut_tables(fields[b"tables"]), fields.get(b"scores", b"{}"))
    except KeyError as error:
        problem = f"{error.args[0].decode()} is missing"
    except ValueError as error:
        problem = first_problem(error)
    nothing = (shard, entry.decode(), "", 0, None, "", 0, 0, None, (), 0)
    return LoggedGroup(*nothing, problem=problem, malformed=True), None


def payload_lines(text: str, prefix: str) -> tuple[list[PacketLine], list[StoredColumns]]:
    """The packets, and the group's own columns if it has some. prefix: of payload keys. Raises ValueError."""
    lines: list[PacketLine] = []
    columns: list[StoredColumns] = []
    for line in text.split("\n"):
        key, size, epoch, mask = line.split(" ")
        names = mask.split(",") if mask.strip("01") else []
        is_right = (
            key.startswith(prefix) and 0 < int(size) < 1 << 40 and all(map(COLUMN_NAME.fullmatch, names))
        )
        if not is_right or (names and columns):
            raise ValueError("payloads is not a list of payload keys, their bytes, epochs and masks")
        if names:
            columns.append(StoredColumns(key, int(size), tuple(names)))
        else:
            lines.append(PacketLine(key, int(size), int(epoch), mask))
    return lines, columns


# Members


def read_in_halves(
    groups: Sequence[tuple[Any, StoredMembers]],
    fill_in: Callable[[Sequence[tuple[Any, StoredMembers]], Members, list[StoredPacket]], None],
) -> None:
    """Read the members of groups, all of them together; in halves, if one of them has a problem: that gets its text.

    fill_in: takes groups, all members of their packets, also those that do not count, and the packets. It may raise
    WireError and ValueError for what no producer has pushed; some of the groups may have their members then.
    """
    if not groups:
        return
    entries = [stored for _, stored in groups]
    try:
        for stored in entries:
            if len(stored.tables) != len(stored.lines):
                raise ValueError(f"{len(stored.tables)} member tables for {len(stored.lines)} packets")
        lines = [line for stored in entries for line in stored.lines]
        tables = read_tables(
            [table for stored in entries for table in stored.tables], [line.size for line in lines]
        )
        for line, count in zip(lines, tables.counts, strict=True):
            if len(line.mask) != count:
                raise ValueError(f"packet {line.key} has {count} members, its mask {line.mask}")
        parts = tables.members.parts(offsets(tables.counts).tolist(), tables.names)
        packets = [
            StoredPacket(line.key, line.size, line.epoch, columns, part)
            for line, columns, part in zip(lines, tables.columns, parts, strict=True)
        ]
        fill_in(groups, tables.members, packets)
    except (WireError, ValueError) as error:
        if len(groups) == 1:
            groups[0][0].problem = first_problem(error) if isinstance(error, ValueError) else str(error)
            return
        middle = len(groups) // 2
        read_in_halves(groups[:middle], fill_in)
        read_in_halves(groups[middle:], fill_in)


def _fill_in(
    groups: Sequence[tuple[LoggedGroup, StoredMembers]], members: Members, packets: Sequence[StoredPacket]
) -> None:
    """Give each group the members that count, sorted by index, and where they are in its packets."""
    all_rewarded = bool(members.has_reward.all())
    first_member = offsets([len(packet.members) for packet in packets])
    first_packet = offsets([len(stored.lines) for _, stored in groups])
    packet = np.repeat(np.arange(len(packets)), np.diff(first_member))  # [M]
    group = np.repeat(np.arange(len(groups)), np.diff(first_packet))[packet]  # [M]
    mask = "".join([line.mask for _, stored in groups for line in stored.lines]).encode()
    live = np.flatnonzero(np.frombuffer(mask, np.uint8) == ord("1"))
    live = live[np.lexsort((members.table["index"][live], group[live]))]
    packet, group = packet[live], group[live]
    is_in_order = len(live) == len(members) and bool((np.diff(live) == 1).all())
    if not is_in_order:
        members = members.select(live)
    if ((np.diff(group) == 0) & (np.diff(members.table["index"].astype(np.int64)) == 0)).any():
        raise ValueError("a rollout_index stands in it twice")
    first = offsets(np.bincount(group, minlength=len(groups)))
    packet_of, position_of = packet - first_packet[group], live - first_member[packet]
    if is_in_order and np.array_equal(first, first_member):  # each group is one packet, as most are
        parts = [packet.members for packet in packets]
    else:
        own = [packets[a:b] for a, b in pairwise(first_packet.tolist())]
        parts = members.parts(first.tolist(), list(map(_names_of, own)))
    spans, of_packets = pairwise(first.tolist()), pairwise(first_packet.tolist())
    found = zip(groups, parts, spans, of_packets, sums_of(members, first), strict=True)
    for (logged, stored), part, (start, stop), (a, b), sums in found:
        part = with_scores(part, stored.scores)
        if not all_rewarded and not part.has_reward.all():
            raise ValueError("a member has no reward")
        logged.packets, logged.members, logged.sums = packets[a:b], part, sums
        logged.packet_of, logged.position_of = packet_of[start:stop], position_of[start:stop]


def _names_of(packets: Sequence[StoredPacket]) -> Named:
    """The named rewards and entry counts that any of the packets has."""
    rewards, entries = ([getattr(packet.members, kind) for packet in packets] for kind in Named._fields)
    return Named(dict.fromkeys(chain.from_iterable(rewards)), dict.fromkeys(chain.from_iterable(entries)))


def sums_of(members: Members, first: Positions) -> list[GroupSums]:
    """Of G groups, of which group g has the members first[g] : first[g + 1], one at least."""
    table, starts = members.table, first[:-1]
    sums = (
        np.add.reduceat(table["tokens"], starts),
        np.minimum.reduceat(np.where(members.has_version, table["oldest"], NO_VERSION), starts),
        np.add.reduceat(members.is_baseline, starts, dtype=np.int64),
        np.maximum.reduceat(members.longest_row, starts),
    )
    return list(map(GroupSums, *(numbers.tolist() for numbers in sums)))


def with_scores(members: Members, scores: bytes) -> Members:
    """The members, those pushed without a reward with what `scores` (JSON) has for them. Raises ValueError."""
    if scores == b"{}":
        return members
    found, indices = _SCORES.validate_json(scores), members.table["index"]
    none = dict.fromkeys(members.rewards, np.nan)
    given = {
        position: (score.reward, {**none, **score.rewards} if score.rewards else {})
        for position in np.flatnonzero(~members.has_reward).tolist()
        if (score := found.get(str(indices[position]))) is not None
    }
    return members.with_rewards(given)


def read_log(run: Run, shard: int, after: str, count: int) -> list[LoggedGroup]:
    """Up to `count` groups of a shard's log after the entry `after` ('0-0' = from the start)."""
    return parse_groups(run.keys, read_entries(run, shard, after, count))


def read_entries(run: Run, shard: int, after: str, count: int) -> list[RawEntry]:
    """What `read_log` parses."""
    key = run.keys.shards[shard].groups
    entries: Any = run.connection.scripts.xrange(key, f"({after}", "+", count)
    return [(shard, *entry) for entry in entries]


def read_groups(run: Run, pointers: Sequence[Pointer]) -> list[LoggedGroup]:
    """The groups of a batch, in its order. Raises BatchLostError if the server no longer has one."""
    groups = []
    for pointer, group in zip(pointers, find_groups(run, pointers), strict=True):
        if group is None:
            raise BatchLostError(
                f"group {pointer.group_id} of a named batch is gone: restart the trainer from its checkpoint"
            )
        groups.append(group)
    return groups


def find_groups(run: Run, pointers: Sequence[Pointer]) -> list[LoggedGroup | None]:
    """The groups pointed at, None where the log has them no more: a server may have given the entry to another one."""
    if not pointers:
        return []
    # One read for each shard: those of a batch mostly follow each other in the log, in whose order groups are named.
    ids: dict[int, list[str]] = {}
    for pointer in pointers:
        ids.setdefault(pointer.shard, []).append(pointer.entry)
    pipe = run.connection.scripts.pipeline(transaction=False)
    for shard, in_shard in ids.items():
        in_shard.sort(key=EntryId.of)
        pipe.xrange(run.keys.shards[shard].groups, in_shard[0], in_shard[-1], len(in_shard))
    replies: Any = pipe.execute()
    entries: dict[tuple[int, str], Mapping[bytes, bytes]] = {
        (shard, entry.decode()): fields
        for shard, reply in zip(ids, replies, strict=True)
        for entry, fields in reply
    }
    others = [pointer for pointer in pointers if (pointer.shard, pointer.entry) not in entries]
    pipe = run.connection.scripts.pipeline(transaction=False)
    for pointer in others:
        pipe.xrange(run.keys.shards[pointer.shard].groups, pointer.entry, pointer.entry)
    for pointer, reply in zip(others, pipe.execute() if others else (), strict=True):
        if reply:
            entries[pointer.shard, pointer.entry] = reply[0][1]
    places = [(pointer.shard, pointer.entry) for pointer in pointers]
    found = [(place[0], place[1].encode(), entries[place]) for place in places if place in entries]
    groups = {(group.shard, group.entry, group.group_id): group for group in parse_groups(run.keys, found)}
    return [groups.get((pointer.shard, pointer.entry, pointer.group_id)) for pointer in pointers]
