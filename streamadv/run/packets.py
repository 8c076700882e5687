"""Reads a packet from an entry of the rollouts stream or of a scorer's stream, and fetches its columns.

Producers may write these streams, so every stage checks an entry before it uses it. Only the columns that a stage needs
are fetched, in slices that the server can buffer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import WireError
from ..messages import brief
from ..store.keys import ShardKeys
from ..store.replies import read_hashes
from ..trajectory.columns import HEADER, KNOWN_COLUMNS, Array
from ..trajectory.packet import (
    MAX_PACKET_MEMBERS,
    StoredPacket,
    check_column,
    decode_column,
    decode_entries,
    parse_header,
)
from ..trajectory.schema import MAX_GROUP_SIZE, Role
from .run import Run

#: Fields of an entry, as `lua/lib/append.lua` writes them.
PACKET_FIELDS: Final = (b"group_id", b"payload", b"bytes", b"epoch", b"members", b"table")
USABLE: Final = "usable"
#: Most a run may allow for `max_trajectory_bytes`.
MAX_BYTES: Final = 1 << 30
#: What a group can have as its id, see `trajectory.fields.GroupId`.
GROUP_ID: Final = re.compile(r"[^\s\x00-\x1f}]{1,200}")

_SPACE: Final = re.compile(r"\s")
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
    group_id, payload, lines = packet
    if not GROUP_ID.fullmatch(group_id) or run.keys.shard_of(group_id) != shard:
        raise WireError(f"group_id is {brief(group_id)}, needs the id of a group of shard {shard}")
    if not _NUMBER.fullmatch(size) or int(size) > MAX_BYTES:
        raise WireError(f"bytes is {brief(size)}, needs 0..{MAX_BYTES}")
    if not _EPOCH.fullmatch(epoch):
        raise WireError(f"epoch is {brief(epoch)}, needs a fencing epoch")
    if not payload and (size != b"0" or any(line.kind == USABLE for line in lines)):
        raise WireError("payload is missing, needs its key")
    if payload and not is_payload_key(run.keys.shards[shard], payload):
        raise WireError(f"payload is {brief(payload)}, needs the key of a payload")
    if payload and size == b"0":
        raise WireError("bytes is 0, needs the size of a payload")
    return packet


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


def is_payload_key(keys: ShardKeys, key: str) -> bool:
    """Whether `key` may name a payload of the shard: others must never be deleted as one."""
    return key.startswith(keys.payload("")) and not _SPACE.search(key)


#: Bytes of payload asked for before the reply is read: the server buffers all of it.
REPLY_BYTES: Final = 8 << 20


class FetchedPacket(NamedTuple):
    """What a payload holds: columns as arrays, rows of all members end to end, or why they cannot be read."""

    packet: StoredPacket
    columns: dict[str, Array]  # checked; views of the received bytes
    header: bytes = b""  # JSON, if it was asked for
    problem: str | None = None


def fetch_columns(
    run: Run, packets: Sequence[StoredPacket], names: Sequence[str] | None, *, header: bool = False
) -> Iterator[FetchedPacket]:
    """The named columns of each packet, as far as it has them (None = all), and its header if asked for.

    Asks for at most REPLY_BYTES before it reads the replies. A packet that cannot be read has a `problem`.
    """
    wanted = [
        packet.columns if names is None else [name for name in names if name in packet.columns]
        for packet in packets
    ]
    header = header or not all(wanted)  # a read names one field at least
    know_columns(run, wanted)
    pairs = zip(packets, wanted, strict=True)
    replies = fetch_replies(
        run, [(packet.key, packet.size, [HEADER, *names][not header :]) for packet, names in pairs]
    )
    for packet, columns, reply in zip(packets, wanted, replies, strict=True):
        decoded = {}
        try:
            text, raw_columns = split_reply(reply, header)
            if header:
                parse_header(text, packet.members)
            for name, raw in zip(columns, raw_columns, strict=True):
                decoded[name] = decode_column(packet, name, raw, run.manifest.columns)
                if name in KNOWN_COLUMNS:
                    check_column(packet, name, decoded[name])
            yield FetchedPacket(packet, decoded, text)
        except WireError as error:
            yield FetchedPacket(packet, {}, problem=str(error))


def fetch_replies(
    run: Run, hashes: Iterable[tuple[str, int, Iterable[str | bytes]]]
) -> Generator[Sequence[bytes | None] | None]:
    """The values of fields of hashes; None where the key holds something else.

    hashes: key, bytes and fields of each. Asks for at most REPLY_BYTES, or a larger hash alone, before it reads the
    replies.
    """
    commands, total = list[tuple[str | bytes, ...]](), 0
    for key, size, fields in hashes:
        if commands and total + size > REPLY_BYTES:
            yield from read_hashes(run.connection.scripts, commands)
            commands, total = [], 0
        commands.append(("HMGET", key, *fields))
        total += size
    if commands:
        yield from read_hashes(run.connection.scripts, commands)


def decode_own(run: Run, names: Sequence[str], reply: Sequence[bytes | None] | None) -> dict[str, Array]:
    """The columns `names` that a group has itself. Raises WireError if they cannot be read."""
    values = split_reply(reply, header=False)[1]
    return {
        name: decode_entries(name, value, run.manifest.columns)
        for name, value in zip(names, values, strict=True)
    }


def know_columns(run: Run, names: Iterable[Iterable[str]]) -> None:
    """Read the manifest again if one of these columns is unknown: somebody has registered it since."""
    if not set().union(*names) <= KNOWN_COLUMNS.keys() | run.manifest.columns.keys():
        run.refresh()


def split_reply(
    reply: Sequence[bytes | None] | None, header: bool = True
) -> tuple[bytes, Sequence[bytes | None]]:
    """Header (b"" if it was not asked for) and columns of a packet's payload. Raises WireError if it is gone."""
    if reply is None or (reply and all(value is None for value in reply)):
        raise WireError("payload is gone, or is no hash")
    if not header:
        return b"", reply
    if reply[0] is None:
        raise WireError("payload has no header field")
    return reply[0], reply[1:]
