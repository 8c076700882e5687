"""Dead letters: groups that could not be computed, kept with the reason until somebody decides about them.

The unit is the group. Payloads are kept within the run's `dead_bytes`; above it the oldest dead group loses its
payloads and its members (it stays listed and counted), above DEAD_KEPT groups it is forgotten. Foreign data that was
removed is listed with the groups, under the place where it stood; it cannot be requeued.

Foreign data are items in a run's keys that no process of the run has written. A process that finds such an item removes
it in one script, which counts it as `malformed` and lists it with the reason (`reject`). The item is not a trajectory,
so the other counters of the ledger do not change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ..errors import StreamadvError
from ..messages import log_fields, one_line
from ..store.replies import as_count, replies_of
from ..trajectory.member_table import cut_tables, list_table
from .run import Run, Shard

logger = logging.getLogger(__name__)

#: Dead groups listed in a shard; beyond it the oldest are forgotten, emptied ones first.
DEAD_KEPT: Final = 10_000
EMPTY_COUNT: Final = 100
#: The reason of foreign data that was removed.
MALFORMED: Final = "malformed"


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """One dead letter."""

    group_id: str
    reason: str
    detail: str
    trajectories: int
    bytes: int
    emptied: bool  # its payloads were deleted: it cannot be requeued
    age_s: float
    data_source: str | None
    members: tuple[dict[str, Any], ...]  # as JSON objects: each trajectory, or why a packet cannot be read
    text: str = ""  # of foreign data: what was removed


def list_dead(run: Run) -> Iterator[DeadGroup]:
    """All dead groups, oldest first in each shard, and then what was removed from it as malformed."""
    now_ms = run.now_ms()
    for shard in run.shards:
        letters: Any = shard.connection.scripts.zrange(shard.keys.dead, 0, -1, withscores=True)
        for member, when_ms in sorted(letters, key=lambda letter: abs(letter[1])):
            if dead_group := _read(shard, member.decode(errors="replace"), now_ms - abs(when_ms)):
                yield dead_group
        for _, removed in list_malformed(shard, now_ms):
            yield removed


def show_dead(run: Run, group_id: str) -> DeadGroup:
    """One dead group. Raises StreamadvError when there is none of that id."""
    shard, now_ms = run.shard_of(group_id), run.now_ms()
    when_ms: Any = shard.connection.scripts.zscore(shard.keys.dead, group_id)
    if when_ms is not None and (dead_group := _read(shard, group_id, now_ms - abs(when_ms))):
        return dead_group
    for shard in run.shards:
        for _, removed in list_malformed(shard, now_ms):
            if removed.group_id == group_id:
                return removed
    raise StreamadvError(
        f"group {group_id!r} is no dead letter of run {run.name}: see `streamadv dead list --run {run.name}`"
    )


def requeue(run: Run, group_id: str) -> int:
    """Put a dead group back into the groups log, whole. Returns its number of trajectories.

    Raises StreamadvError when it has no payloads any more, or is no group.
    """
    count: int = run.shard_of(group_id).call("requeue", [group_id], dead_group=group_id)
    if count == -1:
        raise StreamadvError(f"group {group_id!r} has lost its payloads (dead_bytes): it cannot be requeued")
    if count == 0 and show_dead(run, group_id).reason == MALFORMED:
        raise StreamadvError(f"{group_id!r} is no group and cannot be requeued: show it, or purge it")
    return count


def purge(run: Run, group_id: str) -> None:
    """Forget a dead group and delete its payloads; the ledger goes on counting it as dead.

    Raises StreamadvError when there is none of that id.
    """
    if show_dead(run, group_id).reason == MALFORMED:
        for shard in run.shards:
            for note, removed in list_malformed(shard, 0):
                if removed.group_id == group_id:
                    shard.connection.scripts.xdel(shard.keys.malformed, note)
        return
    _empty(run.shard_of(group_id), "purge", [group_id.encode()])


def trim_dead(shard: Shard, dead_bytes: int) -> None:
    """Forget the oldest dead groups beyond DEAD_KEPT; of others the oldest lose their payloads beyond `dead_bytes`."""
    scripts: Any = shard.connection.scripts
    keys = shard.keys
    while (surplus := scripts.zcard(keys.dead) - DEAD_KEPT) > 0:
        count = min(surplus, EMPTY_COUNT)
        oldest = scripts.zrange(keys.dead, "(0", "-inf", desc=True, byscore=True, offset=0, num=count)
        oldest = oldest or scripts.zrange(keys.dead, 0, count - 1)
        _empty(shard, "keep", oldest)
        _empty(shard, "purge", oldest)
    if as_count(scripts.hget(keys.ledger, "dead_bytes")) > dead_bytes:
        # Which ones the sizes of the letters say, not the ledger: producers can write it.
        letters = scripts.zrange(keys.dead, "0", "+inf", byscore=True)
        pipe = scripts.pipeline(transaction=False)
        for member in letters:
            pipe.hget(keys.dead_group(member.decode(errors="replace")), "bytes")
        sizes = list(map(as_count, replies_of(pipe)))
        kept, count = sum(sizes), 0
        while kept > dead_bytes:
            kept, count = kept - sizes[count], count + 1
        oldest = letters[:count]
        for start in range(0, len(oldest), EMPTY_COUNT):
            _empty(shard, "keep", oldest[start : start + EMPTY_COUNT], dead_bytes)


def _empty(shard: Shard, what: str, members: Sequence[bytes], dead_bytes: int = -1) -> None:
    """While they exceed `dead_bytes`: keep or delete the payloads of dead groups ('keep'), or forget all ('purge')."""
    while members:
        letters = [shard.keys.dead_group(member.decode(errors="replace")) for member in members]
        emptied: int = shard.call("empty_dead", [what, dead_bytes, *members], letters=letters)
        if not emptied:
            return
        members = members[emptied:]


def list_malformed(shard: Shard, now_ms: int) -> Iterator[tuple[bytes, DeadGroup]]:
    """What was removed from a shard, oldest first, each with the entry of its note; the last thousand are kept."""
    notes: Any = shard.connection.scripts.xrange(shard.keys.malformed)
    for note, stored in notes:
        place, item, detail, text = (
            stored.get(name, b"").decode(errors="backslashreplace")
            for name in (b"place", b"item", b"detail", b"text")
        )
        where, age_ms = one_line(f"{place}/{item}"), now_ms - int(note.partition(b"-")[0])
        age_s = round(max(0.0, age_ms / 1000), 1)
        yield note, DeadGroup(where, MALFORMED, detail, 0, 0, True, age_s, None, (), text)


def _read(shard: Shard, group_id: str, age_ms: float) -> DeadGroup | None:
    """The dead letter of a group; None where there is none, or something else."""
    stored: Any = shard.connection.scripts.hgetall(shard.keys.dead_group(group_id))
    fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in stored.items()}
    if not {"reason", "detail", "count", "bytes"} <= fields.keys():
        return None
    return DeadGroup(
        group_id=group_id,
        reason=fields["reason"],
        detail=fields["detail"],
        trajectories=as_count(fields["count"]),
        bytes=as_count(fields["bytes"]),
        emptied="emptied" in fields,
        age_s=round(max(0.0, age_ms / 1000), 1),
        data_source="".join(fields.get("log:head", "").split(" ", 6)[6:]) or None,
        members=tuple(_members_of(stored)),
    )


def _members_of(stored: Mapping[bytes, bytes]) -> Iterator[dict[str, Any]]:
    """The trajectories of a letter, packet by packet, as they stood in the groups log."""
    lines = stored.get(b"log:payloads", b"").decode(errors="backslashreplace").splitlines()
    tables = cut_tables(stored.get(b"log:tables", b""))
    scores: Any = None
    with suppress(ValueError):
        scores = json.loads(stored.get(b"log:scores", b""))
    for number, line in enumerate(lines):
        key, size, _, mask = [*line.split(" "), "", "", "", ""][:4]
        table = tables[number] if number < len(tables) else b""
        for position, member in enumerate(list_table(table, as_count(size))):
            late = scores.get(str(member.get("index"))) if isinstance(scores, dict) else None
            brought = late if isinstance(late, dict) and member.get("reward") is None else {}
            counts = {"counts": False} if mask[position : position + 1] == "0" else {}
            yield {"packet": key, **member, **brought, **counts}
    for table in tables[len(lines) :]:
        yield {"problem": f"{len(table)} bytes of member tables belong to no packet"}


#: How an item is removed from the structures that are no streams.
REMOVALS: Final = {
    "batches": "HDEL",
    "producers": "HDEL",
    "open": "ZREM",
    "garbage": "LREM",
    "scored": "LREM",
}
#: Fields of stream entries with member tables. The size of their payloads is not judged here.
TABLES: Final = (b"table", b"tables")
TABLE_BYTES: Final = 1 << 14  # longer ones are not read
ANY_SIZE: Final = 1 << 62
#: Characters of a removed item that are kept for operators.
TEXT_CHARS: Final = 2000


def reject(
    shard: Shard,
    key: str,
    item: str | bytes,
    problem: str,
    fields: Mapping[bytes, bytes] | None = None,
    *,
    stage: str = "",
) -> None:
    """Remove an item (entry id, field or member) of the structure at `key`; list it with `problem` and its `fields`.

    `stage` is the consumer group that has read the entry, if one has.
    """
    place = key.partition("}:")[2]
    problem = one_line(problem)
    shown = dict[str, Any]()
    for name, value in list((fields or {}).items())[:20]:
        seen: Any = value[:200]
        if name in TABLES and 0 < len(value) <= TABLE_BYTES:  # in words, or why they are none
            seen = [member for table in cut_tables(value) for member in list_table(table, ANY_SIZE)]
        shown[name.decode(errors="backslashreplace")[:100]] = seen
    text = repr(shown)[:TEXT_CHARS]
    args = [REMOVALS.get(place, "XDEL"), stage, item, place, problem, text]
    if shard.call("reject", args, place=key):
        extra = log_fields("malformed_removed", run=shard.run, role=stage or None)
        logger.error("removed from %s: %s", place, problem, extra=extra)
