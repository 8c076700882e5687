"""Packets: what an entry of the rollouts stream, or of a scorer's stream, says of one.

Producers may write these streams, so every stage checks an entry before it uses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from ..messages import brief
from ..store.keys import ShardKeys
from ..trajectory.packet import MAX_PACKET_MEMBERS
from ..trajectory.schema import MAX_GROUP_SIZE
from .run import Run

#: Fields of an entry, as `lua/lib/append.lua` writes them.
PACKET_FIELDS: Final = ("group_id", "payload", "bytes", "epoch", "members", "table")
_PACKET_FIELDS: Final = frozenset(PACKET_FIELDS)
USABLE: Final = "usable"
#: Most a run may allow for `max_trajectory_bytes`.
MAX_BYTES: Final = 1 << 30

_SPACE: Final = re.compile(r"\s")
_GROUP_ID: Final = re.compile(r"[^\s\x00-\x1f]{1,200}")
_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,9}")
_EPOCH: Final = re.compile(rb"0|[1-9][0-9]{0,14}")
_KIND: Final = "usable|unscorable|failed|aborted|cancelled"
_LINE: Final = (
    rf"(?:0|[1-9][0-9]{{0,3}}) (?:{_KIND}) (?:-|-?[0-9][-+.e0-9]{{0,29}}) (?:train|baseline|eval)\n"
)
_MEMBERS: Final = re.compile(f"(?:{_LINE}){{1,{MAX_PACKET_MEMBERS}}}")


class MemberLine(NamedTuple):
    """A member of a packet as scripts read it."""

    rollout_index: int
    kind: str  # usable, or why its slot ended: failed, aborted, cancelled, unscorable
    reward: float | None  # None = none yet, or none at all
    role: str


def parse_members(text: bytes) -> list[MemberLine]:
    """The members of a packet. Raises ValueError for what no producer pushes."""
    words = _checked_words(text)
    rewards = [None if word == "-" else float(word) for word in words[2::4]]
    return list(map(MemberLine, map(int, words[::4]), words[1::4], rewards, words[3::4]))


def _checked_words(text: bytes) -> list[str]:
    """The words of the members of a packet, four of each. Raises ValueError for what no producer pushes."""
    decoded = text.decode("ascii")
    if not _MEMBERS.fullmatch(decoded):
        raise ValueError(
            f"members is {brief(text)}, needs 1..{MAX_PACKET_MEMBERS} lines: index kind reward role"
        )
    words = decoded.split()
    for before, index in pairwise([-1, *map(int, words[::4])]):
        if not before < index < 2 * MAX_GROUP_SIZE:
            raise ValueError(f"members has the index {index}, needs 0..{2 * MAX_GROUP_SIZE - 1}, ascending")
    for word in words[2::4]:
        if word != "-" and not math.isfinite(float(word)):
            raise ValueError(f"members has the reward {float(word)}, needs a finite number")
    return words


def whole_group(text: bytes) -> bytes:
    """If these members are all of a group, each usable and with its reward: the rewards of those that are no baselines.

    They are separated by blanks; b"" otherwise. text: the members of packets without a problem, one behind the other.
    """
    words = text.split()
    size, rewards, roles = len(words) // 4, words[2::4], words[3::4]
    if words[::4] != [b"%d" % index for index in range(size)] or words[1::4].count(b"usable") < size:
        return b""
    if b"-" in rewards or b"eval" in roles:
        return b""
    if b"baseline" in roles:
        rewards = [reward for reward, role in zip(rewards, roles, strict=True) if role != b"baseline"]
    return b" ".join(rewards)


def packet_problem(run: Run, shard: int, fields: Mapping[str, bytes]) -> str | None:
    """Why the fields of an entry are no packet, or None if they are one."""
    if not fields.keys() >= _PACKET_FIELDS:
        return f"{next(name for name in PACKET_FIELDS if name not in fields)} is missing"
    try:
        group_id, payload = fields["group_id"].decode(), fields["payload"].decode()
    except UnicodeDecodeError:
        return "group_id or payload is no UTF-8"
    keys = run.keys.shard(shard)
    if not _GROUP_ID.fullmatch(group_id) or run.keys.shard_of(group_id) != shard:
        return f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}"
    if not _NUMBER.fullmatch(fields["bytes"]) or int(fields["bytes"]) > MAX_BYTES:
        return f"bytes is {brief(fields['bytes'])}, needs 0..{MAX_BYTES}"
    if not _EPOCH.fullmatch(fields["epoch"]):
        return f"epoch is {brief(fields['epoch'])}, needs a fencing epoch"
    try:
        words = _checked_words(fields["members"])
    except ValueError as error:
        return str(error)
    if not payload:
        has_data = fields["bytes"] != b"0" or USABLE in words
        return "payload is missing, needs its key" if has_data else None
    if not is_payload_key(keys, payload):
        return f"payload is {brief(payload)}, needs the key of a payload"
    return "bytes is 0, needs the size of a payload" if fields["bytes"] == b"0" else None


def is_payload_key(keys: ShardKeys, key: str) -> bool:
    """Whether `key` may name a payload of the shard: others must never be deleted as one."""
    return key.startswith(keys.payload("")) and not _SPACE.search(key)
