"""Batch k: the ordered groups one policy update consumes, recorded once and immutable until commit.

Rank 0 of the trainer queue names a batch by writing its record into the home slot (`choose`, `name`). What
follows from it in the shards (`apply`) is idempotent by the batch's id and repeated until every shard has it;
`commit` likewise: first the run's lineage, then shard by shard, last the record itself.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from .errors import BatchLostError, EpochFencedError
from .run import Run
from .schema import Role, first_problem
from .wire import Reference

#: Trajectories in one unit of work, for chains that need no more than a group.
CHUNK_TRAJECTORIES: Final = 128
COMMIT_SLICE: Final = 64
#: Groups looked at for one batch, as a multiple of batch_groups: bounds what one naming may drop.
SCAN_FACTOR: Final = 8

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
    short: bool = False

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


# Naming


@dataclass(frozen=True, slots=True)
class NamingRules:
    """What decides whether a group goes into a batch."""

    drop_after: int | None  # versions
    needs: frozenset[str] = frozenset()  # columns producers must have pushed
    trained: frozenset[str] = frozenset()  # group ids already in the checkpoint lineage
    rolled_back_above: int | None = None  # version restored by load_state_dict
    epoch: int = 0

    def reason_against(self, group: LoggedGroup, k: int) -> str | None:
        """Why the group is not trained on at version k, or None."""
        if group.group_id in self.trained:
            return "trained"
        if group.problem is not None:
            return "dead:undecodable"
        restored = self.rolled_back_above
        if (
            restored is not None
            and group.epoch < self.epoch
            and group.version is not None
            and group.version > restored
        ):
            return "rolled_back"
        age = group_staleness(group, k)
        if self.drop_after is not None and age is not None and age > self.drop_after:
            return "stale"
        if any(not self.needs <= set(member.columns) for member in group.members):
            return "dead:missing_column"
        return None


def staleness(member: Reference, k: int) -> int | None:
    """k minus the oldest version over trainable tokens; None without a version, 0 when it is above k."""
    return None if member.versions is None else max(0, k - member.versions[0])


def group_staleness(group: LoggedGroup, k: int) -> int | None:
    """The staleness of the stalest member that has a version."""
    values = [value for member in group.members if (value := staleness(member, k)) is not None]
    return max(values, default=None)


def choose(
    candidates: Iterable[LoggedGroup], k: int, batch_groups: int, rules: NamingRules
) -> tuple[list[LoggedGroup], list[tuple[LoggedGroup, str]]]:
    """The first `batch_groups` groups fit for batch k, and those passed over before them with the reason."""
    chosen: list[LoggedGroup] = []
    refused: list[tuple[LoggedGroup, str]] = []
    for group in candidates:
        if len(chosen) == batch_groups:
            break
        reason = rules.reason_against(group, k)
        if reason is None:
            chosen.append(group)
        else:
            refused.append((group, reason))
    return chosen, refused


def make_record(k: int, epoch: int, chosen: Sequence[LoggedGroup], **decided: Any) -> BatchRecord:
    """The record of batch k. Groups are sorted by id, so that nothing depends on the order of arrival."""
    ordered = sorted(chosen, key=lambda group: group.group_id)
    return BatchRecord(
        k=k,
        id=f"{k}-{secrets.token_hex(6)}",
        epoch=epoch,
        groups=[Pointer(g.shard, g.entry, g.group_id, len(g.members)) for g in ordered],
        **decided,
    )


def drop(run: Run, refused: Sequence[tuple[LoggedGroup, str]], epoch: int) -> None:
    """Take groups out of the log under the given reasons. Repeating it changes nothing."""
    for group, reason in refused:
        if reason.startswith("dead:"):
            bury(run, group, reason.removeprefix("dead:"), group.problem or "", "", epoch)
    refused = [(group, reason) for group, reason in refused if not reason.startswith("dead:")]
    for shard, keys in enumerate(run.keys.shards):
        args: list[Any] = [epoch]
        for group, reason in refused:
            if group.shard == shard:
                payloads = [f"{key} {size}" for key, size in group.payloads]
                args += [group.entry, reason, len(payloads), *payloads]
        if len(args) > 1:
            names = [keys.void, keys.trainer, keys.groups, keys.ledger, keys.garbage]
            check_fence(run, run.call("drop_groups", names, args))


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
            args = [epoch, record.id, len(mine), *_entries(mine), *work]
            check_fence(run, run.call("apply_batch", names, args))


def missing(run: Run, record: BatchRecord) -> list[Pointer]:
    """Groups of a batch that the server has lost; dead letters are not."""
    dead = buried(run, record)
    living = [pointer for pointer in record.groups if pointer.group_id not in dead]
    found = find_groups(run, living)
    return [
        pointer
        for pointer, group in zip(living, found, strict=True)
        if group is None or group.group_id != pointer.group_id
    ]


def take_apart(run: Run, record: BatchRecord, cursors: Mapping[int, str], epoch: int) -> dict[int, str]:
    """Undo the naming of a batch that misses groups: what is left of it can be named again.

    Returns the cursors to go on with. Repeating it changes nothing.
    """
    for shard, keys in enumerate(run.keys.shards):
        mine = record.in_shard(shard)
        if mine:
            names = [keys.void, keys.trainer, keys.applied, keys.ledger, keys.groups]
            check_fence(run, run.call("unapply_batch", names, [epoch, record.id, *_entries(mine)]))
            _close(run, shard, record.id, epoch)
    earlier = dict(cursors)
    for pointer in record.groups:
        before = _entry_before(pointer.entry)
        earlier[pointer.shard] = min(earlier[pointer.shard], before, key=entry_order)
    home = run.keys.home
    args: list[Any] = [epoch, *(part for pair in earlier.items() for part in pair)]
    check_fence(run, run.call("rewind", [home.void, home.lineage], args))
    _forget(run, record, epoch)
    return earlier


def _entries(pointers: Iterable[Pointer]) -> list[Any]:
    return [part for pointer in pointers for part in (pointer.entry, pointer.trajectories)]


def _entry_before(entry: str) -> str:
    milliseconds, sequence = entry_order(entry)
    return f"{milliseconds}-{sequence - 1}" if sequence else f"{milliseconds - 1}-{(1 << 64) - 1}"


def bury(run: Run, group: LoggedGroup, reason: str, detail: str, batch_id: str, epoch: int) -> None:
    """Make a dead letter of a group of a batch, or of one in none yet (''). Repeating it changes nothing."""
    keys = run.keys.shard(group.shard)
    names = [keys.void, keys.trainer, keys.groups, keys.ledger, keys.dead, keys.dead_group(group.group_id)]
    args = [
        epoch,
        group.entry,
        group.group_id,
        batch_id,
        reason,
        detail,
        len(group.payloads),
        group.size_bytes,
    ]
    check_fence(run, run.call("bury", [*names, keys.applied], args))


def buried(run: Run, record: BatchRecord) -> set[str]:
    """Ids of the batch's groups that have become dead letters."""
    found: set[str] = set()
    for shard in {pointer.shard for pointer in record.groups}:
        text: Any = run.connection.scripts.hget(run.keys.shard(shard).applied, f"dead:{record.id}")
        found.update(text.decode().split("\n") if text else ())
    return found


# Commit


def terminal_states(members: Iterable[Reference], tokens_per_micro_batch: int | None) -> Iterator[str]:
    """What commit counts each member as: trained, baseline, or oversize (a row above the token budget)."""
    for member in members:
        if member.role is Role.BASELINE:
            yield "baseline"
        elif tokens_per_micro_batch is not None and max(member.row_lengths) > tokens_per_micro_batch:
            yield "oversize"
        else:
            yield "trained"


def commit(run: Run, record: BatchRecord, epoch: int) -> None:
    """Count a batch as trained and delete what is stored of it. Repeating it changes nothing.

    The lineage must say already that it is committed (`commit_lineage.lua`).
    """
    by_shard: dict[int, list[Pointer]] = defaultdict(list)
    for pointer in record.groups:
        by_shard[pointer.shard].append(pointer)
    for shard, pointers in by_shard.items():
        _commit_groups(run, shard, record, pointers, epoch)
        _close(run, shard, record.id, epoch)
    _forget(run, record, epoch)


def _forget(run: Run, record: BatchRecord, epoch: int) -> None:
    home = run.keys.home
    args = [epoch, record.k, record.model_dump_json()]
    check_fence(run, run.call("forget_batch", [home.void, home.lineage, home.batches], args))


def _commit_groups(
    run: Run, shard: int, record: BatchRecord, pointers: Sequence[Pointer], epoch: int
) -> None:
    keys = run.keys.shard(shard)
    fixed = [keys.void, keys.trainer, keys.groups, keys.ledger, keys.applied]
    payloads: list[str] = []
    args: list[Any] = [epoch, record.id]
    for pointer, group in zip(pointers, find_groups(run, pointers), strict=True):
        if group is not None:  # else committed before
            states = Counter(terminal_states(group.members, record.tokens_per_micro_batch))
            trained = states.pop("trained", 0)
            args += [pointer.entry, trained, len(states)]
            args += [part for pair in states.items() for part in pair]
            args += [group.size_bytes, len(group.payloads)]
            payloads += [key for key, _ in group.payloads]
        if len(payloads) >= COMMIT_SLICE:
            check_fence(run, run.call("commit", [*fixed, *payloads], args))
            payloads, args = [], [epoch, record.id]
    if payloads:
        check_fence(run, run.call("commit", [*fixed, *payloads], args))


def _close(run: Run, shard: int, batch_id: str, epoch: int) -> None:
    keys = run.keys.shard(shard)
    outputs: list[str] = []
    args: list[Any] = [epoch, batch_id]
    entries: Any = run.connection.scripts.xrange(keys.ready)
    for entry, fields in entries:
        if fields[b"batch"].decode() == batch_id:
            outputs.append(fields[b"output"].decode() or keys.void)
            args += [entry, int(fields[b"output_bytes"])]
    names = [keys.void, keys.trainer, keys.ready, keys.applied, keys.ledger, *outputs]
    check_fence(run, run.call("close_batch", names, args))


def check_fence(run: Run, reply: int) -> int:
    """A script's reply. Raises EpochFencedError when it says that a newer trainer has taken over."""
    if reply == -1:
        raise EpochFencedError(f"run {run.name}: a newer trainer has taken over, this one must stop")
    return reply
