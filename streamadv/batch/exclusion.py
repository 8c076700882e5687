"""Keeps a group out of training: drops it when a batch is named, or excludes it from a named batch.

A group excluded from a named batch becomes a dead letter; a single trajectory is left out. Repeating any of this
changes nothing: only the call that deletes the entry of the groups log counts its group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..grouping.groups_log import LoggedGroup, Pointer, find_groups
from ..run import Run
from ..run.malformed import reject
from .commit import of_prompt
from .record import BatchRecord, Death

#: Groups dropped in one call.
DROP_SLICE: Final = 64

_DEAD = "dead:"  # of reasons that make dead letters


def drop(
    run: Run, unfit: Sequence[tuple[LoggedGroup, str]], epoch: int, k: int, drop_after: int | None
) -> None:
    """Take groups in no batch out of the log, each under its reason, while batch k is named."""
    dropped = []
    for group, reason in unfit:
        if reason.startswith(_DEAD):
            dead_letter(run, group, Death(reason.removeprefix(_DEAD), group.problem or ""), "", epoch)
        elif reason == "malformed":
            log = run.shard(group.shard)
            reject(log, log.keys.groups, group.entry, group.problem or "")
        else:
            dropped.append((group, reason))
    for shard in run.shards:
        own = [(group, reason) for group, reason in dropped if group.shard == shard.index]
        for start in range(0, len(own), DROP_SLICE):
            args: list[Any] = [epoch, f"{k} {'' if drop_after is None else drop_after}"]
            for group, reason in own[start : start + DROP_SLICE]:
                payloads = [f"{key} {size}" for key, size in group.payloads]
                args += [
                    group.entry + of_prompt(group),
                    reason,
                    group.count,
                    len(payloads),
                    *payloads,
                ]
            shard.call("drop_groups", args)


def dead_letter(run: Run, group: LoggedGroup, death: Death, batch_id: str, epoch: int) -> None:
    """Make a dead letter of a group in a batch, or in none yet ('').

    A shard that does not know the batch does nothing, see "Going back in time" in docs/reference/guarantees.md: rank 0
    applies the batch again and repeats this.
    """
    args = [epoch, group.entry, group.group_id, batch_id, *death, group.count, group.size_bytes]
    run.shard(group.shard).call("dead_letter_group", args, dead_group=group.group_id)


def dead_letter_groups(run: Run, record: BatchRecord, deaths: Mapping[str, Death], epoch: int) -> None:
    """Make dead letters of groups of a batch, by id, where they are still in the log."""
    pointers = [pointer for pointer in record.groups if pointer.group_id in deaths]
    for group in find_groups(run, pointers):
        if group is not None:
            dead_letter(run, group, deaths[group.group_id], record.id, epoch)


def leave_out(run: Run, record: BatchRecord, problems: Mapping[tuple[str, int], str], epoch: int) -> bool:
    """Have commit count members of a batch as dead, by (group_id, rollout_index) and with what is wrong.

    False when the batch, or a group, is not there (any more).
    """
    pointers = {pointer.group_id: pointer for pointer in record.groups}
    for (group_id, index), text in problems.items():
        shard = run.shard(pointers[group_id].shard)
        args = [epoch, pointers[group_id].entry, group_id, index, record.id, "undecodable", text]
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
        text: Any = run.connection.scripts.hget(run.keys.shard(shard).applied, batch_id)
        by_entry[shard] = json.loads(text) if text else {}
    for pointer in groups:
        excluded = by_entry[pointer.shard].get(pointer.entry, ())
        if excluded == "dead":
            exclusions.dead.add(pointer.group_id)
        else:
            exclusions.left_out.update((pointer.group_id, index) for index in excluded)
    return exclusions
