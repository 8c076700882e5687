"""Records: what an entry of the rollouts stream, or of a scorer's stream, says of one trajectory.

Producers may write these streams, so every stage checks a record before it uses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from ..messages import brief
from ..store.keys import ShardKeys
from ..trajectory.schema import MAX_GROUP_SIZE, Role
from .run import Run

#: Fields of a record, as `lua/group/push.lua` writes them.
RECORD_FIELDS: Final = ("group_id", "index", "kind", "reward", "bytes", "key", "role", "reference")
_RECORD_FIELDS: Final = frozenset(RECORD_FIELDS)
KINDS: Final = frozenset([b"usable", b"unscorable", b"failed", b"aborted", b"cancelled"])
ROLES: Final = frozenset(role.encode() for role in Role)
#: Most a run may allow for `max_trajectory_bytes`.
MAX_BYTES: Final = 1 << 30

_SPACE: Final = re.compile(r"\s")
_GROUP_ID: Final = re.compile(r"[^\s\x00-\x1f]{1,200}")
_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,9}")


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


def _is_finite(text: bytes) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
