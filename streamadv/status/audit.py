"""A walk over everything a quiet run stores: for `status --check --deep` and for deleting a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
class StoredData:
    """What the structures of a shard hold and refer to, counted entry by entry."""

    payloads: dict[str, int] = field(default_factory=dict)  # key -> bytes
    outputs: dict[str, int] = field(default_factory=dict)  # key -> bytes
    dead: dict[str, int] = field(default_factory=dict)  # key -> bytes, of payloads of dead letters
    open_groups: list[str] = field(default_factory=list)
    dead_groups: list[str] = field(default_factory=list)
    rollouts: int = 0  # trajectories of the packets in the stream
    scoring: int = 0
    open: int = 0
    unfilled: Counter[str] = field(default_factory=Counter)  # bytes a slot began with -> free slots
    abandoned: int = 0  # open groups
    grouped: int = 0  # trajectories in the groups log, of groups in no batch
    in_flight: int = 0  # the same, of groups that a batch owns
    foreign: list[str] = field(default_factory=list)  # members of sets that no process of the run wrote

    @property
    def references(self) -> dict[str, int]:
        """Every key with data of trajectories -> bytes."""
        return {**self.payloads, **self.outputs, **self.dead}


def walk(run: Run, keys: ShardKeys) -> StoredData:
    """Read every structure of a shard, page by page."""
    stored = StoredData()
    _walk_streams(run, keys, stored)
    _walk_open_groups(run, keys, stored)
    _walk_groups_log(run, keys, stored)
    _walk_dead_letters(run, keys, stored)
    garbage: Any = run.connection.scripts.lrange(keys.garbage, 0, -1)
    for item in garbage:
        key, _, size = item.rpartition(b" ")
        _add(stored.payloads, key, size)
    return stored


def _walk_streams(run: Run, keys: ShardKeys, stored: StoredData) -> None:
    for fields in _entries(run, keys.rollouts):
        stored.rollouts += _add_packet(stored, fields)
    for scorer in run.manifest.scorers:
        for fields in _entries(run, keys.scoring(scorer)):
            stored.scoring += _add_packet(stored, fields)
    for fields in _entries(run, keys.results):
        _add(stored.outputs, fields.get(b"output", b""), fields.get(b"output_bytes", b""))


def _add_packet(stored: StoredData, fields: Mapping[bytes, bytes]) -> int:
    """Note the payload of a stream entry. Returns its number of trajectories."""
    _add(stored.payloads, fields.get(b"payload", b""), fields.get(b"bytes", b""))
    return fields.get(b"members", b"").count(b"\n")


def _walk_open_groups(run: Run, keys: ShardKeys, stored: StoredData) -> None:
    open_groups = run.connection.scripts.zscan_iter(keys.open, count=PAGE)
    prefix = keys.payload("").encode()
    for group_id in _ids(stored, "open", open_groups):
        stored.open_groups.append(group_id)
        group = _hash(run, keys.group(group_id))
        stored.abandoned += group.get(b"abandoned") == b"1"
        slots = group.get(b"slots", b"")
        stored.open += slots.count(b"u") + slots.count(b"s")
        if b"." in slots:
            slot_bytes = group.get(b"slot_bytes", b"").decode(errors="backslashreplace")
            stored.unfilled[slot_bytes] += slots.count(b".")
        for name, packet in group.items():
            if name.startswith(prefix):
                _add(stored.payloads, name, packet.partition(b" ")[0])


def _walk_groups_log(run: Run, keys: ShardKeys, stored: StoredData) -> None:
    shard, owners, after = run.keys.shards.index(keys), _hash(run, keys.owners), "0-0"
    while groups := read_log(run, shard, after, PAGE):
        after = groups[-1].entry
        for group in groups:
            if group.entry.encode() in owners:
                stored.in_flight += group.count
            else:
                stored.grouped += group.count
            stored.payloads.update(group.payloads)


def _walk_dead_letters(run: Run, keys: ShardKeys, stored: StoredData) -> None:
    dead_groups = run.connection.scripts.zscan_iter(keys.dead, count=PAGE)
    for group_id in _ids(stored, "dead", dead_groups):
        stored.dead_groups.append(group_id)
        letter = _hash(run, keys.dead_group(group_id))
        for item in [] if b"emptied" in letter else letter.get(b"log:payloads", b"").split(b"\n"):
            key, size, *_ = [*item.split(b" "), b"", b""]
            _add(stored.dead, key, size)


def deep_problems(run: Run) -> list[str]:
    """Differences between the ledger and what is stored, and orphaned keys. For a quiet run."""
    problems = []
    for number, keys in enumerate(run.keys.shards):
        stored = walk(run, keys)
        texts = (*_wrong_counters(run, keys, stored), *stored.foreign, *_stray_keys(run, keys, stored))
        problems += [f"shard {number}: {text}" for text in texts]
    return problems


def _wrong_counters(run: Run, keys: ShardKeys, stored: StoredData) -> Iterator[str]:
    unfilled = {
        name.removeprefix("u"): count
        for name, count in _counts(run, keys.sizes).items()
        if name.startswith("u")
    }
    if unfilled != stored.unfilled:
        yield f"unfilled slots by bytes are {unfilled}, found {dict(stored.unfilled)}"
    ledger = _counts(run, keys.ledger)
    for name, counted, stored_count in (
        ("rollouts", ledger["rollouts"], stored.rollouts),
        ("scoring", ledger["scoring"], stored.scoring),
        ("open", ledger["open"], stored.open),
        ("grouped", ledger["grouped"], stored.grouped),
        ("in_flight", ledger["in_flight"], stored.in_flight),
        ("live_bytes", ledger["live_bytes"], sum(stored.payloads.values()) + sum(stored.outputs.values())),
        ("groups_abandoned", ledger["groups_abandoned"], stored.abandoned),
        ("dead_bytes", ledger["dead_bytes"], sum(stored.dead.values())),
    ):
        if counted != stored_count:
            yield f"ledger {name} is {counted}, found {stored_count}"


def _stray_keys(run: Run, keys: ShardKeys, stored: StoredData) -> Iterator[str]:
    expected = {*stored.references, *_group_keys(keys, stored)}
    prefixes = (keys.payload(""), keys.output(""), keys.group(""), keys.dead_group(""))
    shard_keys = {
        key.decode(errors="backslashreplace")
        for key in run.connection.scripts.scan_iter(
            match=f"{_escape(keys.void.removesuffix('void'))}*", count=PAGE
        )
    }
    for key in sorted(shard_keys - expected):
        if key.startswith(prefixes):
            yield f"key {key} belongs to nothing (orphan)"
    for key in sorted(stored.references.keys() - shard_keys):
        yield f"key {key} is referred to and missing"


def delete_run(run: Run) -> int:
    """Delete everything stored of a run, in slices. Returns the number of keys. Stop its processes first."""
    scripts, count = run.connection.scripts, 0
    for keys in run.keys.shards:
        stored = walk(run, keys)
        names = [*stored.references, *_group_keys(keys, stored), *_fixed_keys(run, keys)]
        for start in range(0, len(names), DELETE_SLICE):
            count += scripts.unlink(*names[start : start + DELETE_SLICE])
    count += scripts.unlink(manifest_key(run.name))
    scripts.hdel(RUNS, run.name)
    return count


def _fixed_keys(run: Run, keys: ShardKeys) -> list[str]:
    """Keys of a shard that do not depend on its groups."""
    return [
        *(keys.rollouts, keys.open, keys.groups, keys.work, keys.results, keys.applied, keys.owners),
        *(keys.ledger, keys.trainer, keys.ended, keys.ended_before, keys.garbage, keys.dead, keys.attempts),
        *(keys.malformed, keys.sizes, keys.scored),
        *(keys.scoring(scorer) for scorer in run.manifest.scorers),
        *(keys.session, keys.batches, keys.producers),
    ]


def _group_keys(keys: ShardKeys, stored: StoredData) -> list[str]:
    return [*map(keys.group, stored.open_groups), *map(keys.dead_group, stored.dead_groups)]


def _ids(stored: StoredData, place: str, members: Iterable[tuple[bytes, float]]) -> Iterator[str]:
    for member, _ in members:
        try:
            yield member.decode()
        except UnicodeDecodeError:
            stored.foreign.append(f"{place} has the member {brief(member)}, which is no id of a group")


def _hash(run: Run, key: str) -> dict[bytes, bytes]:
    """A hash; {} where the key holds something else."""
    try:
        fields: Any = run.connection.scripts.hgetall(key)
    except ResponseError as error:
        if isinstance(error, NoPermissionError):
            raise
        return {}
    return dict(fields)


def _counts(run: Run, key: str) -> Counter[str]:
    fields = _hash(run, key)
    return Counter(
        {name.decode(errors="backslashreplace"): as_count(value) for name, value in fields.items()}
    )


def _entries(run: Run, key: str) -> Iterator[dict[bytes, bytes]]:
    """Fields of every entry of a stream."""
    after = "-"
    while True:
        page: Any = run.connection.scripts.xrange(key, after, "+", PAGE)
        for _, fields in page:
            yield fields
        if len(page) < PAGE:
            return
        after = f"({page[-1][0].decode()}"


def _add(sizes: dict[str, int], key: bytes, size: bytes) -> None:
    if re.fullmatch(rb"[0-9]{1,15}", size) and int(size):
        sizes[key.decode(errors="replace")] = int(size)


def _escape(text: str) -> str:
    """The text as a pattern that matches only itself."""
    return "".join(f"\\{character}" if character in "*?[]\\" else character for character in text)
