"""How groups end: a batch is committed, and what is not trained on is dropped, or excluded from its batch.

Commit counts a batch's groups as trained and deletes what is stored of them, or keeps it to be looked at. A group is
dropped when a batch is named; one excluded from a named batch becomes a dead letter, a single trajectory is left out.
Repeating any of this changes nothing: only the call that deletes the entry of the groups log counts its group.
`DroppedGroups` has figures for the trainer, and lines of the log, about what rank 0 dropped. `StoredResult` is an entry
of the results logs, for those that remove it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..grouping.groups_log import LoggedGroup, Pointer, find_groups
from ..messages import SummedUp, log_fields, summed_up
from ..prompts.figures import figures_of
from ..prompts.spec import PREFIX, identity
from ..run import Run, Shard
from ..run.dead_letters import reject
from ..run.kept import is_kept, share_kept
from ..trajectory.members import Members
from .record import BatchRecord, Death

logger = logging.getLogger(__name__)

COMMIT_SLICE: Final = 64  # packets deleted in one call
SIZE: Final = re.compile(rb"[0-9]{1,15}")  # in bytes: scripts count exactly up to 2^53


# Results of batches


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
    if output.startswith(keys.output("").encode()) and SIZE.fullmatch(size):
        header, kept = fields.get(b"header", b""), list[str]()
        if b'"kept"' in header:
            with suppress(ValueError, AttributeError):
                kept = [str(group_id) for group_id in json.loads(header).get("kept", ())]
        return StoredResult(shard.index, batch, entry, output.decode(errors="replace"), int(size), kept)
    # No output, or no results: the rank that reads it removes it.
    return StoredResult(shard.index, batch, entry, keys.void, 0)


def results_of(
    shard: Shard, batch_id: str, results: Sequence[StoredResult]
) -> tuple[list[str], list[bytes | int]]:
    """Results of a batch in a shard, for the scripts that remove them: keys of their outputs, and arguments."""
    own = [result for result in results if (result.shard, result.batch) == (shard.index, batch_id)]
    return [result.output for result in own], [
        part for result in own for part in (result.entry, result.output_bytes)
    ]


# A batch is committed


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
                    kept = "2" if record.late else "1"  # as `commit.lua` takes it
                    if output is None:
                        kept = "0"
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


# What is not trained on

#: Groups dropped in one call.
DROP_SLICE: Final = 64

_DEAD = "dead:"  # of reasons that make dead letters


def drop(
    run: Run,
    unfit: Sequence[tuple[LoggedGroup, str]],
    fence: str,
    k: int,
    drop_after: int | None,
    uncommitted: Container[str],
) -> None:
    """Take groups in no batch out of the log, each under its reason, while batch k is named.

    uncommitted: by `spec.identity`, what is in the weights and ends with its commit.
    """
    dropped = []
    for group, reason in unfit:
        if reason.startswith(_DEAD):
            dead_letter(run, group, Death(reason.removeprefix(_DEAD), group.problem or ""), "", fence)
        elif reason == "malformed":
            log = run.shards[group.shard]
            reject(log, log.keys.groups, group.entry, group.problem or "")
        else:
            dropped.append((group, reason))
    for shard in run.shards:
        own = [(group, reason) for group, reason in dropped if group.shard == shard.index]
        for start in range(0, len(own), DROP_SLICE):
            args: list[Any] = [fence, f"{k} {'' if drop_after is None else drop_after}"]
            for group, reason in own[start : start + DROP_SLICE]:
                payloads = [f"{key} {size}" for key, size in group.payloads]
                prompt = "" if identity(group.group_id) in uncommitted else of_prompt(group)
                args += [group.entry + prompt, reason, group.count, len(payloads), *payloads]
            shard.call("drop_groups", args)


def dead_letter(run: Run, group: LoggedGroup, death: Death, batch_id: str, fence: str) -> None:
    """Make a dead letter of a group in a batch, or in none yet ('').

    A shard that does not know the batch does nothing, see "Going back in time" in docs/reference/guarantees.md: rank 0
    applies the batch again and repeats this.
    """
    args = [fence, group.entry, group.group_id, batch_id, *death, group.count, group.size_bytes]
    run.shards[group.shard].call("dead_letter_group", args, dead_group=group.group_id)


def dead_letter_groups(run: Run, record: BatchRecord, deaths: Mapping[str, Death], fence: str) -> None:
    """Make dead letters of groups of a batch, by id, where they are still in the log."""
    pointers = [pointer for pointer in record.groups if pointer.group_id in deaths]
    for group in find_groups(run, pointers):
        if group is not None:
            dead_letter(run, group, deaths[group.group_id], record.id, fence)


def leave_out(run: Run, record: BatchRecord, problems: Mapping[tuple[str, int], str], fence: str) -> bool:
    """Have commit count members of a batch as dead, by (group_id, rollout_index) and with what is wrong.

    False when the batch, or a group, is not there (any more).
    """
    pointers = {pointer.group_id: pointer for pointer in record.groups}
    for (group_id, index), text in problems.items():
        shard = run.shards[pointers[group_id].shard]
        args = [fence, pointers[group_id].entry, group_id, index, record.id, "undecodable", text]
        if not shard.call("leave_out", args, dead_group=group_id):
            return False
    return True


class Exclusions(NamedTuple):
    """What of a batch is not trained on."""

    dead: set[str]  # ids of groups that became dead letters
    left_out: set[tuple[str, int]]  # (group_id, rollout_index) of members of the others


def read_exclusions(run: Run, batch_id: str, groups: Sequence[Pointer]) -> Exclusions:
    """What of these groups of a batch has been excluded since it was named, as its shards know it."""
    exclusions = Exclusions(set(), set())
    by_entry: dict[int, Any] = {}  # of each shard: entry -> 'dead', or the rollout indices left out
    for shard in {pointer.shard for pointer in groups}:
        text: Any = run.connection.scripts.hget(run.keys.shards[shard].applied, batch_id)
        by_entry[shard] = json.loads(text) if text else {}
    for pointer in groups:
        excluded = by_entry[pointer.shard].get(pointer.entry, ())
        if excluded == "dead":
            exclusions.dead.add(pointer.group_id)
        else:
            exclusions.left_out.update((pointer.group_id, index) for index in excluded)
    return exclusions


# What the trainer says of them

#: Reasons and sources told apart; further sources are "other".
MAX_NAMES: Final = 256
#: Seconds between two lines of the log while no batch can be named.
LOG_INTERVAL_S: Final = 10.0
#: Texts of the reasons, for the log.
MEANING: Final = {
    "repeated": ", another try of their prompts is in the weights",
    "rolled_back": ", played with versions that the loaded checkpoint has taken back",
    "stale": ", older than drop_after allows",
    "trained": ", the loaded checkpoint contains them",
}


class DroppedGroups:
    """Dropped groups: by reason and source since the last delivered batch, by reason since the last lines of the log.

    Of the groups themselves nothing is kept: a trainer may wait long while everything is dropped.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        #: Groups, trajectories, trainable tokens; cleared once they were reported.
        self.sums: dict[str, tuple[int, int, int]] = {}
        self.lines = SummedUp(logger, "groups_dropped", LOG_INTERVAL_S)

    def add(self, k: int, group: LoggedGroup, reason: str) -> None:
        """The group was dropped while batch k was named."""
        name = f"dropped/{reason}/{group.data_source or 'unknown'}"  # what its figures begin with
        if name not in self.sums and len(self.sums) >= MAX_NAMES:
            name = f"dropped/{reason}/other"
        groups, trajectories, tokens = self.sums.get(name, (0, 0, 0))
        tokens += int(group.members.table["trainable"].sum())
        self.sums[name] = groups + 1, trajectories + len(group.members), tokens
        group_id, problem = group.group_id, group.problem
        why = f"{reason} ({problem})" if problem else reason + MEANING.get(reason, "")
        fields: dict[str, Any] = {"run": self._run, "role": "trainer", "batch": k, "group": group_id}
        extra = log_fields("group_dropped", reason=reason, **fields)
        logger.debug("group %s is not trained on: %s", group_id, reason, extra=extra)

        def text(count: int) -> str:
            return f"batch {k}: {summed_up(group_id, count)} not trained on: {why}"

        self.lines.note(reason, text, **fields)

    def __len__(self) -> int:
        """Groups."""
        return sum(groups for groups, _, _ in self.sums.values())

    def figures(self) -> dict[str, float]:
        """Groups, and mean length of their trajectories in trainable tokens, by reason and source."""
        figures: dict[str, float] = {}
        for name, (groups, trajectories, tokens) in self.sums.items():
            figures[f"{name}/groups"] = float(groups)
            if trajectories:
                figures[f"{name}/response_length/mean"] = tokens / trajectories
        return figures


def warn_of_oversize(run: str, k: int, groups: Sequence[LoggedGroup], budget: int) -> None:
    """One line for the trajectories of batch k that have a row above the token budget of a micro-batch."""
    long = [group.members for group in groups if group.sums.longest_row > budget]
    lengths = [length for members in long for length in members.longest_row[is_oversize(members, budget)]]
    if not lengths:  # of baselines only
        return
    count = len(lengths)
    fields = log_fields(
        "trajectories_oversize", run=run, role="trainer", batch=k, reason="oversize", count=count
    )
    logger.warning(
        "batch %d: trajectories not trained on: %d of %d, oversize: they have rows of up to %d tokens, "
        "tokens_per_micro_batch is %d: raise it, or play shorter rollouts",
        *(k, count, sum(len(group.members) for group in groups), max(lengths), budget),
        extra=fields,
    )
