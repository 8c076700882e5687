"""The scorers' streams: which records still wait for a score, and the hand-off to the next scorer or the grouper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from ..messages import first_problem
from ..run import Run, Shard
from ..run.consumer import Entry, entries_of
from ..run.malformed import reject
from ..run.records import RECORD_FIELDS, record_problem
from ..trajectory.reference import REFERENCE, Reference

#: Records of ended groups that one look at a scorer's stream finds at most.
LOOK_COUNT: Final = 64


class HandOff(NamedTuple):
    """A record on its way on: its entry, and its fields as they go to the scorer `target`, or None: to the grouper."""

    entry: Entry
    fields: Sequence[Any]
    target: str | None = None


def unchanged_record(entry: Entry) -> HandOff:
    """The record for the grouper, as it came: no score counts any more."""
    return HandOff(entry, [entry.fields[name] for name in RECORD_FIELDS])


def unscorable_record(entry: Entry) -> HandOff:
    """The record for the grouper, without a reward: the scorers that follow do not see it."""
    fields: dict[str, Any] = {**entry.fields, "kind": "unscorable", "reward": ""}
    return HandOff(entry, [fields[name] for name in RECORD_FIELDS])


def scored_record(entry: Entry, reference: Reference, target: str | None) -> HandOff:
    """The record with the reward of `reference`, for the scorer `target`, or None: for the grouper."""
    text = REFERENCE.dump_json(reference, exclude_defaults=True)
    fields: dict[str, Any] = {**entry.fields, "reward": repr(reference.reward), "reference": text}
    return HandOff(entry, [fields[name] for name in RECORD_FIELDS], target)


def pass_on(shard: Shard, scorer: str, records: Sequence[HandOff]) -> int:
    """Hand records of a scorer's stream off. Returns how many nobody else had handed off before."""
    passed = 0
    for target in dict.fromkeys(record.target for record in records):
        args: list[Any] = [scorer, "1" if target is None else "0"]
        for record in records:
            if record.target == target:
                args += [record.entry.id, *record.fields]
        next_stream = shard.keys.rollouts if target is None else shard.keys.scoring(target)
        passed += shard.call("scored", args, stream=shard.keys.scoring(scorer), target=next_stream)
    return passed


def references_of(run: Run, shard: Shard, scorer: str, entries: Sequence[Entry]) -> dict[str, Reference]:
    """The reference of each record, by entry id. Entries that are no record are removed as malformed, and left out."""
    references = {}
    for entry in entries:
        problem = record_problem(run, shard.index, entry.fields)
        if problem is None:
            try:
                references[entry.id] = REFERENCE.validate_json(entry.fields["reference"])
            except ValidationError as error:
                problem = f"reference: {first_problem(error)}"
        if problem is not None:
            reject(shard, shard.keys.scoring(scorer), entry.id, problem, entry.fields, stage=scorer)
    return references


def waits_for_score(shard: Shard, entries: Sequence[Entry]) -> list[bool]:
    """Of records: whether a score would still count. Its group may have ended, or the record be unscorable."""
    pipe = shard.connection.scripts.pipeline(transaction=False)
    for entry in entries:
        pipe.exists(shard.keys.group(entry.fields["group_id"].decode()))
    return [
        bool(is_open) and entry.fields["kind"] == b"usable"
        for entry, is_open in zip(entries, pipe.execute() if entries else (), strict=True)
    ]


def pass_on_ended(run: Run, shard: Shard) -> int:
    """Send what waits for a scorer although its group has ended to the grouper: no scorer may run that would do so.

    Looks at a page of each scorer's stream. Returns how many were sent.
    """
    passed = 0
    for scorer in run.manifest.scorers:
        reply: Any = shard.connection.scripts.xrange(shard.keys.scoring(scorer), "-", "+", LOOK_COUNT)
        entries = entries_of(shard.index, reply)
        records = [entry for entry in entries if record_problem(run, shard.index, entry.fields) is None]
        waits = waits_for_score(shard, records)
        ended = [
            unchanged_record(entry)
            for entry, is_waiting in zip(records, waits, strict=True)
            if not is_waiting
        ]
        passed += pass_on(shard, scorer, ended)
    return passed
