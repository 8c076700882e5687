"""Foreign data: items in a run's keys that none of its processes wrote.

Whoever finds one removes it in one script, which counts it as `malformed` and lists it with the reason among the dead
letters. It is no trajectory, so the other counters of the ledger do not change.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..messages import brief, log_fields, one_line
from ..store.keys import ShardKeys
from ..trajectory.schema import MAX_GROUP_SIZE, Role
from .consumer import Entry
from .run import Run

logger = logging.getLogger(__name__)

#: Fields of a record in the rollouts stream and the scorers' streams, as `lua/group/push.lua` writes them.
RECORD_FIELDS: Final = ("group_id", "index", "kind", "reward", "bytes", "key", "role", "reference")
_RECORD_FIELDS: Final = frozenset(RECORD_FIELDS)
KINDS: Final = frozenset([b"usable", b"unscorable", b"failed", b"aborted", b"cancelled"])
ROLES: Final = frozenset(role.encode() for role in Role)
#: Most a run may allow for `max_trajectory_bytes`.
MAX_BYTES: Final = 1 << 30
#: How an item is removed from the structures that are no streams.
REMOVALS: Final = {
    "batches": "HDEL",
    "producers": "HDEL",
    "open": "ZREM",
    "garbage": "LREM",
    "scored": "LREM",
}
#: Of a removed item, so much is kept to look at.
TEXT_CHARS: Final = 2000

_SPACE: Final = re.compile(r"\s")
_GROUP_ID: Final = re.compile(r"[^\s\x00-\x1f]{1,200}")
_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class Malformed:
    """Something that was removed."""

    id: str  # '<place>/<item>': where it stood
    note: str  # id of the note itself
    detail: str
    text: str
    when_ms: int


def record_problem(run: Run, shard: int, fields: Mapping[str, bytes]) -> str | None:
    """Why the fields of an entry are no record of a trajectory, or None if they are one."""
    if not fields.keys() >= _RECORD_FIELDS:
        return f"{next(name for name in RECORD_FIELDS if name not in fields)} is missing"
    try:
        group_id, key = fields["group_id"].decode(), fields["key"].decode()
    except UnicodeDecodeError:
        return "group_id or key is no UTF-8"
    keys = run.keys.shard(shard)
    if not _GROUP_ID.fullmatch(group_id) or run.keys.shard_of(group_id) != shard:
        return f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}"
    if not _NUMBER.fullmatch(fields["index"]) or int(fields["index"]) >= 2 * MAX_GROUP_SIZE:
        return f"index is {brief(fields['index'])}, needs 0..{2 * MAX_GROUP_SIZE - 1}"
    if fields["kind"] not in KINDS:
        return f"kind is {brief(fields['kind'])}, needs one of {', '.join(sorted(map(bytes.decode, KINDS)))}"
    if fields["role"] not in ROLES:
        return f"role is {brief(fields['role'])}, needs train or baseline"
    if fields["reward"] and not _is_finite(fields["reward"]):
        return f"reward is {brief(fields['reward'])}, needs a finite number"
    if not _NUMBER.fullmatch(fields["bytes"]) or int(fields["bytes"]) > MAX_BYTES:
        return f"bytes is {brief(fields['bytes'])}, needs 0..{MAX_BYTES}"
    if fields["bytes"] == b"0":
        return "bytes is 0, needs the size of a payload" if fields["kind"] == b"usable" else None
    if not is_payload_key(keys, key):
        return f"key is {brief(key)}, needs the key of a payload"
    return None


def is_payload_key(keys: ShardKeys, key: str) -> bool:
    """Whether `key` may name a payload of the shard: others must never be deleted as one."""
    return key.startswith(keys.payload("")) and not _SPACE.search(key)


def reject_entry(run: Run, entry: Entry, stream: str, problem: str, stage: str = "") -> None:
    """Remove an entry of a stream; `stage` is the consumer group that has read it, if one has."""
    reject(run, run.keys.shard(entry.shard), stream, entry.id, problem, entry.fields, stage=stage)


def reject(
    run: Run,
    keys: ShardKeys,
    key: str,
    item: str | bytes,
    problem: str,
    fields: Mapping[str, bytes] | None = None,
    *,
    stage: str = "",
) -> None:
    """Remove an item (entry id, field or member) of the structure at `key`, list it with `problem` and its `fields`."""
    place = key.partition("}:")[2]
    problem = one_line(problem)
    text = repr({name[:100]: value[:200] for name, value in list((fields or {}).items())[:20]})[:TEXT_CHARS]
    names = [keys.void, keys.ledger, keys.malformed, key]
    if run.call("reject", names, [REMOVALS.get(place, "XDEL"), stage, item, place, problem, text]):
        logger.error(
            "removed from %s: %s", place, problem, extra=log_fields("malformed_removed", run=run.name)
        )


def list_malformed(run: Run, keys: ShardKeys) -> Iterator[Malformed]:
    """What was removed from a shard, oldest first; the last thousand are kept."""
    entries: Any = run.connection.scripts.xrange(keys.malformed)
    for entry, stored in entries:
        names = ("place", "item", "detail", "text")
        place, item, detail, text = (
            stored.get(name.encode(), b"").decode(errors="backslashreplace") for name in names
        )
        yield Malformed(
            id=one_line(f"{place}/{item}"),
            note=entry.decode(),
            detail=detail,
            text=text,
            when_ms=int(entry.partition(b"-")[0]),
        )


def _is_finite(text: bytes) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
