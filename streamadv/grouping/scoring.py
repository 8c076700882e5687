"""The way of records past the scorers: who still waits for a score, and the hand-off of what has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..run import Run, Shard
from ..run.consumer import Entry, entries_of
from ..run.records import RECORD_FIELDS, record_problem

#: Records of ended groups that one look at a scorer's stream finds at most.
LOOK_COUNT: Final = 64


class Passed(NamedTuple):
    """A record on its way on: where it stands, and its fields (those of RECORD_FIELDS) as they go on."""

    entry: str
    fields: Sequence[Any]


def pass_on(shard: Shard, scorer: str, records: Sequence[Passed], target: str | None) -> int:
    """Hand records of a scorer's stream off, to the scorer `target`, or None: to the grouper. How many were there."""
    if not records:
        return 0
    keys = shard.keys
    args: list[Any] = [scorer, "1" if target is None else "0"]
    for record in records:
        args += [record.entry, *record.fields]
    next_stream = keys.rollouts if target is None else keys.scoring(target)
    passed: int = shard.call("scored", args, stream=keys.scoring(scorer), target=next_stream)
    return passed


def unchanged(entry: Entry) -> Passed:
    """The record as it came."""
    return Passed(entry.id, [entry.fields[name] for name in RECORD_FIELDS])


def waits_for_score(run: Run, entries: Sequence[Entry]) -> list[bool]:
    """Of records: whether a score would still count. Its group may have ended, or the record be unscorable."""
    pipe = run.connection.scripts.pipeline(transaction=False)
    for entry in entries:
        pipe.exists(run.keys.shard(entry.shard).group(entry.fields["group_id"].decode()))
    return [
        bool(there) and entry.fields["kind"] == b"usable"
        for entry, there in zip(entries, pipe.execute() if entries else (), strict=True)
    ]


def pass_on_ended(run: Run, shard: Shard) -> int:
    """Send what waits for a scorer although its group has ended to the grouper: no scorer may be there to do so.

    A page of each scorer's stream at most. Returns how many were sent.
    """
    passed = 0
    for scorer in run.manifest.scorers:
        reply: Any = shard.connection.scripts.xrange(shard.keys.scoring(scorer), "-", "+", LOOK_COUNT)
        entries = entries_of(shard.index, reply)
        records = [entry for entry in entries if record_problem(run, shard.index, entry.fields) is None]
        waiting = waits_for_score(run, records)
        ended = [unchanged(entry) for entry, waits in zip(records, waiting, strict=True) if not waits]
        passed += pass_on(shard, scorer, ended, None)
    return passed
