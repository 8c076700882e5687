"""The groups log of a shard: complete groups with the references of their members, until a trainer commits them.

The grouper appends to it (`lua/lib/complete.lua`), rank 0 of the trainer names batches from it, and whoever works on a
batch reads its groups here again by their pointers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import BaseModel, FiniteFloat, TypeAdapter

from ..errors import BatchLostError
from ..messages import brief, first_problem
from ..run import Run
from ..store.keys import RunKeys
from ..trajectory.members import (
    BASELINE,
    HAS_REWARD,
    HAS_VERSION,
    MEMBER,
    NO_MEMBERS,
    NO_STATE,
    ROW,
    STATUSES,
    STEP,
    Members,
)
from ..trajectory.packet import StoredPacket
from ..trajectory.reference import Reference, StepSpan, reference_problem
from ..trajectory.schema import Role

ENTRY_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class StoredScore(BaseModel):
    """A reward that `producer.score` brought, as `lua/group/score.lua` stores it."""

    reward: FiniteFloat
    rewards: dict[str, FiniteFloat] = {}


_SCORES: Final = TypeAdapter(dict[str, StoredScore])
_GROUP_FIELDS: Final = (
    *("group_id", "size", "data_source", "opened_ms", "outcome", "epoch", "version"),
    *("members", "scores", "payloads"),
)
_REFERENCES: Final = TypeAdapter(list[Reference])


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
    payloads: tuple[tuple[str, int], ...]  # key and bytes of every packet, as the push script saw them
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
            reference_of(self, member, self.packets[packet]) for member, packet in enumerate(self.packet_of)
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
        missing = [name for name in _GROUP_FIELDS if name.encode() not in fields]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
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


def _parse_group(keys: RunKeys, shard: int, entry: bytes, fields: Mapping[bytes, bytes]) -> LoggedGroup:
    group_id = fields[b"group_id"].decode()
    if not group_id or keys.shard_of(group_id) != shard:
        raise ValueError(f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}")
    lines = [line.rpartition(" ") for line in fields[b"payloads"].decode().split("\n")]
    payloads = tuple((key, int(size)) for key, _, size in lines)
    prefix = keys.shard(shard).payload("")
    if not all(key.startswith(prefix) and 0 < size < 1 << 40 for key, size in payloads):
        raise ValueError("payloads is not a list of payload keys and their bytes")
    members: list[Reference] = []
    try:
        members = _parse_members(fields)
        problem = _members_problem(group_id, members, payloads)
    except ValueError as error:
        problem = first_problem(error)
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
        payloads=payloads,
        count=len(payloads),
        problem=problem,
        **({} if problem else packets_of(members)),
    )


def packets_of(references: Sequence[Reference]) -> dict[str, Any]:
    packets = [
        StoredPacket(
            reference.key, reference.size, reference.epoch, reference.columns, _members_of(reference)
        )
        for reference in references
    ]
    return {
        "packets": tuple(packets),
        "members": Members.concat([packet.members for packet in packets]),
        "packet_of": tuple(range(len(packets))),
        "position_of": (0,) * len(packets),
    }


def _members_of(reference: Reference) -> Members:
    table = np.zeros(1, MEMBER)
    versions = reference.versions
    table[0] = (
        *(reference.rollout_index, STATUSES.index(reference.status)),
        HAS_REWARD * (reference.reward is not None)
        | BASELINE * reference.is_baseline
        | HAS_VERSION * (versions is not None),
        *(len(reference.row_lengths), len(reference.steps), reference.size),
        *(
            reference.reward or 0.0,
            *(versions or (0, 0)),
            sum(reference.row_lengths),
            sum(reference.row_trainable),
        ),
    )
    rows = np.array(list(zip(reference.row_lengths, reference.row_trainable, strict=True)), ROW)
    numbers: dict[str, int] = {}
    steps = [
        (
            s.row,
            s.start,
            s.end,
            NO_STATE if s.state_key is None else numbers.setdefault(s.state_key, len(numbers)),
            s.reward,
        )
        for s in reference.steps
    ]
    rewards = {name: np.array([value]) for name, value in reference.rewards.items()}
    return Members(table, rows, np.array(steps, STEP), tuple(numbers), rewards)


def reference_of(group: LoggedGroup, member: int, packet: StoredPacket) -> Reference:
    """Member number `member` of a group by itself."""
    one = group.members.select([member])
    record = one.table[0]
    flags = int(record["flags"])
    return Reference(
        group_id=group.group_id,
        rollout_index=int(record["index"]),
        key=packet.key,
        size=packet.size,
        row_lengths=tuple(one.rows["tokens"].tolist()),
        row_trainable=tuple(one.rows["trainable"].tolist()),
        status=STATUSES[int(record["status"])],
        reward=float(record["reward"]) if flags & HAS_REWARD else None,
        rewards={name: float(values[0]) for name, values in one.rewards.items() if not np.isnan(values[0])},
        role=Role.BASELINE if flags & BASELINE else Role.TRAIN,
        versions=(int(record["oldest"]), int(record["newest"])) if flags & HAS_VERSION else None,
        epoch=packet.epoch,
        data_source=group.data_source,
        steps=tuple(
            StepSpan(row, start, end, reward, None if state == NO_STATE else one.states[state])
            for row, start, end, state, reward in one.steps.tolist()
        ),
        columns=packet.columns,
    )


def _parse_members(fields: Mapping[bytes, bytes]) -> list[Reference]:
    members = _REFERENCES.validate_json(fields[b"members"])
    scores = _SCORES.validate_json(fields[b"scores"])
    if not scores:
        return members
    return [_with_score(member, scores.get(str(member.rollout_index))) for member in members]


def _with_score(member: Reference, score: StoredScore | None) -> Reference:
    return member if score is None else replace(member, **score.model_dump(exclude_unset=True))


def _members_problem(
    group_id: str, members: Sequence[Reference], payloads: Sequence[tuple[str, int]]
) -> str | None:
    """Why these are not the members whose payloads the push script has seen, or None."""
    if [(member.key, member.size) for member in members] != list(payloads):
        return "members are not those of its payloads"
    indices = [member.rollout_index for member in members]
    if indices != sorted(set(indices)) or any(member.group_id != group_id for member in members):
        return "members are of another group, or not in the order of their rollout_index"
    if any(member.reward is None for member in members):
        return "a member has no reward"
    problems = (
        f"member {member.rollout_index}: {problem}"
        for member in members
        if (problem := reference_problem(member)) is not None
    )
    return next(problems, None)


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
