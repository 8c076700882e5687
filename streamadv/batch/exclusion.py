"""Keeps a group out of training: drops it when a batch is named, or excludes it from a named batch.

A group excluded from a named batch becomes a dead letter; a single trajectory is left out. Repeating any of this
changes nothing: only the call that deletes the entry of the groups log counts its group. `DroppedGroups` has figures
for the trainer, and lines of the log, about what rank 0 dropped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..grouping.groups_log import LoggedGroup, Pointer, find_groups
from ..messages import SummedUp, log_fields, summed_up
from ..prompts.spec import identity
from ..run import Run
from ..run.dead_letters import reject
from .commit import is_oversize, of_prompt
from .record import BatchRecord, Death

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

logger = logging.getLogger(__name__)


class DroppedGroups:
    """Dropped groups: by reason and source since the last delivered batch, by reason since the last lines of the log.

    Of the groups themselves nothing is kept: a trainer may wait long while everything is dropped.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._sums: dict[str, tuple[int, int, int]] = {}  # groups, trajectories, trainable tokens
        self.lines = SummedUp(logger, "groups_dropped", LOG_INTERVAL_S)

    def add(self, k: int, group: LoggedGroup, reason: str) -> None:
        """The group was dropped while batch k was named."""
        name = f"dropped/{reason}/{group.data_source or 'unknown'}"  # what its figures begin with
        if name not in self._sums and len(self._sums) >= MAX_NAMES:
            name = f"dropped/{reason}/other"
        groups, trajectories, tokens = self._sums.get(name, (0, 0, 0))
        tokens += int(group.members.table["trainable"].sum())
        self._sums[name] = groups + 1, trajectories + len(group.members), tokens
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
        return sum(groups for groups, _, _ in self._sums.values())

    def clear(self) -> None:
        """Begin anew, after the figures were reported."""
        self._sums.clear()

    def figures(self) -> dict[str, float]:
        """Groups, and mean length of their trajectories in trainable tokens, by reason and source."""
        figures: dict[str, float] = {}
        for name, (groups, trajectories, tokens) in self._sums.items():
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
