"""Batch k: the ordered groups one policy update consumes, recorded once and immutable until commit.

Rank 0 of the trainer queue names a batch by writing its record into the home slot (`name`). What
follows from it in the shards (`apply`) is idempotent by the batch's id and repeated until every shard has it.
Which groups go in is decided in `naming.py`, how they leave again in `commits.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from ..errors import BatchLostError, EpochFencedError, WireError
from ..messages import brief, first_problem
from ..run import Run
from ..run.malformed import reject_item
from ..store.keys import RunKeys
from ..trajectory.wire import Reference, reference_problem

#: Trajectories in one unit of work, for chains that need no more than a group.
UNIT_TRAJECTORIES: Final = 128

ENTRY_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class Score(BaseModel):
    """A reward that `producer.score` brought, as `lua/group/score.lua` keeps it."""

    reward: FiniteFloat
    rewards: dict[str, FiniteFloat] = {}


_SCORES: Final = TypeAdapter(dict[str, Score])
_GROUP_FIELDS: Final = (
    *("group_id", "size", "data_source", "opened_ms", "outcome", "epoch", "version"),
    *("members", "scores", "payloads"),
)
_REFERENCES: Final = TypeAdapter(list[Reference])


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """A complete group as it stands in a shard's groups log; members sorted by rollout_index."""

    shard: int
    entry: str
    group_id: str
    size: int
    data_source: str | None
    outcome: str
    opened_ms: int
    epoch: int
    version: int | None
    members: tuple[Reference, ...]
    payloads: tuple[tuple[str, int], ...]  # key and bytes of every member, as the push script saw them
    problem: str | None = None  # why the members could not be read
    malformed: bool = False  # it is no group at all

    @property
    def pointer(self) -> Pointer:
        return Pointer(self.shard, self.entry, self.group_id, len(self.members))

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


class Pointer(NamedTuple):
    """Where a group of a batch stands."""

    shard: int
    entry: str
    group_id: str
    trajectories: int


class Death(NamedTuple):
    """Why a group is left out."""

    reason: str
    detail: str


class BatchRecord(BaseModel):
    """Everything that is decided about a batch, once."""

    model_config = ConfigDict(frozen=True)

    k: int  # trained at version k
    id: str
    epoch: int
    groups: list[Pointer]  # sorted by group_id
    chain: dict[str, Any]  # ChainConfig
    late: list[str] = []  # columns the trainer supplies: the chain is cut before the first step needing one
    tokens_per_micro_batch: int | None = None  # rows above it are not delivered
    kl_coefficient: float | None = None
    running: dict[str, float] | None = None  # moments of all rewards up to and with this batch
    running_before: dict[str, float] | None = None  # those it was named with

    @property
    def knows_before(self) -> bool:
        """Whether it says what `running` was before: an older release's record does not."""
        return self.running is None or "running_before" in self.model_fields_set

    @property
    def trajectories(self) -> int:
        return sum(pointer.trajectories for pointer in self.groups)

    def in_shard(self, shard: int) -> list[Pointer]:
        return [pointer for pointer in self.groups if pointer.shard == shard]


class Unit(BaseModel):
    """A unit of work, an entry of a work stream: compute the chain over `groups`, publish those of `shard`."""

    model_config = ConfigDict(frozen=True)

    batch: str
    k: int
    number: int  # in the batch
    shard: int
    groups: list[Pointer]
    chain: dict[str, Any]
    late: list[str] = []
    kl_coefficient: float | None = None
    running: dict[str, float] | None = None


def work_units(record: BatchRecord, batch_scope: bool) -> list[Unit]:
    """The units of work of a batch, numbered: some groups each, or one per shard over the whole batch."""
    units: list[tuple[int, list[Pointer]]] = []
    for shard in sorted({pointer.shard for pointer in record.groups}):
        if batch_scope:
            units.append((shard, record.groups))
            continue
        part: list[Pointer] = []
        for pointer in record.in_shard(shard):
            if part and sum(p.trajectories for p in part) + pointer.trajectories > UNIT_TRAJECTORIES:
                units.append((shard, part))
                part = []
            part.append(pointer)
        units.append((shard, part))
    return [
        Unit(
            batch=record.id,
            k=record.k,
            number=number,
            shard=shard,
            groups=groups,
            chain=record.chain,
            late=record.late,
            kl_coefficient=record.kl_coefficient,
            running=record.running,
        )
        for number, (shard, groups) in enumerate(units)
    ]


def parse_group(keys: RunKeys, shard: int, entry: bytes, fields: Mapping[bytes, bytes]) -> LoggedGroup:
    """A groups log entry. Rewards that came after the push are filled in; what cannot be read is a `problem`."""
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
            members=(),
            payloads=(),
            problem=first_problem(error),
            malformed=True,
        )


def _parse_group(keys: RunKeys, shard: int, entry: bytes, fields: Mapping[bytes, bytes]) -> LoggedGroup:
    problem = None
    group_id = fields[b"group_id"].decode()
    lines = [line.rpartition(" ") for line in fields[b"payloads"].decode().split("\n")]
    payloads = tuple((key, int(size)) for key, _, size in lines)
    prefix = keys.shard(shard).payload("")
    if not group_id or keys.shard_of(group_id) != shard:
        raise ValueError(f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}")
    if not all(key.startswith(prefix) and 0 < size < 1 << 40 for key, size in payloads):
        raise ValueError("payloads is not a list of payload keys and their bytes")
    members: list[Reference] = []
    try:
        members = _REFERENCES.validate_json(fields[b"members"])
        scores = _SCORES.validate_json(fields[b"scores"])
        if scores:
            members = [_with_score(member, scores.get(str(member.rollout_index))) for member in members]
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
        members=() if problem else tuple(members),
        payloads=payloads,
        problem=problem,
    )


def _with_score(member: Reference, score: Score | None) -> Reference:
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
    """Up to `count` groups of a shard's log behind the entry `after` ('0-0' = from the start)."""
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
    pipe = run.connection.scripts.pipeline(transaction=False)
    for pointer in pointers:
        pipe.xrange(run.keys.shard(pointer.shard).groups, pointer.entry, pointer.entry)
    return [
        parse_group(run.keys, pointer.shard, *found[0]) if found else None
        for pointer, found in zip(pointers, pipe.execute(), strict=True)
    ]


def entry_order(entry: str) -> tuple[int, int]:
    """Stream entry ids in their order."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)


def name(run: Run, record: BatchRecord, cursors: Mapping[int, str], epoch: int) -> bool:
    """Write the record; False when batch k has one already. Raises EpochFencedError.

    epoch: of the caller, above that of a record it writes again for a server that lost it.
    """
    home = run.keys.home
    running = "" if record.running is None else json.dumps(record.running)
    args: list[Any] = [epoch, record.k, record.model_dump_json(), running]
    for shard, entry in cursors.items():
        args += [shard, entry]
    return bool(check_fence(run, run.call("name_batch", [home.void, home.lineage, home.batches], args)))


def read_records(run: Run, leads: bool = False) -> dict[int, BatchRecord]:
    """All recorded batches by k: named and not yet committed to the end.

    A field that is no record is left out, and removed by the rank that leads.
    """
    stored: Any = run.connection.scripts.hgetall(run.keys.home.batches)
    records = {}
    for k, text in sorted(stored.items()):
        try:
            record = _parse_record(run, k, text)
            records[record.k] = record
        except WireError as error:
            if leads:
                reject_item(run, run.keys.home, run.keys.home.batches, k, str(error), text, removal="HDEL")
    return records


def find_record(run: Run, k: int) -> BatchRecord | None:
    """The record of batch k, or None."""
    text: Any = run.connection.scripts.hget(run.keys.home.batches, str(k))
    try:
        return None if text is None else _parse_record(run, str(k).encode(), text)
    except WireError:
        return None


def _parse_record(run: Run, k: bytes, text: bytes) -> BatchRecord:
    try:
        record = BatchRecord.model_validate_json(text)
    except ValidationError as error:
        raise WireError(f"record: {first_problem(error)}") from error
    if str(record.k).encode() != k:
        raise WireError(f"record: is of batch {record.k}")
    for pointer in record.groups:
        if not (0 <= pointer.shard < len(run.keys.salts) and ENTRY_ID.fullmatch(pointer.entry)):
            raise WireError(f"record: group {brief(pointer.group_id)} has no place in the run")
    return record


def apply(run: Run, record: BatchRecord, batch_scope: bool, epoch: int, known: Iterable[BatchRecord]) -> None:
    """Make a named batch known to the shards: counters and work. Repeating it changes nothing.

    known: the batches the caller knows. A shard that has others, which a failover took from it, counts them apart.
    """
    ids = " ".join(each.id for each in known)
    units = work_units(record, batch_scope)
    for shard, keys in enumerate(run.keys.shards):
        mine = record.in_shard(shard)
        if mine:
            work = [unit.model_dump_json() for unit in units if unit.shard == shard]
            names = [keys.void, keys.trainer, keys.applied, keys.ledger, keys.work, keys.groups]
            args = [epoch, record.id, ids, len(mine), *entries_of(mine), *work]
            check_fence(run, run.call("apply_batch", names, args))


def entries_of(pointers: Iterable[Pointer]) -> list[Any]:
    """Entry id and trajectories of each, as the scripts take them."""
    return [part for pointer in pointers for part in (pointer.entry, pointer.trajectories)]


def check_fence(run: Run, reply: int) -> int:
    """A script's reply. Raises EpochFencedError when it says that a newer trainer has taken over."""
    if reply == -1:
        raise EpochFencedError(f"run {run.name}: a newer trainer has taken over, this one must stop")
    return reply
