"""Batch k: the ordered groups one policy update consumes, recorded once and immutable until commit.

Rank 0 of the trainer queue names a batch by writing its record into the home slot (`name`). What
follows from it in the shards (`apply`) is idempotent by the batch's id and repeated until every shard has it.
Which groups go in is decided in `naming.py`, how they leave again in `commits.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from .errors import BatchLostError, EpochFencedError
from .run import Run
from .schema import first_problem
from .wire import Reference

#: Trajectories in one unit of work, for chains that need no more than a group.
CHUNK_TRAJECTORIES: Final = 128

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

    @property
    def trajectories(self) -> int:
        return sum(pointer.trajectories for pointer in self.groups)

    def in_shard(self, shard: int) -> list[Pointer]:
        return [pointer for pointer in self.groups if pointer.shard == shard]


class Work(BaseModel):
    """One entry of a work stream: compute the chain over `groups`, publish those of `shard`."""

    model_config = ConfigDict(frozen=True)

    batch: str
    k: int
    chunk: int
    shard: int
    groups: list[Pointer]
    chain: dict[str, Any]
    late: list[str] = []
    kl_coefficient: float | None = None
    running: dict[str, float] | None = None


def work_units(record: BatchRecord, batch_scope: bool) -> list[Work]:
    """The units of work of a batch, numbered: chunks of groups, or one per shard over the whole batch."""
    units: list[tuple[int, list[Pointer]]] = []
    for shard in sorted({pointer.shard for pointer in record.groups}):
        if batch_scope:
            units.append((shard, record.groups))
            continue
        chunk: list[Pointer] = []
        for pointer in record.in_shard(shard):
            if chunk and sum(p.trajectories for p in chunk) + pointer.trajectories > CHUNK_TRAJECTORIES:
                units.append((shard, chunk))
                chunk = []
            chunk.append(pointer)
        units.append((shard, chunk))
    return [
        Work(
            batch=record.id,
            k=record.k,
            chunk=number,
            shard=shard,
            groups=groups,
            chain=record.chain,
            late=record.late,
            kl_coefficient=record.kl_coefficient,
            running=record.running,
        )
        for number, (shard, groups) in enumerate(units)
    ]


def parse_group(shard: int, entry: bytes, fields: Mapping[bytes, bytes]) -> LoggedGroup:
    """A groups log entry. Rewards that came after the push are filled in; what cannot be read is a `problem`."""
    problem = None
    members: list[Reference] = []
    try:
        members = _REFERENCES.validate_json(fields[b"members"])
        scores = json.loads(fields[b"scores"])
        if scores:
            members = [
                member.model_copy(update=scores.get(str(member.rollout_index), {})) for member in members
            ]
    except ValueError as error:
        problem = first_problem(error)
    lines = fields[b"payloads"].decode().split("\n")
    return LoggedGroup(
        shard=shard,
        entry=entry.decode(),
        group_id=fields[b"group_id"].decode(),
        size=int(fields[b"size"]),
        data_source=fields[b"data_source"].decode() or None,
        outcome=fields[b"outcome"].decode(),
        opened_ms=int(fields[b"opened_ms"]),
        epoch=int(fields[b"epoch"]),
        version=int(fields[b"version"]) if fields[b"version"] else None,
        members=tuple(members),
        payloads=tuple((key, int(size)) for key, _, size in (line.rpartition(" ") for line in lines)),
        problem=problem,
    )


def read_log(run: Run, shard: int, after: str, count: int) -> list[LoggedGroup]:
    """Up to `count` groups of a shard's log behind the entry `after` ('0-0' = from the start)."""
    key = run.keys.shard(shard).groups
    entries: Any = run.connection.scripts.xrange(key, f"({after}", "+", count)
    return [parse_group(shard, entry, fields) for entry, fields in entries]


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
        parse_group(pointer.shard, *found[0]) if found else None
        for pointer, found in zip(pointers, pipe.execute(), strict=True)
    ]


def entry_order(entry: str) -> tuple[int, int]:
    """Stream entry ids in their order."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)


def name(run: Run, record: BatchRecord, cursors: Mapping[int, str]) -> bool:
    """Write the record; False when batch k has one already. Raises EpochFencedError."""
    home = run.keys.home
    running = "" if record.running is None else json.dumps(record.running)
    args: list[Any] = [record.epoch, record.k, record.model_dump_json(), running]
    for shard, entry in cursors.items():
        args += [shard, entry]
    return bool(check_fence(run, run.call("name_batch", [home.void, home.lineage, home.batches], args)))


def read_records(run: Run) -> dict[int, BatchRecord]:
    """All recorded batches by k: named and not yet committed to the end."""
    stored: Any = run.connection.scripts.hgetall(run.keys.home.batches)
    return {int(k): BatchRecord.model_validate_json(text) for k, text in sorted(stored.items())}


def apply(run: Run, record: BatchRecord, batch_scope: bool, epoch: int) -> None:
    """Make a named batch known to the shards: counters and work. Repeating it changes nothing."""
    units = work_units(record, batch_scope)
    for shard, keys in enumerate(run.keys.shards):
        mine = record.in_shard(shard)
        if mine:
            work = [unit.model_dump_json() for unit in units if unit.shard == shard]
            names = [keys.void, keys.trainer, keys.applied, keys.ledger, keys.work, keys.groups]
            args = [epoch, record.id, len(mine), *entries_of(mine), *work]
            check_fence(run, run.call("apply_batch", names, args))


def entries_of(pointers: Iterable[Pointer]) -> list[Any]:
    """Entry id and trajectories of each, as the scripts take them."""
    return [part for pointer in pointers for part in (pointer.entry, pointer.trajectories)]


def check_fence(run: Run, reply: int) -> int:
    """A script's reply. Raises EpochFencedError when it says that a newer trainer has taken over."""
    if reply == -1:
        raise EpochFencedError(f"run {run.name}: a newer trainer has taken over, this one must stop")
    return reply
