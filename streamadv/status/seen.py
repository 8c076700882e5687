"""Groups as people look at them: open, waiting in the log, kept after their end, or dead letters. Only plain reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Final, Literal, NamedTuple, Protocol

from ..errors import WireError
from ..grouping.groups_log import StoredColumns, payload_lines
from ..messages import brief
from ..run import Run, Shard
from ..run.kept import Numbers, unpack_late, unpack_results
from ..store.replies import as_count, as_int, as_text
from ..trajectory.member_table import cut_tables, read_table
from ..trajectory.members import Members
from ..trajectory.packet import StoredPacket
from ..trajectory.reference import Reference, references_of

Where = Literal["open", "waiting", "kept", "dead"]
PLACES: Final[tuple[Where, ...]] = ("open", "waiting", "kept", "dead")
#: Groups of one read.
PAGE: Final = 32
_HEAD: Final = ("size", "count", "opened_ms", "epoch", "version", "outcome", "data_source")
Fields = Mapping[bytes, bytes]


@dataclass(slots=True, eq=False)
class SeenGroup:
    """A group at one moment. `members` are those whose data is there, sorted by rollout_index."""

    where: Where
    shard: int
    group_id: str
    outcome: str
    """How it has ended: complete or partial while it waits, open before, `dead:<reason>`."""
    size: int = 0
    count: int = 0
    version: int | None = None
    """That it was begun at."""
    data_source: str | None = None
    batch: int | None = None
    ended_ms: int | None = None
    round: str | None = None
    """Of evaluation."""
    slots: str = ""
    """Of an open group: its slot map, see lua/lib/group.lua."""
    naming: tuple[int, int | None] | None = None
    """Of a group dropped while a batch was named: its number, and drop_after."""
    detail: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Of its batch, as BatchRecord without the groups."""
    left_out: Sequence[int] = ()
    """Rollout indices that its batch did without."""
    packets: Sequence[StoredPacket] = ()
    columns: Sequence[StoredColumns] = ()
    """Of the group itself; at most one."""
    members: Sequence[Reference] = ()
    counting: frozenset[int] = frozenset()
    """Rollout indices of those that count for the group."""
    results: Sequence[Numbers] = ()
    late: Mapping[int, Sequence[Numbers]] = field(default_factory=dict)
    """What the trainer has made of its members after late columns, and these columns, by rollout_index."""
    problem: str | None = None
    """Why its data cannot be read."""
    entry: str = ""
    """Of a waiting or kept group: its entry in the log."""


class Place(Protocol):
    """Where a group was seen."""

    @property
    def where(self) -> Where: ...
    @property
    def shard(self) -> int: ...
    @property
    def entry(self) -> str: ...
    @property
    def group_id(self) -> str: ...


def read_groups_at(run: Run, where: Where) -> Iterator[SeenGroup]:
    """All groups of one kind, the oldest first in each shard. What cannot be read at all is left out."""
    readers = {"open": _read_open, "waiting": _read_waiting, "kept": _read_kept, "dead": _read_dead}
    for shard in run.shards:
        yield from readers[where](shard)


def read_kept_since(shard: Shard, after: str) -> tuple[str | None, Iterator[SeenGroup]]:
    """The oldest kept entry of a shard, None without any; and the groups that were kept after the entry `after`."""
    first: Any = shard.connection.scripts.xrange(shard.keys.kept, "-", "+", 1)
    new = (entry.seen() for entry in kept_entries(shard, f"({after}" if after else "-"))
    return (first[0][0].decode() if first else None), new


def read_again(run: Run, group: Place) -> SeenGroup | None:
    """The group of this place as it is now; wherever it is once it has left this place."""
    shard = run.shards[group.shard]
    if group.where == "kept":
        page: Any = shard.connection.scripts.xrange(shard.keys.kept, group.entry, group.entry, 1)
        if page:
            return KeptEntry(shard.index, group.entry, page[0][1]).seen()
    return find_group(run, group.group_id)


def find_group(run: Run, group_id: str) -> SeenGroup | None:
    """The group of this id, wherever it is; of several kept ones the newest."""
    shard = run.shard_of(group_id)
    if (group := _open_group(shard, group_id)) or (group := _dead_group(shard, group_id)):
        return group
    for reader in (_read_waiting, _read_kept):
        if found := [each for each in reader(shard) if each.group_id == group_id]:
            return found[-1]
    return None


def _entries(shard: Shard, key: str, after: str = "-") -> Iterator[tuple[str, dict[bytes, bytes]]]:
    while True:
        page: Any = shard.connection.scripts.xrange(key, after, "+", PAGE)
        for entry, fields in page:
            yield entry.decode(), fields
        if len(page) < PAGE:
            return
        after = f"({page[-1][0].decode()}"


def _read_open(shard: Shard) -> Iterator[SeenGroup]:
    members: Any = shard.connection.scripts.zrange(shard.keys.open, 0, -1)
    for group_id in members:
        if group := _open_group(shard, group_id.decode(errors="replace")):
            yield group


def _open_group(shard: Shard, group_id: str) -> SeenGroup | None:
    stored: Any = shard.connection.scripts.hgetall(shard.keys.group(group_id))
    head = stored.get(b"head", b"").split(b" ", 6)
    if len(head) != 7:
        return None
    lines, tables, scores = [], b"", {}
    for name, value in stored.items():
        if name.startswith(shard.keys.payload("").encode()):
            line, _, rest = value.partition(b"\n")
            lines.append(name + b" " + line)
            tables += rest.partition(b"\n\n")[2]
        elif name.startswith(b"score:"):
            with suppress(ValueError):
                scores[name[6:].decode()] = json.loads(value)
    role, size, _, opened_ms, epoch, version, source = head
    fields = {
        b"group_id": group_id.encode(),
        b"head": b" ".join((size, b"0", opened_ms, epoch, version, b"open", source)),
        b"payloads": b"\n".join(lines),
        b"tables": tables,
        b"scores": json.dumps(scores).encode(),
    }
    group = _seen(shard.index, "open", fields)
    group.slots, group.round = as_text(stored.get(b"slots", b""), 8192), _text(stored.get(b"round"))
    group.detail = "evaluation" if role == b"eval" else ""
    return group


def _read_waiting(shard: Shard) -> Iterator[SeenGroup]:
    owners: Any = shard.connection.scripts.hgetall(shard.keys.owners)
    for entry, fields in _entries(shard, shard.keys.groups):
        group = _seen(shard.index, "waiting", fields, entry)
        group.batch = as_int(owners.get(entry.encode(), b"").partition(b"-")[0])
        yield group


def _read_kept(shard: Shard) -> Iterator[SeenGroup]:
    for kept in kept_entries(shard):
        yield kept.seen()


class KeptEntry(NamedTuple):
    """An entry of the stream `kept` as it stands there."""

    shard: int
    id: str
    fields: Fields

    def seen(self) -> SeenGroup:
        """Its group, as people look at it."""
        return _seen(self.shard, "kept", self.fields, self.id)


def kept_entries(shard: Shard, after: str = "-") -> Iterator[KeptEntry]:
    """The entries of a shard's stream `kept`, the oldest first. after: `(<id>` = those behind this one."""
    for entry, fields in _entries(shard, shard.keys.kept, after):
        yield KeptEntry(shard.index, entry, fields)


def _read_dead(shard: Shard) -> Iterator[SeenGroup]:
    letters: Any = shard.connection.scripts.zrange(shard.keys.dead, 0, -1, withscores=True)
    for member, when_ms in sorted(letters, key=lambda letter: abs(letter[1])):
        if group := _dead_group(shard, member.decode(errors="replace")):
            group.ended_ms = int(abs(when_ms))
            yield group


def _dead_group(shard: Shard, group_id: str) -> SeenGroup | None:
    stored: Any = shard.connection.scripts.hgetall(shard.keys.dead_group(group_id))
    if b"reason" not in stored:
        return None
    fields = {name.removeprefix(b"log:"): value for name, value in stored.items()}
    group = _seen(shard.index, "dead", {**fields, b"group_id": group_id.encode()})
    group.outcome = f"dead:{as_text(stored[b'reason'])}"
    return group


def _seen(shard: int, where: Where, fields: Fields, entry: str = "") -> SeenGroup:
    """A group from the fields of its entry in a log."""
    head = dict(zip(_HEAD, fields.get(b"head", b"").split(b" ", 6), strict=False))
    group = SeenGroup(
        where,
        shard,
        as_text(fields.get(b"group_id", b"")),
        as_text(fields.get(b"outcome") or head.get("outcome", b"")),
        size=as_count(head.get("size")),
        count=as_count(head.get("count")),
        version=as_int(head.get("version")),
        data_source=_text(head.get("data_source")),
        batch=as_int(fields.get(b"batch")),
        ended_ms=as_int(entry.partition("-")[0]),
        round=_text(fields.get(b"round")),
        detail=as_text(fields.get(b"detail", b""), 2000),
        entry=entry,
    )
    if b"naming" in fields:
        k, _, drop_after = as_text(fields[b"naming"]).partition(" ")
        group.naming = as_count(k), as_int(drop_after)
    try:
        group.record = json.loads(fields.get(b"record", b"{}"))
        group.left_out = json.loads(fields.get(b"left_out", b"[]"))
        _read_members(group, fields)
        group.results = unpack_results(fields[b"results"]) if b"results" in fields else ()
        group.late = unpack_late(fields.get(b"late", b""))
    except (WireError, ValueError) as error:
        group.problem = str(error)
    return group


def _read_members(group: SeenGroup, fields: Fields) -> None:
    """Fill in packets and members. Raises WireError and ValueError."""
    packets, members, counting = [], list[Reference](), set[int]()
    scores = json.loads(fields.get(b"scores", b"{}"))
    tables = cut_tables(fields.get(b"tables", b""))
    text = fields.get(b"payloads", b"").decode()
    lines, group.columns = payload_lines(text, "") if text else ([], [])
    for line, table in zip(lines, tables, strict=True):
        found, columns = read_table(table, line.size)
        packets.append(StoredPacket(line.key, line.size, line.epoch, columns, found))
        for reference, counts in zip(_references(group, found), line.mask, strict=True):
            score = scores.get(str(reference.rollout_index)) if reference.reward is None else None
            members.append(reference if score is None else replace(reference, **_score(score)))
            counting.update([reference.rollout_index] if counts == "1" else ())
    group.packets, group.counting = packets, frozenset(counting)
    group.members = sorted(members, key=lambda member: member.rollout_index)


def _references(group: SeenGroup, members: Members) -> list[Reference]:
    return references_of(members, repeat((group.group_id, group.data_source), len(members)))


def _score(score: Any) -> dict[str, Any]:
    """The rewards that `producer.score` brought. Raises ValueError."""
    try:
        return {"reward": float(score["reward"]), "rewards": dict(score.get("rewards", {}))}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a score is {brief(score)}") from error


def _text(value: bytes | None) -> str | None:
    return as_text(value) if value else None
