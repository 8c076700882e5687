"""Encodes pushes: packets of groups of one shard, in calls of a size that the server can take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from .. import doors
from ..store.exchange import Payloads
from ..store.keys import ShardKeys
from ..store.scripts import ScriptCall, script_call
from ..trajectory.packet import Packet
from ..trajectory.packet_encoding import merge_packets

Item = TypeVar("Item")
Reply = Sequence[Any]

#: Largest part of a push sent in one MULTI, which holds the server up for some 3 ms. A packet may exceed the bytes.
MAX_SLICE_PACKETS: Final = 64
MAX_SLICE_MEMBERS: Final = 128
MAX_SLICE_BYTES: Final = 4 << 20


class Load(NamedTuple):
    """What one call brings."""

    packets: int
    members: int
    size: int  # bytes of payloads and member tables


def load_of(packet: Packet) -> Load:
    """Of one packet."""
    return Load(1, len(packet.indices), packet.size + len(packet.table))


class GroupPush(NamedTuple):
    """Packets of a group, as one call of the push script takes them."""

    spec: tuple[Any, ...]  # see lua/lib/enter.lua
    epoch: int  # of the ticket
    packets: Sequence[Packet]


class Push(NamedTuple):
    """Packets of groups of one shard, to be sent together: each call of `transaction` makes another attempt.

    Packets without payloads too go by the client that `ServerIds` asks: another client may still reach a former
    primary, and what that acknowledges is lost.
    """

    keys: ShardKeys
    scorer: str  # whose stream takes what has no reward yet; "" = the run has none
    limits: tuple[Any, ...]  # producer, and those of lua/lib/admit.lua
    groups: Sequence[GroupPush]

    @property
    def lane(self) -> tuple[Any, ...]:
        """Equal for pushes that may go together."""
        return self.keys, self.scorer, self.limits

    @property
    def load(self) -> Load:
        """Of all its packets."""
        loads = [load_of(packet) for group in self.groups for packet in group.packets]
        return Load(*map(sum, zip(*loads, strict=True)))

    def transaction(self) -> tuple[Payloads, ScriptCall]:
        """The payloads and the call that registers them. Never to be sent twice."""
        args = [*self.limits, "1" if self.scorer else "0", len(self.groups)]
        payloads = []
        for group in self.groups:
            args += [*group.spec, group.epoch, len(group.packets)]
            for packet in group.packets:
                key = ""
                if packet.size:
                    # A new key for each attempt: the server may have registered one whose reply was lost.
                    key = self.keys.payload(doors.random_bytes(12).hex())
                    payloads.append((key, packet.fields))
                indices = packet.indices
                is_gapless = indices[-1] - indices[0] == len(indices) - 1
                args += [len(indices), indices[0] if is_gapless else "", key]
                args += [packet.size, packet.members, packet.table]
        hashes = [self.keys.group(group.spec[0]) for group in self.groups]
        call = script_call(
            "push",
            self.keys,
            args,
            scorer=self.keys.scoring(self.scorer) if self.scorer else self.keys.void,
            group_hashes=hashes,
            payloads=[key for key, _ in payloads],
        )
        return payloads, call


def join(pushes: Sequence[Push]) -> Push:
    """Pushes of one lane as one, which has each group once, in as few packets as its members allow."""
    if len(pushes) == 1:
        return pushes[0]
    packets: dict[tuple[tuple[Any, ...], int], list[Packet]] = {}
    for push in pushes:
        for group in push.groups:
            packets.setdefault((group.spec, group.epoch), []).extend(group.packets)
    groups = [GroupPush(spec, epoch, merge_packets(found)) for (spec, epoch), found in packets.items()]
    return pushes[0]._replace(groups=groups)


def shares(pushes: Sequence[Push], joined: Push, replies: Sequence[Reply]) -> list[list[Reply]]:
    """What the replies to `joined`, made by `join(pushes)`, say to each of them: a reply for each of its groups."""
    if len(pushes) == 1:
        return [list(replies)]
    found: dict[tuple[tuple[Any, ...], int], tuple[Reply, dict[int, list[Any]]]] = {}
    for group, reply in zip(joined.groups, replies, strict=True):
        codes: dict[int, list[Any]] = {}  # by rollout index
        if len(reply) > 1 and reply[0] == b"ok":
            for index, code in zip(_indices(group.packets), reply[1:], strict=True):
                codes.setdefault(index, []).append(code)
        found[group.spec, group.epoch] = reply, codes
    return [[_share(group, *found[group.spec, group.epoch]) for group in push.groups] for push in pushes]


def _share(group: GroupPush, reply: Reply, codes: dict[int, list[Any]]) -> Reply:
    return [reply[0], *(codes[index].pop(0) for index in _indices(group.packets))] if codes else reply


def _indices(packets: Sequence[Packet]) -> Iterator[int]:
    return chain.from_iterable([packet.indices for packet in packets])


def slices(items: Iterable[Item], load: Callable[[Item], Load]) -> list[list[Item]]:
    """All items in parts that one call may bring."""
    queue = deque(items)
    if len(queue) == 1:
        return [list(queue)]
    parts = []
    while queue:
        parts.append(take_slice(queue, load))
    return parts


def take_slice(queue: deque[Item], load: Callable[[Item], Load]) -> list[Item]:
    """Remove the first items, as much as the MAX_SLICE constants allow; one item may exceed them."""
    taken: list[Item] = []
    packets = members = size = 0
    while queue:
        more = load(queue[0])
        packets, members, size = packets + more.packets, members + more.members, size + more.size
        if taken and (packets > MAX_SLICE_PACKETS or members > MAX_SLICE_MEMBERS or size > MAX_SLICE_BYTES):
            break
        taken.append(queue.popleft())
    return taken
