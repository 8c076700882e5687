"""For `status --check --deep`: whether a quiet run stores what its ledger says.

It walks over everything that a shard stores, structure by structure: packets, members, results, and the references to
them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from redis.exceptions import NoPermissionError, ResponseError

from ..errors import WireError
from ..grouping.groups_log import read_log
from ..messages import brief, one_line
from ..run import Run
from ..run.packets import MemberLine, parse_members, read_packet
from ..store.keys import ShardKeys
from ..store.replies import as_count
from ..trajectory.member_table import read_table
from .seen import entry_pages

PAGE: Final = 256
#: A packet in the hash of an open group, see `lua/lib/complete.lua`.
_GROUP_PACKET: Final = re.compile(rb"([0-9]{1,15}) [0-9]{1,15} ([01]+)\n((?:[^\n]+\n)+)\n(.*)", re.DOTALL)
#: A turn in that hash, see `lua/lib/turns.lua`.
_TURN: Final = re.compile(rb"turn:([0-9]{1,5}):([0-9]{1,9})")


class Audit(NamedTuple):
    """What a walk over everything stored has found."""

    problems: list[str]
    payloads: int
    uncounted: int  # trajectories that count for no group and stay until their packet goes

    def __str__(self) -> str:
        text = f"{self.payloads} payloads stored"
        return f"{text}, with {self.uncounted} trajectories that do not count" if self.uncounted else text


def audit(run: Run) -> Audit:
    """Differences between the ledger and what is stored, packets that nobody can read, and orphaned keys."""
    problems, payloads, uncounted = [], 0, 0
    before = run.counters()
    for number, keys in enumerate(run.keys.shards):
        stored = walk(run, keys)
        texts = (*_wrong_counters(run, keys, stored), *stored.problems, *_stray_keys(run, keys, stored))
        problems += [one_line(f"shard {number}: {text}") for text in texts]
        payloads += len(stored.payloads) + len(stored.dead) + len(stored.kept)
        uncounted += stored.uncounted
    if problems and run.counters() != before:
        problems.append(
            "the run was at work meanwhile, these may be no differences: look again while it is quiet"
        )
    return Audit(problems, payloads, uncounted)


def _wrong_counters(run: Run, keys: ShardKeys, stored: StoredData) -> Iterator[str]:
    unfilled = {
        name.removeprefix("u"): count
        for name, count in counts_at(run, keys.sizes).items()
        if name.startswith("u")
    }
    if unfilled != stored.unfilled:
        yield f"unfilled slots by bytes are {unfilled}, found {dict(stored.unfilled)}"
    ledger = counts_at(run, keys.ledger)
    for name, found in (
        *(
            (name, stored.trajectories[name])
            for name in ("rollouts", "scoring", "open", "grouped", "in_flight")
        ),
        *((f"{name}_packets", stored.packets[name]) for name in ("rollouts", "scoring")),
        ("live_bytes", sum(stored.payloads.values()) + sum(stored.outputs.values())),
        ("groups_abandoned", stored.abandoned),
        ("groups_eval", stored.evaluations),
        ("dead_bytes", sum(stored.dead.values())),
        ("kept_bytes", stored.kept_bytes),
    ):
        if ledger[name] != found:
            yield f"ledger {name} is {ledger[name]}, found {found}"


def _stray_keys(run: Run, keys: ShardKeys, stored: StoredData) -> Iterator[str]:
    groups = (*map(keys.group, stored.open_groups), *map(keys.dead_group, stored.dead_groups))
    expected = {*stored.references, *groups}
    prefixes = (keys.payload(""), keys.output(""), keys.group(""), keys.dead_group(""))
    shard_keys = {
        key.decode(errors="backslashreplace")
        for key in run.connection.scripts.scan_iter(match=f"{keys.void.removesuffix('void')}*", count=PAGE)
    }
    strays = [key for key in sorted(shard_keys - expected) if key.startswith(prefixes)]
    for key, lives_ms in zip(strays, _times_to_live(run, strays), strict=True):
        # What its script has not seen yet, or never will, goes by itself.
        if lives_ms == NO_END or not key.startswith((keys.payload(""), keys.output(""))):
            yield f"key {key} belongs to nothing (orphan)"
    for key in sorted(stored.references.keys() - shard_keys):
        yield f"key {key} is referred to and missing"
    kept = sorted(stored.references.keys() & shard_keys)
    for key, lives_ms in zip(kept, _times_to_live(run, kept), strict=True):
        if lives_ms != NO_END:
            yield f"key {key} is referred to and will be gone in {lives_ms} ms"


#: Reply of PTTL for a key that does not expire.
NO_END: Final = -1


def _times_to_live(run: Run, keys: Sequence[str]) -> Iterator[int]:
    """Milliseconds until each key is gone."""
    for start in range(0, len(keys), PAGE):
        pipe: Any = run.connection.scripts.pipeline(transaction=False)
        for key in keys[start : start + PAGE]:
            pipe.pttl(key)
        yield from pipe.execute()


@dataclass
class StoredData:
    """What the structures of a shard hold and refer to, counted entry by entry."""

    payloads: dict[str, int] = field(default_factory=dict)  # key -> bytes
    outputs: dict[str, int] = field(default_factory=dict)  # key -> bytes
    dead: dict[str, int] = field(default_factory=dict)  # key -> bytes, of payloads of dead letters
    kept: dict[str, int] = field(default_factory=dict)  # key -> bytes, of payloads of kept groups
    kept_bytes: int = 0  # with what their entries hold
    places: dict[str, str] = field(default_factory=dict)  # key -> what refers to it: one thing at any time
    open_groups: list[str] = field(default_factory=list)
    dead_groups: list[str] = field(default_factory=list)
    trajectories: Counter[str] = field(default_factory=Counter)  # by counter of the ledger
    packets: Counter[str] = field(default_factory=Counter)  # entries, by counter of the ledger
    uncounted: int = 0  # trajectories that count for no group and stay until their packet goes
    unfilled: Counter[str] = field(default_factory=Counter)  # bytes a slot began with -> free slots
    abandoned: int = 0  # open groups
    evaluations: int = 0  # open groups of role eval
    problems: list[str] = field(default_factory=list)  # what no process of the run has written like this

    @property
    def references(self) -> dict[str, int]:
        """Every key with data of trajectories -> bytes."""
        return {**self.payloads, **self.outputs, **self.dead, **self.kept}

    def refer(self, sizes: dict[str, int], key: bytes, size: bytes, place: str) -> None:
        """Note in `sizes` that `place` refers to the data at `key`."""
        if not re.fullmatch(rb"[0-9]{1,15}", size) or not int(size):
            return
        name = key.decode(errors="replace")
        if name in self.places:
            self.problems.append(f"{name} belongs to {self.places[name]} and to {place}")
        self.places[name], sizes[name] = place, int(size)


def walk(run: Run, keys: ShardKeys) -> StoredData:
    """Read every structure of a shard, page by page."""
    stored = StoredData()
    _walk_streams(run, keys, stored)
    _walk_open_groups(run, keys, stored)
    _walk_groups_log(run, keys, stored)
    for group_id in _ids(stored, "dead", run.connection.scripts.zscan_iter(keys.dead, count=PAGE)):
        stored.dead_groups.append(group_id)
        letter = hash_at(run, keys.dead_group(group_id))
        lines = b"" if b"emptied" in letter else letter.get(b"log:payloads", b"")
        _refer_lines(stored, stored.dead, lines, f"dead group {group_id}")
    for entry, fields in _entries(run, keys.kept):
        stored.kept_bytes += as_count(fields.get(b"bytes"))
        _refer_lines(stored, stored.kept, fields.get(b"payloads", b""), f"entry {entry} of kept")
    garbage: Any = run.connection.scripts.lrange(keys.garbage, 0, -1)
    for item in garbage:
        key, _, size = item.rpartition(b" ")
        stored.refer(stored.payloads, key, size, "the garbage list")
    return stored


def _walk_streams(run: Run, keys: ShardKeys, stored: StoredData) -> None:
    shard = run.keys.shards.index(keys)
    streams = [
        ("rollouts", keys.rollouts),
        *(("scoring", keys.scoring(name)) for name in run.manifest.scorers),
    ]
    for counter, stream in streams:
        for entry, fields in _entries(run, stream):
            place = f"entry {entry} of {stream.partition('}:')[2]}"
            stored.packets[counter] += 1
            stored.trajectories[counter] += fields.get(b"members", b"").count(b"\n")
            stored.refer(stored.payloads, fields.get(b"payload", b""), fields.get(b"bytes", b""), place)
            try:
                packet = read_packet(run, shard, fields)
                own = (fields[b"table"], fields[b"bytes"]) if packet.payload else None
                problem = None if own is None else _table_problem(packet.members, *own)
            except WireError as error:
                problem = str(error)
            if problem:
                stored.problems.append(f"{place}: {problem}")
    for entry, fields in _entries(run, keys.results):
        output, size = fields.get(b"output", b""), fields.get(b"output_bytes", b"")
        late: Any = run.connection.scripts.hget(output, "late_bytes") if output else None
        size = b"%d" % (int(size) + as_count(late)) if late and size.isdigit() else size
        stored.refer(stored.outputs, output, size, f"entry {entry} of results")


def _table_problem(members: list[MemberLine], table: bytes, size: bytes) -> str | None:
    """Why this is not the table of a packet with these members, or None."""
    try:
        indices = read_table(table, int(size))[0].table["index"].tolist()
    except WireError as error:
        return str(error)
    lines = [member.rollout_index for member in members]
    return None if indices == lines else f"its table has the members {indices}, its text {lines}"


def _walk_open_groups(run: Run, keys: ShardKeys, stored: StoredData) -> None:
    open_groups = run.connection.scripts.zscan_iter(keys.open, count=PAGE)
    for group_id in _ids(stored, "open", open_groups):
        stored.open_groups.append(group_id)
        group = hash_at(run, keys.group(group_id))
        stored.abandoned += group.get(b"producer") == b""
        head, slots = group.get(b"head", b""), group.get(b"slots", b"")
        stored.evaluations += head.startswith(b"eval ")
        if b"." in slots:
            slot_bytes = b"".join(head.split(b" ")[2:3]).decode(errors="backslashreplace")
            stored.unfilled[slot_bytes] += slots.count(b".")
        stored.problems += [f"group {group_id}: {problem}" for problem in _turn_problems(group, slots)]
        columns_bytes, *where = group.get(b"columns", b"").split(b" ")
        if where:
            stored.refer(stored.payloads, where[0], columns_bytes, f"group {group_id}")
        elif columns_bytes:  # the server is yet to get them
            stored.unfilled[columns_bytes.decode(errors="backslashreplace")] += 1
        counted = _walk_packets(keys, stored, group_id, group)
        taken = [index for index, letter in enumerate(slots) if letter in b"us"]
        stored.trajectories["open"] += len(taken)
        if sorted(counted) != taken:
            stored.problems.append(
                f"group {group_id}: its packets count the members {sorted(counted)}, its slot map {taken}"
            )


def _turn_problems(group: Mapping[bytes, bytes], slots: bytes) -> Iterator[str]:
    """What is wrong with the turns that gateways keep in an open group, see `lua/lib/turns.lua`."""
    sizes = [
        (int(match[1]), int(match[2]), len(value))
        for name, value in group.items()
        if (match := _TURN.fullmatch(name))
    ]
    for name, value in group.items():
        if not name.startswith(b"turns:"):
            continue
        slot = name.removeprefix(b"turns:").decode(errors="replace")
        mine = [(number, size) for index, number, size in sizes if str(index) == slot]
        found = f"{len(mine)} {sum(size for _, size in mine)}"
        if value.decode(errors="replace") != found:
            yield f"slot {slot} has {found} turns and bytes of them, its counter says {brief(value)}"
    kept = {index for index, *_ in sizes}
    if ended := sorted(index for index in kept if slots[index : index + 1] != b"."):
        yield f"the turns of slots that have ended are kept: {ended}"


def _walk_packets(
    keys: ShardKeys, stored: StoredData, group_id: str, group: Mapping[bytes, bytes]
) -> list[int]:
    """The rollout indices that count in the packets of an open group."""
    prefix, slots, counted = keys.payload("").encode(), group.get(b"slots", b""), []
    for key, packet in group.items():
        if not key.startswith(prefix):
            continue
        place = f"group {group_id}"
        stored.refer(stored.payloads, key, packet.partition(b" ")[0], place)
        match = _GROUP_PACKET.fullmatch(packet)
        try:
            if match is None:
                raise WireError(f"{brief(packet)} is no packet")
            members = parse_members(match[3])
            problem = _table_problem(members, match[4], match[1])
            if len(match[2]) != len(members):
                problem = f"it has {len(members)} members, its mask {match[2].decode()}"
        except WireError as error:
            members, problem = [], str(error)
        if problem:
            stored.problems.append(f"{place}, packet {key.decode(errors='replace')}: {problem}")
        mask = match[2] if match else b""
        live = [
            member.rollout_index
            for member, counts in zip(members, mask, strict=False)
            # `apply_scores` ends a slot as unscorable and leaves its packet as it is.
            if counts == ord("1") and slots[member.rollout_index : member.rollout_index + 1] != b"x"
        ]
        stored.uncounted += len(members) - len(live)
        counted += live
    return counted


def _walk_groups_log(run: Run, keys: ShardKeys, stored: StoredData) -> None:
    shard, owners, after = run.keys.shards.index(keys), hash_at(run, keys.owners), "0-0"
    while groups := read_log(run, shard, after, PAGE):
        after = groups[-1].entry
        for group in groups:
            counter = "in_flight" if group.entry.encode() in owners else "grouped"
            stored.trajectories[counter] += group.count
            place = (
                f"group {group.group_id} in the log" if group.group_id else f"entry {group.entry} of groups"
            )
            for key, size in group.payloads:
                stored.refer(stored.payloads, key.encode(), str(size).encode(), place)
            if group.problem:
                stored.problems.append(f"{place}: {group.problem}")
            else:
                stored.uncounted += sum(len(packet.members) for packet in group.packets) - group.count


def _refer_lines(stored: StoredData, sizes: dict[str, int], lines: bytes, place: str) -> None:
    """Note the payloads of a group as its log entry lists them."""
    for line in lines.split(b"\n"):
        key, size, *_ = [*line.split(b" "), b"", b""]
        stored.refer(sizes, key, size, place)


def _ids(stored: StoredData, place: str, members: Iterable[tuple[bytes, float]]) -> Iterator[str]:
    for member, _ in members:
        try:
            yield member.decode()
        except UnicodeDecodeError:
            stored.problems.append(f"{place} has the member {brief(member)}, which is no id of a group")


def hash_at(run: Run, key: str) -> dict[bytes, bytes]:
    """A hash; {} where the key holds something else."""
    try:
        fields: Any = run.connection.scripts.hgetall(key)
    except ResponseError as error:
        if isinstance(error, NoPermissionError):
            raise
        return {}
    return dict(fields)


def counts_at(run: Run, key: str) -> Counter[str]:
    """The whole numbers of a hash."""
    fields = hash_at(run, key)
    return Counter(
        {name.decode(errors="backslashreplace"): as_count(value) for name, value in fields.items()}
    )


def _entries(run: Run, key: str) -> Iterator[tuple[str, Mapping[bytes, bytes]]]:
    """Id and fields of every entry of a stream."""
    return chain.from_iterable(entry_pages(run.connection, key, count=PAGE))
