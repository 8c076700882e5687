"""Dead letters: groups that could not be computed, kept with the reason until somebody decides about them.

The unit is the group. Payloads are kept within the run's `dead_bytes`; above it the oldest dead group loses its
payloads and what is known of its members (it stays listed and counted), above DEAD_KEPT groups it is forgotten. What
was removed because nobody of the run had written it (`malformed.py`) is listed with them, under the place where it
stood; it cannot be requeued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import StreamadvError
from ..store.keys import ShardKeys
from ..store.replies import as_count
from .malformed import Malformed, list_malformed
from .run import Run

#: Dead groups known of in a shard; beyond it the oldest are forgotten, emptied ones first.
DEAD_KEPT: Final = 10_000
EMPTY_COUNT: Final = 100
#: The reason of what was removed.
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
    members: str  # references as JSON, as they stood in the groups log


def list_dead(run: Run) -> Iterator[DeadGroup]:
    """All dead groups, oldest first in each shard."""
    now_ms = run.now_ms()
    for keys in run.keys.shards:
        entries: Any = run.connection.scripts.zrange(keys.dead, 0, -1, withscores=True)
        for member, when_ms in sorted(entries, key=lambda entry: abs(entry[1])):
            found = _read(run, keys, member.decode(errors="replace"), now_ms - abs(when_ms))
            if found is not None:
                yield found
        for item in list_malformed(run, keys):
            yield _removed(item, now_ms)


def show_dead(run: Run, group_id: str) -> DeadGroup:
    """One dead group. Raises StreamadvError when there is none of that id."""
    keys = _keys(run, group_id)
    when_ms = run.connection.scripts.zscore(keys.dead, group_id)
    now_ms = run.now_ms()
    found = None if when_ms is None else _read(run, keys, group_id, now_ms - abs(float(when_ms)))
    if found is None:
        found = next((_removed(item, now_ms) for _, item in _find_malformed(run, group_id)), None)
    if found is None:
        raise StreamadvError(
            f"group {group_id!r} is no dead letter of run {run.name}: see `streamadv dead list`"
        )
    return found


def requeue(run: Run, group_id: str) -> int:
    """Put a dead group back into the groups log, whole. Returns its number of trajectories."""
    count: int = run.shard_of(group_id).call("requeue", [group_id], dead_group=group_id)
    if count == -1:
        raise StreamadvError(f"group {group_id!r} has lost its payloads (dead_bytes): it cannot be requeued")
    if count == 0 and show_dead(run, group_id).reason == MALFORMED:
        raise StreamadvError(f"{group_id!r} is no group and cannot be requeued: show it, or purge it")
    return count


def purge(run: Run, group_id: str) -> None:
    """Forget a dead group and delete its payloads; the ledger goes on counting it as dead."""
    if show_dead(run, group_id).reason == MALFORMED:
        for keys, item in _find_malformed(run, group_id):
            run.connection.scripts.xdel(keys.malformed, item.note)
        return
    _empty(run, _keys(run, group_id), "purge", [group_id.encode()])


def trim_dead(run: Run, keys: ShardKeys) -> None:
    """Forget the oldest dead groups beyond DEAD_KEPT; of others the oldest lose their payloads beyond `dead_bytes`."""
    scripts: Any = run.connection.scripts
    while (surplus := scripts.zcard(keys.dead) - DEAD_KEPT) > 0:
        count = min(surplus, EMPTY_COUNT)
        oldest = scripts.zrange(keys.dead, "(0", "-inf", desc=True, byscore=True, offset=0, num=count)
        oldest = oldest or scripts.zrange(keys.dead, 0, count - 1)
        _empty(run, keys, "purge", oldest)
    limit = run.manifest.dead_bytes
    while as_count(scripts.hget(keys.ledger, "dead_bytes")) > limit:
        oldest = scripts.zrange(keys.dead, "0", "+inf", byscore=True, offset=0, num=EMPTY_COUNT)
        if not oldest:
            return
        _empty(run, keys, "keep", oldest, limit)


def _empty(run: Run, keys: ShardKeys, what: str, members: Sequence[bytes], limit: int = -1) -> None:
    """Go through dead groups as long as `limit` bytes are exceeded."""
    ids = [(member, keys.dead_group(member.decode(errors="replace"))) for member in members]
    while ids:
        names = [keys.void, keys.ledger, keys.dead, keys.garbage, *[name for _, name in ids]]
        dealt: int = run.call("empty_dead", names, [what, limit, *[member for member, _ in ids]])
        if not dealt:
            return
        ids = ids[dealt:]


def _find_malformed(run: Run, place: str) -> list[tuple[ShardKeys, Malformed]]:
    return [
        (keys, item) for keys in run.keys.shards for item in list_malformed(run, keys) if item.id == place
    ]


def _removed(item: Malformed, now_ms: int) -> DeadGroup:
    return DeadGroup(
        group_id=item.id,
        reason=MALFORMED,
        detail=item.detail,
        trajectories=0,
        bytes=0,
        emptied=True,
        age_s=_seconds(now_ms - item.when_ms),
        data_source=None,
        members=item.text,
    )


def _seconds(age_ms: float) -> float:
    return round(max(0.0, age_ms / 1000), 1)


def _keys(run: Run, group_id: str) -> ShardKeys:
    return run.keys.shard(run.keys.shard_of(group_id))


def _read(run: Run, keys: ShardKeys, group_id: str, age_ms: float) -> DeadGroup | None:
    stored: Any = run.connection.scripts.hgetall(keys.dead_group(group_id))
    if not stored:
        return None
    fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in stored.items()}
    if not {"reason", "detail", "count", "bytes"} <= fields.keys():
        return None  # nobody of the run has written it
    return DeadGroup(
        group_id=group_id,
        reason=fields["reason"],
        detail=fields["detail"],
        trajectories=as_count(fields["count"]),
        bytes=as_count(fields["bytes"]),
        emptied="emptied" in fields,
        age_s=_seconds(age_ms),
        data_source=fields.get("log:data_source") or None,
        members=fields.get("log:members", "[]"),
    )
