"""Packets of a scorer that is asked for whole groups: they wait until all rollouts of their group are there.

A group is whole when no slot is free, and each member that was pushed and is not grouped yet stands in the scorer's
stream. Several processes may hold packets of one group: the holder of its oldest entry scores all of them, the others
wait until theirs are gone from the stream. Nothing of this is stored: what a dead process held is taken over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..run import Run, Shard
from ..run.consumer import Entry, entries_of
from .scoring_streams import WaitingPacket, packets_of

#: Entries of a stream that are looked at in one call.
PAGE: Final = 100
FREE: Final = b"."
ON_ITS_WAY: Final = b"p"

Group = tuple[int, str]
"""Index of the shard, and the group's id."""


class Taken(NamedTuple):
    """Packets that are held no longer."""

    groups: list[list[WaitingPacket]]
    """Of groups that this process scores: all there are."""
    ended: list[WaitingPacket]
    """Of groups that have ended."""
    gone: list[Entry]
    """Handed on by another process."""


class WholeGroups:
    """What one process of a scorer holds back."""

    def __init__(self, run: Run, scorer: str) -> None:
        self._run, self._scorer = run, scorer
        self._held: dict[Group, dict[str, WaitingPacket]] = defaultdict(dict)

    def hold(self, packets: Iterable[WaitingPacket]) -> None:
        """Until their groups are whole, or have ended."""
        for packet in packets:
            self._held[packet.entry.shard, packet.group_id][packet.entry.id] = packet

    def clear(self) -> None:
        """All are read again."""
        self._held.clear()

    def take(self, most: int) -> Taken:
        """What need not be held any longer: groups of `most` members together, one group at least."""
        taken, members = Taken([], [], []), 0
        for index in {shard for shard, _ in self._held}:
            shard = self._run.shard(index)
            slots = self._slots(shard)
            taken.ended.extend(self._release(group for group, text in slots.items() if text is None))
            whole = {
                group: text.count(ON_ITS_WAY) for group, text in slots.items() if text and FREE not in text
            }
            for group, packets in self._scored_here(shard, whole, taken.gone):
                if members >= most:
                    break
                members += sum(len(packet.lines) for packet in packets)
                taken.groups.append(packets)
                self._held.pop(group)
        return taken

    def _slots(self, shard: Shard) -> dict[Group, bytes | None]:
        """The slot maps of the groups that are held; None of one that has ended."""
        groups = [group for group in self._held if group[0] == shard.index]
        pipe = shard.connection.scripts.pipeline(transaction=False)
        for _, group_id in groups:
            pipe.hget(shard.keys.group(group_id), "slots")
        return dict(zip(groups, pipe.execute(), strict=True))

    def _release(self, groups: Iterable[Group]) -> list[WaitingPacket]:
        return [packet for group in list(groups) for packet in self._held.pop(group).values()]

    def _scored_here(
        self, shard: Shard, whole: Mapping[Group, int], gone: list[Entry]
    ) -> Iterator[tuple[Group, list[WaitingPacket]]]:
        """Of groups with so many members on their way: those that this process scores, with all their packets."""
        shared = {}
        for group, count in whole.items():
            packets = list(self._held[group].values())
            if sum(len(packet.lines) for packet in packets) >= count:
                yield group, packets
            else:
                shared[group] = count
        found = self._in_stream(shard, shared) if shared else {}
        for group, count in shared.items():
            held, there = self._held[group], found.get(group, {})
            gone += [held.pop(entry_id).entry for entry_id in held.keys() - there.keys()]
            if not held:
                self._held.pop(group)
            elif sum(len(each.lines) for each in there.values()) >= count and next(iter(there)) in held:
                yield group, [held.get(entry_id, each) for entry_id, each in there.items()]

    def _in_stream(self, shard: Shard, groups: Mapping[Group, int]) -> dict[Group, dict[str, WaitingPacket]]:
        """The packets of groups that some process holds, in the order of their entries."""
        scripts, stream = shard.connection.scripts, shard.keys.scoring(self._scorer)
        pending: Any = scripts.xpending(stream, self._scorer)
        start, found = pending["min"], defaultdict[Group, dict[str, WaitingPacket]](dict)
        while start is not None:
            reply: Any = scripts.xrange(stream, start, pending["max"], PAGE)
            wanted = self._of_groups(entries_of(shard.index, reply), groups)
            for packet in packets_of(self._run, shard, self._scorer, wanted):
                found[shard.index, packet.group_id][packet.entry.id] = packet
            start = f"({reply[-1][0].decode()}" if len(reply) == PAGE else None
        return found

    @staticmethod
    def _of_groups(entries: Sequence[Entry], groups: Mapping[Group, int]) -> list[Entry]:
        return [
            entry
            for entry in entries
            if (entry.shard, entry.fields.get(b"group_id", b"").decode(errors="replace")) in groups
        ]
