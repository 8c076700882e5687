"""Packets of a scorer that is asked for whole groups: they wait until all rollouts of their group are there.

A group is whole when no slot is free, and each member that was pushed and is not grouped yet stands in the scorer's
stream. Several processes may hold packets of one group: the holder of its oldest entry scores all of them, the others
wait until theirs are gone from the stream. Nothing of this is stored: what a dead process held is taken over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ..run import Run
from ..run.consumer import Entry
from ..store.replies import as_text
from .scoring_streams import WaitingPacket, packets_of, waiting_entries

FREE: Final = b"."
ON_ITS_WAY: Final = b"p"

Group = tuple[int, str]
"""Index of the shard, and the group's id."""


class Taken(NamedTuple):
    """Packets that are held no longer."""

    whole: list[WaitingPacket]
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
        taken, whole, members = Taken([], [], []), dict[Group, int](), 0
        pipe = self._run.connection.scripts.pipeline(transaction=False)
        for index, group_id in self._held:
            pipe.hget(self._run.shards[index].keys.group(group_id), "slots")
        slot_maps = pipe.execute() if self._held else []
        for group, slots in zip(list(self._held), slot_maps, strict=True):  # None of a group that has ended
            if slots is None:
                taken.ended.extend(self._held.pop(group).values())
            elif slots and FREE not in slots:
                whole[group] = slots.count(ON_ITS_WAY)
        for group, packets in self._scored_here(whole, taken.gone):
            if members >= most:
                break
            members += sum(len(packet.lines) for packet in packets)
            taken.whole.extend(packets)
            self._held.pop(group)
        return taken

    def _scored_here(
        self, whole: Mapping[Group, int], gone: list[Entry]
    ) -> Iterator[tuple[Group, list[WaitingPacket]]]:
        """Of groups with so many members on their way: those that this process scores, with all their packets."""
        shared = dict[Group, int]()
        for group, count in whole.items():
            packets = list(self._held[group].values())
            if sum(len(packet.lines) for packet in packets) >= count:
                yield group, packets
            else:
                shared[group] = count
        found = self._in_streams(shared)
        for group, count in shared.items():
            held, there = self._held[group], found[group]
            gone += [held.pop(entry_id).entry for entry_id in held.keys() - there.keys()]
            if not held:
                self._held.pop(group)
            elif sum(len(each.lines) for each in there.values()) >= count and next(iter(there)) in held:
                yield group, [held.get(entry_id, each) for entry_id, each in there.items()]

    def _in_streams(self, groups: Collection[Group]) -> dict[Group, dict[str, WaitingPacket]]:
        """The packets of groups that some process holds, in the order of their entries."""
        found = {group: dict[str, WaitingPacket]() for group in groups}
        for index in {index for index, _ in groups}:
            shard = self._run.shards[index]
            pending: Any = shard.connection.scripts.xpending(shard.keys.scoring(self._scorer), self._scorer)
            if pending["min"] is None:
                continue
            entries = waiting_entries(shard, self._scorer, pending["min"], pending["max"])
            of_groups = (
                entry for entry in entries if (index, as_text(entry.fields.get(b"group_id", b""))) in found
            )
            for packet in packets_of(self._run, self._scorer, of_groups):
                found[index, packet.group_id][packet.entry.id] = packet
        return found
