"""Commits a batch: counts its groups as trained and deletes what is stored of them, or keeps it to be looked at.

Repeating a commit changes nothing: only the call that deletes the entry of the groups log counts its group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..grouping.groups_log import LoggedGroup, find_groups
from ..prompts.figures import figures_of
from ..prompts.spec import PREFIX
from ..run import Run
from ..run.kept import is_kept, share_kept
from ..run.run import Shard
from ..trajectory.members import Members
from .record import BatchRecord

COMMIT_SLICE: Final = 64  # packets deleted in one call
SIZE_DIGITS: Final = 15  # of a size in bytes: scripts count exactly up to 2^53


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
    prompt: str
    """See `of_prompt`."""


def commit_arguments(group: LoggedGroup, tokens_per_micro_batch: int | None) -> CommitArguments:
    """How the members of a group are counted at commit, and what is deleted."""
    baseline, oversize = group.sums.baselines, 0
    if tokens_per_micro_batch is not None and group.sums.longest_row > tokens_per_micro_batch:
        oversize = int(is_oversize(group.members, tokens_per_micro_batch).sum())
    trained = len(group.members) - baseline - oversize
    return CommitArguments(
        f"{group.entry} {trained} {baseline} {oversize} {group.size_bytes} {len(group.payloads)}",
        tuple([key for key, _ in group.payloads]),
        of_prompt(group),
    )


def of_prompt(group: LoggedGroup) -> str:
    """For scripts that end groups: ' <group id> <figures>' of a prompt's group, else nothing."""
    if not group.group_id.startswith(PREFIX):
        return ""
    members = group.members
    rewards: list[float] = members.table["reward"].tolist()
    if group.sums.baselines:
        rewards = members.table["reward"][~members.is_baseline].tolist()
    return f" {group.group_id} {figures_of(rewards, group.sums.tokens)}"


def commit(
    run: Run,
    record: BatchRecord,
    fence: str,
    arguments: Mapping[str, CommitArguments] | None = None,
    results: Sequence[StoredResult] = (),
    figures: Mapping[str, float] = MappingProxyType({}),
    ended: Callable[[int], object] = bool,
) -> None:
    """Count a batch as trained and delete what is stored of it.

    arguments: by id, of groups that need not be read from the log again. results: the batch's, likewise. figures: that
    are kept with its groups. ended: called with the number of groups after each part of them.
    The session hash must say already that the batch is committed (`commit_session.lua`).
    """
    results, known = results or read_results(run), dict(arguments or {})
    # Groups that the log no longer has were committed before, or are lost.
    for group in find_groups(run, [pointer for pointer in record.groups if pointer.group_id not in known]):
        if group is not None:
            known[group.group_id] = commit_arguments(group, record.tokens_per_micro_batch)
    kept_record, share = record.for_kept(figures), share_kept(run.manifest, "trained")
    computed = {group_id: result.output for result in results for group_id in result.kept}
    for shard in reversed(run.shards):  # the record goes last, from the home shard
        is_home, pointers = shard.index == run.home.index, record.in_shard(shard.index)
        if not (pointers or is_home):
            continue
        groups: list[str] = []
        payloads: list[str] = []
        for pointer in pointers:
            if len(payloads) >= COMMIT_SLICE:
                shard.call("commit", [fence, record.id, "", "", kept_record, *groups], unlinked=payloads)
                ended(len(groups))
                groups, payloads = [], []
            if pointer.group_id in known:
                kept, output = "-", computed.get(pointer.group_id)
                if is_kept(pointer.group_id, share):
                    kept = "0" if output is None else "2" if record.late else "1"
                groups.append(f"{known[pointer.group_id].group} {kept}{known[pointer.group_id].prompt}")
                payloads += known[pointer.group_id].payloads
                payloads += [output] if output is not None and kept in "12" else []
            elif pointer.group_id.startswith(PREFIX):  # the run may not know yet that it is trained on
                groups.append(f"{pointer.entry} 0 0 0 0 0 ? {pointer.group_id} -")
        outputs, of_results = results_of(shard, record.id, results)
        k = record.k if is_home else ""
        args = [fence, record.id, k, len(outputs), kept_record, *of_results, *groups]
        shard.call("commit", args, unlinked=[*outputs, *payloads])
        ended(len(groups))


class StoredResult(NamedTuple):
    """An entry of a shard's results log: the batch it is of, and where its output columns are."""

    shard: int
    batch: str
    entry: bytes
    output: str
    output_bytes: int
    kept: Sequence[str] = ()  # groups whose results stand there in a field of their own


def read_results(run: Run) -> list[StoredResult]:
    """The results logs of all shards."""
    results = []
    for shard in run.shards:
        entries: Any = run.connection.scripts.xrange(shard.keys.results)
        results += [stored_result(shard, *entry) for entry in entries]
    return results


def stored_result(shard: Shard, entry: bytes, fields: Mapping[bytes, bytes]) -> StoredResult:
    """An entry of a shard's results log, whatever it holds."""
    keys, batch = shard.keys, fields.get(b"batch", b"").decode(errors="replace")
    output, size = fields.get(b"output", b""), fields.get(b"output_bytes", b"")
    if output.startswith(keys.output("").encode()) and is_size(size):
        header, kept = fields.get(b"header", b""), list[str]()
        if b'"kept"' in header:
            with suppress(ValueError, AttributeError):
                kept = [str(group_id) for group_id in json.loads(header).get("kept", ())]
        return StoredResult(shard.index, batch, entry, output.decode(errors="replace"), int(size), kept)
    # No output, or no results: the rank that reads it removes it.
    return StoredResult(shard.index, batch, entry, keys.void, 0)


def is_size(text: bytes) -> bool:
    """Whether this is a number of bytes that scripts can count."""
    return text.isdigit() and len(text) <= SIZE_DIGITS


def results_of(
    shard: Shard, batch_id: str, results: Sequence[StoredResult]
) -> tuple[list[str], list[bytes | int]]:
    """Results of a batch in a shard, for the scripts that remove them: keys of their outputs, and arguments."""
    own = [result for result in results if (result.shard, result.batch) == (shard.index, batch_id)]
    return [result.output for result in own], [
        part for result in own for part in (result.entry, result.output_bytes)
    ]
