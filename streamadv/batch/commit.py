"""How a group leaves a batch or the log: committed with the checkpoint, dropped at naming, buried, or named again.

Everything here is idempotent: only the call that deletes a log entry counts its group.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..grouping.groups_log import LoggedGroup, Pointer, find_groups
from ..run import Run
from ..run.malformed import reject
from ..trajectory.reference import Reference
from ..trajectory.schema import Role
from .record import BatchRecord

COMMIT_SLICE: Final = 64  # trajectories deleted in one call


def drop(run: Run, refused: Sequence[tuple[LoggedGroup, str]], epoch: int) -> None:
    """Take groups out of the log under the given reasons. Repeating it changes nothing."""
    for group, reason in refused:
        if reason.startswith("dead:"):
            dead_letter(run, group, reason.removeprefix("dead:"), group.problem or "", "", epoch)
        elif reason == "malformed":
            shard = run.shard(group.shard)
            reject(shard, shard.keys.groups, group.entry, group.problem or "")
    refused = [
        (group, reason)
        for group, reason in refused
        if reason != "malformed" and not reason.startswith("dead:")
    ]
    for shard in run.shards:
        args: list[Any] = [epoch]
        for group, reason in refused:
            if group.shard == shard.index:
                payloads = [f"{key} {size}" for key, size in group.payloads]
                args += [group.entry, reason, len(payloads), *payloads]
        if len(args) > 1:
            shard.call("drop_groups", args)


def dead_letter(run: Run, group: LoggedGroup, reason: str, detail: str, batch_id: str, epoch: int) -> None:
    """Make a dead letter of a group of a batch, or of one in none yet (''). Repeating it changes nothing.

    A shard that does not know the batch does nothing, see "Going back in time" in docs/reliability.md: rank 0 applies
    the batch again and repeats this.
    """
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
    run.shard(group.shard).call("dead_letter_group", args, dead_group=group.group_id)


def leave_out(
    run: Run, pointer: Pointer, rollout_index: int, reason: str, detail: str, batch_id: str, epoch: int
) -> bool:
    """Have commit count a member of a batch's group as dead. Repeating it changes nothing.

    False when the batch, or the group, is not there (any more).
    """
    args = [epoch, pointer.entry, pointer.group_id, rollout_index, batch_id, reason, detail]
    return bool(run.shard(pointer.shard).call("leave_out", args, dead_group=pointer.group_id))


class Exclusions(NamedTuple):
    """What of a batch is not trained on."""

    dead: set[str]  # ids of groups that have become dead letters
    left_out: set[tuple[str, int]]  # (group_id, rollout_index) of members of the others


def read_exclusions(run: Run, record: BatchRecord) -> Exclusions:
    """What has been excluded since the batch was named, as its shards know it."""
    exclusions = Exclusions(set(), set())
    for shard in {pointer.shard for pointer in record.groups}:
        text: Any = run.connection.scripts.hget(run.keys.shard(shard).applied, record.id)
        by_entry = json.loads(text) if text else {}  # 'dead', or the rollout indices left out
        for pointer in record.in_shard(shard):
            excluded = by_entry.get(pointer.entry, ())
            if excluded == "dead":
                exclusions.dead.add(pointer.group_id)
            else:
                exclusions.left_out.update((pointer.group_id, index) for index in excluded)
    return exclusions


def terminal_states(members: Iterable[Reference], tokens_per_micro_batch: int | None) -> Iterator[str]:
    """What commit counts each member as: trained, baseline, or oversize (a row above the token budget)."""
    for member in members:
        if member.role is Role.BASELINE:
            yield "baseline"
        elif tokens_per_micro_batch is not None and max(member.row_lengths) > tokens_per_micro_batch:
            yield "oversize"
        else:
            yield "trained"


class Leaving(NamedTuple):
    """What commit needs of a group: arguments of `commit.lua` behind its entry id, and its payloads' keys."""

    args: list[Any]
    payloads: list[str]


def leaving(group: LoggedGroup, tokens_per_micro_batch: int | None) -> Leaving:
    """How a group's members are counted at commit, and what is deleted."""
    states = Counter(terminal_states(group.members, tokens_per_micro_batch))
    trained = states.pop("trained", 0)
    others = [part for pair in states.items() for part in pair]
    keys = [key for key, _ in group.payloads]
    return Leaving([trained, len(states), *others, group.size_bytes, len(keys)], keys)


def commit(
    run: Run,
    record: BatchRecord,
    epoch: int,
    known: Mapping[Pointer, Leaving] | None = None,
    entries: Sequence[ResultsEntry] | None = None,
) -> None:
    """Count a batch as trained and delete what is stored of it. Repeating it changes nothing.

    known: what need not be read from the log again. entries: `read_results`, if done already.
    The lineage must say already that it is committed (`commit_lineage.lua`).
    """
    entries = read_results(run) if entries is None else entries
    by_shard: dict[int, list[Pointer]] = defaultdict(list)
    for pointer in record.groups:
        by_shard[pointer.shard].append(pointer)
    for shard, pointers in by_shard.items():
        _commit_groups(run, shard, record, pointers, epoch, known or {})
        _close(run, shard, record.id, epoch, entries)
    _forget(run, record, epoch)


def _forget(run: Run, record: BatchRecord, epoch: int) -> None:
    args = [epoch, record.k, record.model_dump_json()]
    run.home.call("forget_batch", args)


def _commit_groups(
    run: Run,
    shard: int,
    record: BatchRecord,
    pointers: Sequence[Pointer],
    epoch: int,
    known: Mapping[Pointer, Leaving],
) -> None:
    payloads: list[str] = []
    args: list[Any] = [epoch, record.id]
    unknown = [pointer for pointer in pointers if pointer not in known]
    found = zip(unknown, find_groups(run, unknown), strict=True)
    budget = record.tokens_per_micro_batch
    groups = {**known, **{pointer: leaving(group, budget) for pointer, group in found if group is not None}}
    for pointer in pointers:
        if (group := groups.get(pointer)) is not None:  # else committed before
            args += [pointer.entry, *group.args]
            payloads += group.payloads
        if len(payloads) >= COMMIT_SLICE:
            run.shard(shard).call("commit", args, payloads=payloads)
            payloads, args = [], [epoch, record.id]
    if payloads:
        run.shard(shard).call("commit", args, payloads=payloads)


class ResultsEntry(NamedTuple):
    """An entry of a shard's results log: of which batch it is, and where its output columns are."""

    shard: int
    batch: str
    entry: bytes
    output: str
    output_bytes: int


def read_results(run: Run) -> list[ResultsEntry]:
    """The results logs of all shards: read once for all the batches that one commit ends."""
    found = []
    for shard, keys in enumerate(run.keys.shards):
        entries: Any = run.connection.scripts.xrange(keys.results)
        for entry, fields in entries:
            batch = fields.get(b"batch", b"").decode(errors="replace")
            output, size = fields.get(b"output", b""), fields.get(b"output_bytes", b"")
            if output.startswith(keys.output("").encode()) and size.isdigit():
                found.append(ResultsEntry(shard, batch, entry, output.decode(errors="replace"), int(size)))
            else:  # none, or it holds no results: the rank that reads it removes it
                found.append(ResultsEntry(shard, batch, entry, keys.void, 0))
    return found


def _close(run: Run, shard: int, batch_id: str, epoch: int, entries: Sequence[ResultsEntry]) -> None:
    outputs: list[str] = []
    args: list[Any] = [epoch, batch_id]
    for each in entries:
        if (each.shard, each.batch) == (shard, batch_id):
            outputs.append(each.output)
            args += [each.entry, each.output_bytes]
    run.shard(shard).call("close_batch", args, outputs=outputs)


def missing(run: Run, record: BatchRecord) -> list[Pointer]:
    """Groups of a batch that the server has lost; dead letters are not."""
    dead = read_exclusions(run, record).dead
    living = [pointer for pointer in record.groups if pointer.group_id not in dead]
    found = find_groups(run, living)
    return [
        pointer
        for pointer, group in zip(living, found, strict=True)
        if group is None or group.group_id != pointer.group_id
    ]


def take_apart(run: Run, record: BatchRecord, epoch: int) -> None:
    """Undo the naming of a batch: what is left of it can be named again. Repeating it changes nothing."""
    for shard in {pointer.shard for pointer in record.groups}:
        undo(run, shard, record.id, epoch)
    running = json.dumps(record.running_before) if record.running_before else ""
    args: list[Any] = [epoch, record.k, record.model_dump_json(), running]
    run.home.call("unname_batch", args)


def undo_unknown(run: Run, records: Iterable[BatchRecord], epoch: int) -> None:
    """Undo batches that a shard knows and the home slot does not: the server lost their naming before it was told."""
    known = {record.id for record in records}
    for shard in range(len(run.keys.salts)):
        for batch_id in applied_ids(run, shard) - known:
            undo(run, shard, batch_id, epoch)


def applied_ids(run: Run, shard: int) -> set[str]:
    """Ids of the batches that a shard knows."""
    ids: Any = run.connection.scripts.hkeys(run.keys.shard(shard).applied)
    return {batch_id.decode(errors="replace") for batch_id in ids}


def undo(run: Run, shard: int, batch_id: str, epoch: int) -> None:
    """Take a batch back in one shard: its groups are waiting again, its results are deleted."""
    run.shard(shard).call("unapply_batch", [epoch, batch_id])
    _close(run, shard, batch_id, epoch, read_results(run))
