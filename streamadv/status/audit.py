"""A walk over everything a quiet run stores: for `status --check --deep` and for deleting a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from redis.exceptions import NoPermissionError, ResponseError

from ..grouping.groups_log import read_log
from ..messages import brief
from ..run import Run
from ..store.keys import RUNS, ShardKeys, manifest_key
from ..store.replies import as_count

PAGE: Final = 256
DELETE_SLICE: Final = 64


@dataclass
class ShardInventory:
    """What the structures of a shard refer to, counted one by one."""

    payloads: dict[str, int] = field(default_factory=dict)  # key -> bytes
    outputs: dict[str, int] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)  # payloads of dead letters
    open_groups: list[str] = field(default_factory=list)
    dead_groups: list[str] = field(default_factory=list)
    rollouts: int = 0
    scoring: int = 0
    open: int = 0
    unfilled: dict[str, int] = field(
        default_factory=dict
    )  # bytes a slot began with -> slots without a record
    abandoned: int = 0  # open groups
    grouped: int = 0  # trajectories in the groups log
    in_flight: int = 0  # the same, of groups that a batch owns
    foreign: list[str] = field(
        default_factory=list
    )  # what nobody of the run has written, and can name no key


def walk(run: Run, keys: ShardKeys) -> ShardInventory:
    """Read every structure of a shard, page by page."""
    scripts = run.connection.scripts
    found = ShardInventory()
    for fields in _stream(run, keys.rollouts):
        found.rollouts += 1
        _add(found.payloads, fields.get(b"key", b""), fields.get(b"bytes", b""))
    for scorer in run.manifest.scorers:
        for fields in _stream(run, keys.scoring(scorer)):
            found.scoring += 1
            _add(found.payloads, fields.get(b"key", b""), fields.get(b"bytes", b""))
    for group_id in _ids(found, "open", scripts.zscan_iter(keys.open, count=PAGE)):
        found.open_groups.append(group_id)
        group = _hash(run, keys.group(group_id))
        found.abandoned += group.get(b"abandoned") == b"1"
        filled = sum(index.isdigit() for index in group)
        if free := as_count(group.get(b"slots", b"")) - filled:
            each = group.get(b"slot_bytes", b"").decode(errors="backslashreplace")
            found.unfilled[each] = found.unfilled.get(each, 0) + free
        for index, record in group.items():
            parts = record.split(b" ", 5)
            if re.fullmatch(rb"[0-9]{1,4}", index) and parts[0] == b"u" and len(parts) == 6:
                _, _, size, key, *_ = parts
                found.open += 1
                _add(found.payloads, key, size)
    after = "0-0"
    shard, owners = run.keys.shards.index(keys), _hash(run, keys.owners)
    while groups := read_log(run, shard, after, PAGE):
        after = groups[-1].entry
        for group_entry in groups:
            if group_entry.entry.encode() in owners:
                found.in_flight += len(group_entry.payloads)
            else:
                found.grouped += len(group_entry.payloads)
            found.payloads.update(group_entry.payloads)
    for member in _ids(found, "dead", scripts.zscan_iter(keys.dead, count=PAGE)):
        found.dead_groups.append(member)
        stored = _hash(run, keys.dead_group(member))
        for item in [] if b"emptied" in stored else stored.get(b"log:payloads", b"").split(b"\n"):
            key, _, size = item.rpartition(b" ")
            _add(found.dead, key, size)
    garbage: Any = scripts.lrange(keys.garbage, 0, -1)
    for item in garbage:
        key, _, size = item.rpartition(b" ")
        _add(found.payloads, key, size)
    for fields in _stream(run, keys.results):
        _add(found.outputs, fields.get(b"output", b""), fields.get(b"output_bytes", b""))
    return found


def deep_problems(run: Run) -> list[str]:
    """Differences between the ledger and what is really there, and orphaned keys. For a quiet run."""
    problems = []
    for number, keys in enumerate(run.keys.shards):
        found = walk(run, keys)
        stored: Any = run.connection.scripts.hgetall(keys.ledger)
        ledger = {name.decode(errors="backslashreplace"): as_count(value) for name, value in stored.items()}
        unfilled = {
            name[1:].decode(errors="backslashreplace"): as_count(value)
            for name, value in _hash(run, keys.sizes).items()
            if name.startswith(b"u")
        }
        if unfilled != found.unfilled:
            problems.append(
                f"shard {number}: unfilled places by bytes are {unfilled}, found {found.unfilled}"
            )
        live = sum(found.payloads.values()) + sum(found.outputs.values())
        for name, counted, there in (
            ("rollouts", ledger.get("rollouts", 0), found.rollouts),
            ("scoring", ledger.get("scoring", 0), found.scoring),
            ("open", ledger.get("open", 0), found.open),
            ("grouped", ledger.get("grouped", 0), found.grouped),
            ("in_flight", ledger.get("in_flight", 0), found.in_flight),
            ("live_bytes", ledger.get("live_bytes", 0), live),
            ("groups_abandoned", ledger.get("groups_abandoned", 0), found.abandoned),
            ("dead_bytes", ledger.get("dead_bytes", 0), sum(found.dead.values())),
        ):
            if counted != there:
                problems.append(f"shard {number}: ledger {name} is {counted}, found {there}")
        problems += [f"shard {number}: {text}" for text in (*found.foreign, *_stray_keys(run, keys, found))]
    return problems


def _stray_keys(run: Run, keys: ShardKeys, found: ShardInventory) -> Iterator[str]:
    scripts = run.connection.scripts
    known = {*found.payloads, *found.outputs, *found.dead, *_group_keys(keys, found)}
    prefixes = (keys.payload(""), keys.output(""), keys.group(""), keys.dead_group(""))
    there = {
        key.decode(errors="backslashreplace")
        for key in scripts.scan_iter(match=f"{_escape(keys.void[:-4])}*", count=PAGE)
    }
    owned = {key for key in there if key.startswith(prefixes)}
    for key in sorted(owned - known):
        yield f"key {key} belongs to nothing (orphan)"
    for key in sorted({*found.payloads, *found.outputs, *found.dead} - there):
        yield f"key {key} is referred to and missing"


def delete_run(run: Run) -> int:
    """Delete all that is stored of a run, in slices. Returns the number of keys. Stop its processes first."""
    scripts, count = run.connection.scripts, 0
    for keys in run.keys.shards:
        found = walk(run, keys)
        names = [*found.payloads, *found.outputs, *found.dead, *_group_keys(keys, found)]
        names += [
            keys.rollouts,
            keys.open,
            keys.groups,
            keys.work,
            keys.results,
            keys.applied,
            keys.owners,
            keys.ledger,
        ]
        names += [keys.trainer, keys.ended, keys.ended_before, keys.garbage, keys.dead, keys.attempts]
        names += [keys.malformed, keys.sizes, keys.scored]
        names += [keys.scoring(scorer) for scorer in run.manifest.scorers]
        names += [keys.lineage, keys.batches, keys.producers]
        for start in range(0, len(names), DELETE_SLICE):
            count += scripts.unlink(*names[start : start + DELETE_SLICE])
    count += scripts.unlink(manifest_key(run.name))
    scripts.hdel(RUNS, run.name)
    return count


def _group_keys(keys: ShardKeys, found: ShardInventory) -> list[str]:
    return [*map(keys.group, found.open_groups), *map(keys.dead_group, found.dead_groups)]


def _ids(found: ShardInventory, place: str, members: Iterable[tuple[bytes, float]]) -> Iterator[str]:
    for member, _ in members:
        try:
            yield member.decode()
        except UnicodeDecodeError:
            found.foreign.append(f"{place} has the member {brief(member)}, which is no id of a group")


def _hash(run: Run, key: str) -> dict[bytes, bytes]:
    """A hash; {} where something else stands."""
    try:
        stored: Any = run.connection.scripts.hgetall(key)
    except ResponseError as error:
        if isinstance(error, NoPermissionError):
            raise
        return {}
    return dict(stored)


def _stream(run: Run, key: str) -> Iterator[dict[bytes, bytes]]:
    after = "-"
    while True:
        page: Any = run.connection.scripts.xrange(key, after, "+", PAGE)
        for _, fields in page:
            yield fields
        if len(page) < PAGE:
            return
        after = f"({page[-1][0].decode()}"


def _add(target: dict[str, int], key: bytes, size: bytes) -> None:
    if re.fullmatch(rb"[0-9]{1,15}", size) and int(size):
        target[key.decode(errors="replace")] = int(size)


def _escape(text: str) -> str:
    return "".join(f"\\{character}" if character in "*?[]\\" else character for character in text)
