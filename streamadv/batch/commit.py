"""A batch is committed: its groups count as trained, and what is stored of them is deleted.

Repeating it changes nothing: only the call that deletes the entry of the groups log counts its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..grouping.groups_log import LoggedGroup, Pointer, find_groups
from ..run import Run
from ..run.run import Shard
from ..trajectory.members import Members
from .record import BatchRecord
from .sums import GroupSums

COMMIT_SLICE: Final = 64  # packets deleted in one call


def is_oversize(members: Members, tokens_per_micro_batch: int | None) -> NDArray[np.bool_]:
    """[M]: not a baseline, and with a row above the token budget: neither is trained on."""
    if tokens_per_micro_batch is None:
        return np.zeros(len(members), np.bool_)
    mask: NDArray[np.bool_] = ~members.is_baseline & (members.longest_row > tokens_per_micro_batch)
    return mask


class CommitArguments(NamedTuple):
    """What commit needs of a group: its argument of `commit.lua`, and its payloads' keys."""

    group: str
    payloads: tuple[str, ...]


def commit_arguments(
    groups: Sequence[LoggedGroup], tokens_per_micro_batch: int | None
) -> dict[str, CommitArguments]:
    """How the members of each group, by id, are counted at commit, and what is deleted."""
    if not groups:
        return {}
    sums = GroupSums(groups)
    baselines, large = sums.members.is_baseline, is_oversize(sums.members, tokens_per_micro_batch)
    counts = zip(*map(sums.count, (~baselines & ~large, baselines, large)), strict=True)
    return {
        group.group_id: CommitArguments(
            f"{group.entry} {trained} {baseline} {oversize} {group.size_bytes} {len(group.payloads)}",
            tuple(key for key, _ in group.payloads),
        )
        for group, (trained, baseline, oversize) in zip(groups, counts, strict=True)
    }


def commit(
    run: Run,
    record: BatchRecord,
    epoch: int,
    arguments: Mapping[str, CommitArguments] | None = None,
    results: Sequence[StoredResult] | None = None,
) -> None:
    """Count a batch as trained and delete what is stored of it.

    arguments: by id, of groups that need not be read from the log again. results: `read_results`, if done already.
    The session hash must say already that the batch is committed (`commit_session.lua`).
    """
    results = read_results(run) if results is None else results
    for shard in run.shards:
        pointers = record.in_shard(shard.index)
        if pointers:
            commit_groups(run, shard, record, pointers, epoch, arguments or {})
            close(shard, record.id, epoch, results)
    run.home.call("forget_batch", [epoch, record.k, record.id])


def commit_groups(
    run: Run,
    shard: Shard,
    record: BatchRecord,
    pointers: Sequence[Pointer],
    epoch: int,
    arguments: Mapping[str, CommitArguments],
) -> None:
    """Commit groups of one shard, in slices. Groups that the log no longer has were committed before."""
    unread = [pointer for pointer in pointers if pointer.group_id not in arguments]
    from_log = [group for group in find_groups(run, unread) if group is not None]
    known = {**arguments, **commit_arguments(from_log, record.tokens_per_micro_batch)}
    args: list[str] = []
    payloads: list[str] = []
    for pointer in pointers:
        if pointer.group_id in known:
            group = known[pointer.group_id]
            args.append(group.group)
            payloads += group.payloads
        if len(payloads) >= COMMIT_SLICE:
            shard.call("commit", [epoch, record.id, *args], payloads=payloads)
            args, payloads = [], []
    if args:
        shard.call("commit", [epoch, record.id, *args], payloads=payloads)


class StoredResult(NamedTuple):
    """An entry of a shard's results log: the batch it is of, and where its output columns are."""

    shard: int
    batch: str
    entry: bytes
    output: str
    output_bytes: int


def read_results(run: Run) -> list[StoredResult]:
    """The results logs of all shards: read once for all the batches that one commit ends."""
    results = []
    for shard, keys in enumerate(run.keys.shards):
        entries: Any = run.connection.scripts.xrange(keys.results)
        for entry, fields in entries:
            batch = fields.get(b"batch", b"").decode(errors="replace")
            output, size = fields.get(b"output", b""), fields.get(b"output_bytes", b"")
            if output.startswith(keys.output("").encode()) and size.isdigit():
                results.append(StoredResult(shard, batch, entry, output.decode(errors="replace"), int(size)))
            else:  # none, or it holds no results: the rank that reads it removes it
                results.append(StoredResult(shard, batch, entry, keys.void, 0))
    return results


def close(shard: Shard, batch_id: str, epoch: int, results: Sequence[StoredResult]) -> None:
    """Delete the results of a batch in a shard, and the shard's knowledge of the batch."""
    of_batch = [result for result in results if (result.shard, result.batch) == (shard.index, batch_id)]
    args = [epoch, batch_id, *(part for result in of_batch for part in (result.entry, result.output_bytes))]
    shard.call("close_batch", args, outputs=[result.output for result in of_batch])
