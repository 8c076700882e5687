"""Groups as people look at them: open, waiting in the log, kept after their end, or dead letters. Only plain reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ..errors import WireError
from ..grouping.groups_log import (
    StoredColumns,
    StoredMembers,
    StoredScore,
    payload_lines,
    read_in_halves,
    with_scores,
)
from ..messages import first_problem
from ..run import Run, Shard
from ..run.kept import Numbers, unpack_late, unpack_results
from ..store.connection import Connection
from ..store.keys import LAST_ID
from ..store.replies import as_count, as_int, as_text
from ..trajectory.member_table import cut_tables
from ..trajectory.members import Members, Reference, references_of
from ..trajectory.packet import StoredPacket

Where = Literal["open", "waiting", "kept", "dead"]
PLACES: Final[tuple[Where, ...]] = ("open", "waiting", "kept", "dead")
#: Groups of one read.
PAGE: Final = 32
_HEAD: Final = ("size", "count", "opened_ms", "epoch", "version", "outcome", "data_source")
Fields = Mapping[bytes, bytes]
_INDICES: Final = TypeAdapter(list[int])


class _Record(BaseModel):
    """What is read of a batch's record; the rest is as it stands there."""

    model_config = ConfigDict(extra="allow")

    num_groups: int = 0
    chain: dict[str, Any] = {}
    late: list[str] = []
    metrics: dict[str, Any] = {}


@lru_cache(64)  # groups of a batch have the same one
def _parse_record(raw: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    return _Record.model_validate_json(raw).model_dump(exclude_unset=True)


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


def read_groups_at(run: Run, where: Where) -> Iterator[SeenGroup]:
    """All groups of one kind, the oldest first in each shard. What cannot be read at all is left out."""
    for shard in run.shards:
        keys, scripts = shard.keys, shard.connection.scripts
        found: Any
        match where:
            case "open":
                found = scripts.zrange(keys.open, 0, -1)
                groups = (_open_group(shard, group_id.decode(errors="replace")) for group_id in found)
                yield from filter(None, groups)
            case "waiting":
                owners: Any = scripts.hgetall(keys.owners)
                for page in entry_pages(shard.connection, keys.groups):
                    yield from _waiting(shard, page, owners)
            case "kept":
                yield from chain.from_iterable(kept_pages(shard))
            case "dead":
                found = scripts.zrange(keys.dead, 0, -1, withscores=True)
                for member, when_ms in sorted(found, key=lambda letter: abs(letter[1])):
                    if group := _dead_group(shard, member.decode(errors="replace")):
                        group.ended_ms = int(abs(when_ms))
                        yield group


def kept_pages(shard: Shard, start: str = "-", *, back: bool = False) -> Iterator[list[SeenGroup]]:
    """Kept groups of a shard by pages, see `entry_pages`."""
    for page in entry_pages(shard.connection, shard.keys.kept, start, back=back, count=PAGE):
        yield _seen(shard.index, "kept", page)


def find_group(run: Run, group_id: str) -> SeenGroup | None:
    """The group of this id, wherever it is; of several kept ones the newest."""
    shard = run.shard_of(group_id)
    if (group := _open_group(shard, group_id)) or (group := _dead_group(shard, group_id)):
        return group
    if found := list(_named(entry_pages(shard.connection, shard.keys.groups), group_id)):
        owners: Any = shard.connection.scripts.hgetall(shard.keys.owners)
        return next(_waiting(shard, found[-1:], owners))
    kept = entry_pages(shard.connection, shard.keys.kept, "+", back=True)
    newest = list(islice(_named(kept, group_id), 1))
    return next(iter(_seen(shard.index, "kept", newest)), None)


Page = Sequence[tuple[str, Fields]]


def _named(pages: Iterator[Page], group_id: str) -> Iterator[tuple[str, Fields]]:
    """The entries of a group."""
    for page in pages:
        yield from (each for each in page if as_text(each[1].get(b"group_id", b"")) == group_id)


def entry_pages(
    connection: Connection, key: str, start: str = "-", *, back: bool = False, count: int = PAGE
) -> Iterator[Page]:
    """Entries of a stream by pages, the oldest first, or `back` from the newest.

    start: an entry, `(<id>` = those beyond this one, `-` = all, `+` = all back.
    """
    read, end = (connection.scripts.xrevrange, "-") if back else (connection.scripts.xrange, "+")
    while True:
        page: Any = read(key, start, end, count)
        if page:
            yield [(entry.decode(), fields) for entry, fields in page]
        if len(page) < count or page[-1][0] == LAST_ID.encode():
            return
        start = f"({page[-1][0].decode()}"


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
                scores[name[6:].decode()] = StoredScore.model_validate_json(value).model_dump()
    role, size, _, opened_ms, epoch, version, source = head
    fields = {
        b"group_id": group_id.encode(),
        b"head": b" ".join((size, b"0", opened_ms, epoch, version, b"open", source)),
        b"payloads": b"\n".join(lines),
        b"tables": tables,
        b"scores": json.dumps(scores).encode(),
    }
    (group,) = _seen(shard.index, "open", [("", fields)])
    group.slots, group.round = as_text(stored.get(b"slots", b""), 8192), _text(stored.get(b"round"))
    group.detail = "evaluation" if role == b"eval" else ""
    return group


def _waiting(shard: Shard, page: Page, owners: Fields) -> Iterator[SeenGroup]:
    for group in _seen(shard.index, "waiting", page):
        group.batch = as_int(owners.get(group.entry.encode(), b"").partition(b"-")[0])
        yield group


class KeptEntry(NamedTuple):
    """An entry of the stream `kept` as it stands there."""

    shard: int
    id: str
    fields: Fields

    @property
    def group_id(self) -> str:
        return as_text(self.fields.get(b"group_id", b""))

    def seen(self) -> SeenGroup:
        """Its group, as people look at it."""
        (group,) = _seen(self.shard, "kept", [(self.id, self.fields)])
        return group


def kept_entries(shard: Shard) -> Iterator[KeptEntry]:
    """The entries of a shard's stream `kept`, the oldest first."""
    for page in entry_pages(shard.connection, shard.keys.kept):
        for entry, fields in page:
            yield KeptEntry(shard.index, entry, fields)


def _dead_group(shard: Shard, group_id: str) -> SeenGroup | None:
    stored: Any = shard.connection.scripts.hgetall(shard.keys.dead_group(group_id))
    if b"reason" not in stored:
        return None
    fields = {name.removeprefix(b"log:"): value for name, value in stored.items()}
    (group,) = _seen(shard.index, "dead", [("", {**fields, b"group_id": group_id.encode()})])
    group.outcome = f"dead:{as_text(stored[b'reason'])}"
    return group


def _seen(shard: int, where: Where, page: Page) -> list[SeenGroup]:
    """Groups from the fields of their entries in a log."""
    groups, found = list[SeenGroup](), list[tuple[SeenGroup, StoredMembers]]()
    for entry, fields in page:
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
        groups.append(group)
        if b"naming" in fields:
            k, _, drop_after = as_text(fields[b"naming"]).partition(" ")
            group.naming = as_count(k), as_int(drop_after)
        try:
            group.record = _parse_record(fields.get(b"record", b"{}"))
            group.left_out = _INDICES.validate_json(fields.get(b"left_out", b"[]"))
            text = fields.get(b"payloads", b"").decode()
            lines, group.columns = payload_lines(text, "") if text else ([], [])
            tables = cut_tables(fields.get(b"tables", b""))
            if lines or tables:
                found.append((group, StoredMembers(lines, tables, fields.get(b"scores", b"{}"))))
            group.results = unpack_results(fields[b"results"]) if b"results" in fields else ()
            group.late = unpack_late(fields.get(b"late", b""))
        except (WireError, ValueError, RecursionError) as error:
            group.problem = first_problem(error) if isinstance(error, ValueError) else str(error)
    read_in_halves(found, _fill_in)
    return groups


def _fill_in(
    groups: Sequence[tuple[SeenGroup, StoredMembers]], _: Members, packets: Sequence[StoredPacket]
) -> None:
    """Give each group its packets and members."""
    following = iter(packets)
    for group, stored in groups:
        own = list(islice(following, len(stored.lines)))
        members = with_scores(Members.concat([packet.members for packet in own]), stored.scores)
        references = references_of(members, repeat((group.group_id, group.data_source), len(members)))
        mask = "".join([line.mask for line in stored.lines])
        counting = [
            each.rollout_index for each, counts in zip(references, mask, strict=True) if counts == "1"
        ]
        group.packets, group.counting = own, frozenset(counting)
        group.members = sorted(references, key=lambda member: member.rollout_index)


def _text(value: bytes | None) -> str | None:
    return as_text(value) if value else None
