"""What a push sends: packets of groups of one shard, in slices that the server can take."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..run.manifest import Manifest
from ..store.keys import ShardKeys
from ..store.scripts import script_call
from ..trajectory.packet import Packet
from .requests import Transaction

#: Largest part of a push sent in one MULTI. A packet may exceed the bytes.
MAX_SLICE_MEMBERS: Final = 128
MAX_SLICE_BYTES: Final = 4 << 20


class GroupPush(NamedTuple):
    """Packets of a group, as one call of the push script takes them."""

    spec: Sequence[Any]  # id, size, slots, data source, deadline (ms): see lua/lib/admit.lua
    epoch: int  # of the ticket
    packets: Sequence[Packet]


def push_call(
    manifest: Manifest, keys: ShardKeys, groups: Sequence[GroupPush], limits: Sequence[Any]
) -> Transaction:
    """One attempt to push packets of groups of one shard. limits: of their admission, see lua/lib/admit.lua.

    Packets without payloads too go by the client that `ServerIds` asks: another client may still reach a former
    primary, and what that acknowledges is lost.
    """
    scorer = keys.scoring(manifest.scorers[0]) if manifest.scorers else keys.void
    args = [*limits, "1" if manifest.scorers else "0", len(groups)]
    payloads = []
    for group in groups:
        args += [*group.spec, group.epoch, len(group.packets)]
        for packet in group.packets:
            key = ""
            if packet.size:
                # A new key for each attempt: the server may have registered one whose reply was lost.
                key = keys.payload(secrets.token_hex(12))
                payloads.append((key, packet.fields))
            args += [key, packet.size, packet.members, packet.table]
    hashes = [keys.group(group.spec[0]) for group in groups]
    call = script_call(
        "push", keys, args, scorer=scorer, group_hashes=hashes, payloads=[key for key, _ in payloads]
    )
    return Transaction(payloads, call)


def slices(packets: Sequence[Packet]) -> list[list[Packet]]:
    """Parts of at most MAX_SLICE_MEMBERS members and MAX_SLICE_BYTES bytes (one packet may exceed it)."""
    parts: list[list[Packet]] = []
    members = size = 0
    for packet in packets:
        members, size = members + len(packet.indices), size + packet.size
        if not parts or members > MAX_SLICE_MEMBERS or size > MAX_SLICE_BYTES:
            parts.append([])
            members, size = len(packet.indices), packet.size
        parts[-1].append(packet)
    return parts
