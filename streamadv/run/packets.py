"""Reads a packet from an entry of the rollouts stream or of a scorer's stream.

Producers may write these streams, so every stage checks an entry before it uses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import WireError
from ..messages import brief
from ..store.keys import ShardKeys
from ..trajectory.packet import MAX_PACKET_MEMBERS
from ..trajectory.schema import MAX_GROUP_SIZE, Role
from .run import Run

#: Fields of an entry, as `lua/lib/append.lua` writes them.
PACKET_FIELDS: Final = (b"group_id", b"payload", b"bytes", b"epoch", b"members", b"table")
USABLE: Final = "usable"
#: Most a run may allow for `max_trajectory_bytes`.
MAX_BYTES: Final = 1 << 30

_SPACE: Final = re.compile(r"\s")
_GROUP_ID: Final = re.compile(r"[^\s\x00-\x1f}]{1,200}")  # see `trajectory.fields.GroupId`
_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,9}")
_EPOCH: Final = re.compile(rb"0|[1-9][0-9]{0,14}")
_KIND: Final = "usable|unscorable|failed|aborted|cancelled"
_LINE: Final = (
    rf"(?:0|[1-9][0-9]{{0,3}}) (?:{_KIND}) (?:-|-?[0-9][-+.e0-9]{{0,29}}) (?:train|baseline|eval)\n"
)
_MEMBERS: Final = re.compile(f"(?:{_LINE}){{1,{MAX_PACKET_MEMBERS}}}".encode())


class MemberLine(NamedTuple):
    """A member of a packet as scripts read it."""

    rollout_index: int
    kind: str  # usable, or why its slot ended: failed, aborted, cancelled, unscorable
    reward: float | None  # None = none yet, or none at all
    role: str


class StreamPacket(NamedTuple):
    """A packet as an entry of a stream tells of it."""

    group_id: str
    payload: str  # its key; '' = none, and no member is usable
    members: list[MemberLine]


def read_packet(run: Run, shard: int, fields: Mapping[bytes, bytes]) -> StreamPacket:
    """The packet of an entry with these fields. Raises WireError if they are none."""
    try:
        group, key, size, epoch, members, _ = [fields[name] for name in PACKET_FIELDS]
        packet = StreamPacket(group.decode(), key.decode(), parse_members(members))
    except KeyError as error:
        raise WireError(f"{error.args[0].decode()} is missing") from None
    except UnicodeDecodeError:
        raise WireError("group_id or payload is no UTF-8") from None
    if problem := _problem(run, shard, packet, size, epoch):
        raise WireError(problem)
    return packet


def _problem(run: Run, shard: int, packet: StreamPacket, size: bytes, epoch: bytes) -> str | None:
    group_id, payload, members = packet
    if not is_group_id(group_id) or run.keys.shard_of(group_id) != shard:
        return f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}"
    if not _NUMBER.fullmatch(size) or int(size) > MAX_BYTES:
        return f"bytes is {brief(size)}, needs 0..{MAX_BYTES}"
    if not _EPOCH.fullmatch(epoch):
        return f"epoch is {brief(epoch)}, needs a fencing epoch"
    if not payload:
        has_data = size != b"0" or any(member.kind == USABLE for member in members)
        return "payload is missing, needs its key" if has_data else None
    if not is_payload_key(run.keys.shard(shard), payload):
        return f"payload is {brief(payload)}, needs the key of a payload"
    return "bytes is 0, needs the size of a payload" if size == b"0" else None


def parse_members(text: bytes) -> list[MemberLine]:
    """The members of a packet. Raises WireError for what no producer pushes."""
    if not _MEMBERS.fullmatch(text):
        raise WireError(
            f"members is {brief(text)}, needs 1..{MAX_PACKET_MEMBERS} lines: index kind reward role"
        )
    words, before = text.decode().split(), -1
    try:
        rewards = [None if word == "-" else float(word) for word in words[2::4]]
    except ValueError as error:
        raise WireError(f"members has a reward that is no number: {error}") from None
    members = list(map(MemberLine, map(int, words[::4]), words[1::4], rewards, words[3::4]))
    for index, _, reward, _ in members:
        if not before < index < 2 * MAX_GROUP_SIZE:
            raise WireError(f"members has the index {index}, needs 0..{2 * MAX_GROUP_SIZE - 1}, ascending")
        if reward is not None and not math.isfinite(reward):
            raise WireError(f"members has the reward {reward}, needs a finite number")
        before = index
    return members


def rewards_of_whole(members: Sequence[MemberLine]) -> list[float]:
    """The rewards of a group without its baselines; [] unless these are all its members, each usable and rewarded."""
    rewards = []
    for position, (index, kind, reward, role) in enumerate(members):
        if index != position or kind != USABLE or reward is None or role == Role.EVAL:
            return []
        if role != Role.BASELINE:
            rewards.append(reward)
    return rewards


def is_group_id(text: str) -> bool:
    """Whether a group can have this id."""
    return _GROUP_ID.fullmatch(text) is not None


def is_payload_key(keys: ShardKeys, key: str) -> bool:
    """Whether `key` may name a payload of the shard: others must never be deleted as one."""
    return key.startswith(keys.payload("")) and not _SPACE.search(key)
