"""Rank 0 takes a run: it finishes or undoes what an older job, or data loss, left half done.

"Going back in time" in docs/reference/guarantees.md says what a server may have lost, and which process repeats it.
Every step may be repeated: when rank 0 dies or the server restarts in the middle, rank 0 begins again from the first
step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from ..grouping.groups_log import Pointer, find_groups
from ..messages import log_fields
from ..prompts.spec import identity
from ..run import Run, Shard
from .ends import commit, dead_letter_groups, read_exclusions, read_results, results_of
from .leader import Leader, server_text
from .progress import NamedBatch, Progress, weights_version
from .prompts import RunPrompts
from .record import BatchRecord, NamingSettings, apply, name_batch, read_records
from .selection import BATCH_ID
from .session import take

#: Groups counted in one call of `set_trainer.lua`.
TRAINED_SLICE: Final = 256

logger = logging.getLogger(__name__)


def take_over(run: Run, settings: NamingSettings, progress: Progress) -> Leader:
    """Take the run for the job and make it say what the job knows. Fences older jobs; raises EpochFencedError."""
    server_ids = run.server_ids()
    known: Any = run.connection.scripts.hget(run.keys.home.session, "servers")
    # Whether a server is another one than when the run last knew that all living producers had been heard.
    is_replaced = progress.began is not None if known is None else known != server_text(server_ids).encode()
    run_committed, begins_branch = take(run, progress)
    if begins_branch and progress.loaded and progress.version < run_committed:
        logger.warning(
            "run %s has committed version %d, and the checkpoint loaded is of version %d: what batches %d to %d "
            "trained on is deleted and does not come again. Load the newest checkpoint, or give another run=",
            *(run.name, run_committed, progress.version, progress.version, run_committed - 1),
            extra=log_fields("older_checkpoint", run=run.name, role="trainer"),
        )
    recorded = read_records(run, leads=True)
    _restore_statistics(run, progress, recorded)
    _finish_commits(run, progress, recorded, run_committed)
    foreign_records = [
        record for record in recorded.values() if not _is_ours(run, progress, record, begins_branch)
    ]
    undo_batches(run, foreign_records, progress.fence)
    for record in foreign_records:
        del recorded[record.k]
    run.home.call("commit_session", [progress.fence, progress.committed])
    set_back = run.connection.scripts.hget(run.keys.home.session, "set_back")
    progress.is_set_back |= progress.loaded and set_back == b"1"  # else it waits for who loads a checkpoint
    _finish_commits(run, progress, recorded, progress.committed)  # commits that the server lost
    _restore_batches(run, progress, recorded)
    set_trainer(run, settings, progress)
    if begins_branch:
        rounds: set[bytes] = set()
        # Twice: a round of which one shard has a later version goes from all.
        for shard in (*run.shards, *run.shards):
            rounds.update(shard.call("forget_evals", [progress.fence, progress.version, *rounds]))
    # Only now: until a shard has this epoch, an older job may still apply its batches there.
    undo_unknown(run, [batch.record for batch in progress.batches.values()], progress.fence)
    RunPrompts(run).restore(progress)  # whose groups no older job commits any more
    if progress.ends:  # for ranks that have not read it yet
        run.home.call("end_run", [progress.fence, progress.delivered, progress.ends, ""])
    running = progress.running_named
    taken_back = " ".join(progress.taken_back)
    servers = "" if is_replaced else server_text(server_ids)
    run.home.call("settled", [progress.fence, json.dumps(running) if running else "", taken_back, servers])
    progress.begins_branch = False
    return Leader(run, settings, progress, server_ids, is_replaced)


def _restore_statistics(run: Run, progress: Progress, recorded: Mapping[int, BatchRecord]) -> None:
    """Take from the run what the job does not know itself: KL coefficients, moments of the rewards.

    Also what producers were told of weights, unless those are of a version that was taken back.
    """
    stored: Any = run.connection.scripts.hmget(run.keys.home.session, ["kl", "running"])
    kl, running = (None if text is None else json.loads(text) for text in stored)
    if progress.kl is None:
        progress.kl = kl
    if not progress.knows_running:
        following = recorded.get(progress.version)
        progress.running = running if following is None else following.running_before
        progress.knows_running = True
    told: Any = run.connection.scripts.hmget(run.keys.home.trainer, ["weights", "finished"])
    weights, finished = ((text or b"").decode(errors="replace") for text in told)
    if not progress.weights and weights_version(weights) <= progress.version:
        progress.weights = weights
    if finished == "1" and not progress.finished:
        text = "run %s was ended by its trainer: it is open again, and goes on at version %d"
        fields = log_fields("run_reopened", run=run.name, role="trainer")
        logger.warning(text, run.name, progress.version, extra=fields)


def _finish_commits(run: Run, progress: Progress, recorded: dict[int, BatchRecord], below: int) -> None:
    prompts = RunPrompts(run)
    for k in [k for k in sorted(recorded) if k < below]:
        commit(run, recorded.pop(k), progress.fence, ended=prompts.note_ended)


def _is_ours(run: Run, progress: Progress, record: BatchRecord, begins_branch: bool) -> bool:
    """Whether a record of the run is of this job's past, or a batch that it takes over as it is."""
    batch = progress.batches.get(record.k)
    if batch is not None:
        return record.id == batch.record.id
    # A server that has lost this job may have heard of an older one since, or of others that had another checkpoint.
    if record.k < progress.version:
        return all(progress.has_committed(identity(each.group_id)) for each in _living(run, record))
    is_trained = any(pointer.group_id in progress for pointer in record.groups)
    return not is_trained and (begins_branch or record.epoch >= progress.branch)


def _restore_batches(run: Run, progress: Progress, recorded: Mapping[int, BatchRecord]) -> None:
    """Make run and job know the same batches: those of either, except what misses groups and is undone."""
    remembered = {k: b.on_other_servers() for k, b in progress.batches.items() if k >= progress.committed}
    batches = {k: NamedBatch(record) for k, record in recorded.items()} | remembered
    batches = {k: batches[k] for k in sorted(batches)}
    lost, next_k = [], progress.delivered
    for k, batch in list(batches.items()):
        if k < progress.delivered:
            continue
        # There is no batch k without a batch k - 1, and there may be no groups left to name that one again.
        if k > next_k or missing(run, batch.record):
            fields = log_fields("batch_named_again", run=run.name, role="trainer", batch=k)
            logger.warning(
                "batch %d is named again: groups of it are no longer on the server", k, extra=fields
            )
            lost.append(batches.pop(k).record)
        else:
            next_k += 1
    for k, batch in batches.items():
        if k not in recorded:  # the server lost its naming, but another rank may have the batch
            name_batch(run, batch.record, progress.fence)
    progress.taken_back += [record.id for record in lost]  # before anybody can name them again
    undo_batches(run, lost, progress.fence)
    progress.batches = batches
    applied = [applied_ids(run, shard) for shard in run.shards]
    for batch in batches.values():
        if any(batch.record.id not in applied[pointer.shard] for pointer in batch.record.groups):
            apply(run, batch.record, progress.fence)
        if batch.dead:
            dead_letter_groups(run, batch.record, batch.dead, progress.fence)


def missing(run: Run, record: BatchRecord) -> list[Pointer]:
    """Groups of a batch that the server has lost; dead letters are not lost."""
    living = _living(run, record)
    return [pointer for pointer, group in zip(living, find_groups(run, living), strict=True) if group is None]


def _living(run: Run, record: BatchRecord) -> list[Pointer]:
    """Groups of a batch that are not dead letters."""
    dead = read_exclusions(run, record.id, record.groups).dead
    return [pointer for pointer in record.groups if pointer.group_id not in dead]


def set_trainer(run: Run, settings: NamingSettings, progress: Progress) -> None:
    """Write each shard's copy of epoch, version and pacing."""
    trained = [b.record for k, b in progress.batches.items() if progress.committed <= k < progress.version]
    pacing = "" if settings.max_staleness is None else settings.max_staleness
    drop_after = "" if settings.drop_after is None else settings.drop_after
    for shard in run.shards:
        groups = [
            f"{each.entry} {each.group_id}" for record in trained for each in record.in_shard(shard.index)
        ]
        for start in range(0, max(1, len(groups)), TRAINED_SLICE):
            args = [progress.fence, progress.version, pacing, settings.batch_groups, drop_after]
            args += [progress.weights, "1" if progress.finished else ""]
            args += ["1" if start else "0", *groups[start : start + TRAINED_SLICE]]
            shard.call("set_trainer", args)


# Undoing


def undo_from(run: Run, progress: Progress, first: int) -> None:
    """Undo batch `first`, which was named for another chain and is not delivered yet, and all after it.

    Called when the training loop asks for a batch: before that it may load a checkpoint with some of them. The session
    has to begin again then, since its candidates lack their groups.
    """
    undone = [progress.batches[k].record for k in sorted(progress.batches) if k >= first]
    fields = log_fields(
        "batch_named_again", run=run.name, role="trainer", batch=undone[0].k, count=len(undone)
    )
    text = "batches %d to %d are named again: they were named for another chain, and are not delivered yet"
    logger.warning(text, undone[0].k, undone[-1].k, extra=fields)
    undo_batches(run, undone, progress.fence)
    for record in undone:
        del progress.batches[record.k]


def undo_batches(run: Run, records: Iterable[BatchRecord], fence: str) -> None:
    """Undo the naming of batches: what is left of them can be named again.

    The last one goes first, so that the records left at any moment have no gap.
    """
    for record in sorted(records, key=lambda record: -record.k):
        for shard in {pointer.shard for pointer in record.groups}:
            undo_in_shard(run, run.shards[shard], record.id, fence)
        running = json.dumps(record.running_before) if record.running_before else ""
        run.home.call("unname_batch", [fence, record.k, record.id, running])


def undo_unknown(run: Run, records: Collection[BatchRecord], fence: str) -> None:
    """Undo batches that a shard knows and the home shard does not: it lost their naming."""
    ids = {record.id for record in records}
    for shard in run.shards:
        for batch_id in (applied_ids(run, shard) | _owner_ids(run, shard)) - ids:
            undo_in_shard(run, shard, batch_id, fence)


def undo_in_shard(run: Run, shard: Shard, batch_id: str, fence: str) -> None:
    """Undo a batch in one shard: its groups there are candidates again, its results are deleted."""
    outputs, of_results = results_of(shard, batch_id, read_results(run))
    shard.call("unapply_batch", [fence, batch_id, *of_results], unlinked=outputs)


def applied_ids(run: Run, shard: Shard) -> set[str]:
    """Ids of the batches that a shard knows whole."""
    ids: Any = run.connection.scripts.hkeys(shard.keys.applied)
    return {batch_id.decode(errors="replace") for batch_id in ids}


def _owner_ids(run: Run, shard: Shard) -> set[str]:
    """Ids of the batches that own groups of a shard: it may have learned only a part of one."""
    owners: Any = run.connection.scripts.hgetall(shard.keys.owners)
    ids = {owner.decode(errors="replace").partition(" ")[0] for owner in owners.values()}
    return {batch_id for batch_id in ids if BATCH_ID.fullmatch(batch_id)}  # others were never counted
