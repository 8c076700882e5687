"""The scorers' streams: packets that wait for scores, and their hand-off to the next scorer or the grouper.

`UnscoredTrajectory` is what a scoring function receives of a trajectory. `WholeGroups` holds packets back until their
group is whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from .. import tracing
from ..errors import WireError
from ..run import Run, Shard
from ..run.consumer import Entry, entries_of
from ..run.dead_letters import reject
from ..run.packets import PACKET_FIELDS, USABLE, MemberLine, read_packet
from ..store.replies import as_text
from ..trajectory.columns import Array
from ..trajectory.member_table import read_table
from ..trajectory.members import Reference, StepSpan
from ..trajectory.packet import Payload, StoredPacket
from ..trajectory.packet_encoding import encode_table, member_line
from ..trajectory.schema import Role, Status

#: Entries of a scorer's stream that are looked at, or handed off, in one call.
PAGE: Final = 100


class UnscoredTrajectory:
    """A trajectory that waits for a score; read-only.

    Its metadata are what the producer pushed or gave to the group: prompt, answer, what a judge needs besides tokens.
    """

    __slots__ = ("_payload", "_reference")

    def __init__(self, reference: Reference, payload: Payload) -> None:
        self._reference = reference
        self._payload = payload

    def __repr__(self) -> str:
        lengths = " + ".join(map(str, self.row_lengths))
        return f"<UnscoredTrajectory {self.name}: {self.status}, {lengths} tokens>"

    @property
    def name(self) -> str:
        """group_id/rollout_index."""
        return f"{self.group_id}/{self.rollout_index}"

    @property
    def group_id(self) -> str:
        return self._reference.group_id

    @property
    def rollout_index(self) -> int:
        return self._reference.rollout_index

    @property
    def group_size(self) -> int:
        return self._payload.header.group_size

    @property
    def status(self) -> Status:
        """completed or truncated; others are not scored."""
        return self._reference.status

    @property
    def data_source(self) -> str | None:
        return self._reference.data_source

    @property
    def metadata(self) -> Mapping[str, Any]:
        """As pushed."""
        return self._payload.header.metadata

    @property
    def model_version(self) -> int | tuple[int, int] | None:
        """Of the policy that played it, or the first and the last one."""
        return self._payload.header.model_version

    @property
    def columns(self) -> Mapping[str, Array]:
        """The columns that the scorer reads: an array each, [tokens], its rows end to end, read-only."""
        return self._payload.columns

    @property
    def row_lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self._reference.row_lengths

    @property
    def agents(self) -> Sequence[str | None]:
        """Who wrote each row; empty if no row names an agent."""
        return self._payload.header.agents

    @property
    def steps(self) -> Sequence[StepSpan]:
        """Turns in time order: row, start, end (tokens of the row), reward, state_key."""
        return self._reference.steps

    @property
    def reward(self) -> float | None:
        """The sum of what earlier scorers gave; None before the first."""
        return self._reference.reward

    @property
    def rewards(self) -> Mapping[str, float]:
        """Named rewards that were pushed, or that earlier scorers gave."""
        return self._reference.rewards


@dataclass(slots=True, eq=False)
class WaitingPacket:
    """A packet in the stream of a scorer. It is handed on whole, once each usable member has its verdict."""

    entry: Entry
    group_id: str
    lines: list[MemberLine]
    stored: StoredPacket
    verdicts: dict[int, Mapping[str, float] | None] = field(default_factory=dict)
    """Of members, by position: rewards to add, by name, or None: unscorable."""
    given_up: list[WaitingMember] = field(default_factory=list)  # after their last tries
    is_handed_on: bool = False
    since: int = field(default_factory=tracing.now)

    @property
    def usable(self) -> list[int]:
        """Positions of members that another scorer has not found unscorable."""
        return [position for position, line in enumerate(self.lines) if line.kind == USABLE]

    @property
    def is_scored(self) -> bool:
        return len(self.verdicts) == len(self.usable)

    @property
    def is_wanted(self) -> bool:
        """Whether another scorer is to be asked: it is scored, and a member has a reward."""
        return self.is_scored and any(rewards is not None for rewards in self.verdicts.values())

    def scored(self, filter_by: str) -> Entry:
        """The entry with its rewards; as it came if a member has no verdict, because the group has ended.

        filter_by: of the run. Without a named reward of this name the reward itself is judged.
        """
        if not self.is_scored:
            return self.entry
        members, text = self.stored.members, ""
        before = np.where(members.has_reward, members.table["reward"], 0.0).tolist()
        members = members.with_rewards(
            {
                position: (sum(named.values(), before[position]), named)
                for position, named in self.verdicts.items()
                if named is not None
            }
        )
        judged = members.rewards.get(filter_by, np.full(len(members), np.nan))
        for position, line in enumerate(self.lines):
            kind, value = "unscorable", None
            if self.verdicts.get(position) is not None:
                kind, value = USABLE, float(members.table["reward"][position])
                if line.role != Role.EVAL and not np.isnan(judged[position]):
                    value = float(judged[position])
            text += member_line(line.rollout_index, kind, value, line.role)
        table = encode_table(members, self.stored.columns)
        return self.entry._replace(fields={**self.entry.fields, b"members": text.encode(), b"table": table})


class WaitingMember(NamedTuple):
    """A member of a packet that waits for a score of this scorer."""

    packet: WaitingPacket
    position: int
    """In the packet."""
    trajectory: UnscoredTrajectory


def pass_on(shard: Shard, scorer: str, entries: Sequence[Entry], target: str | None = None) -> int:
    """Hand packets of a scorer's stream off, with the fields given: to the scorer `target`, or None: to the grouper.

    Returns how many nobody else had handed off before.
    """
    if not entries:
        return 0
    args: list[Any] = [scorer, "1" if target is None else "0"]
    for entry in entries:
        args += [entry.id, *(entry.fields[name] for name in PACKET_FIELDS)]
    next_stream = shard.keys.rollouts if target is None else shard.keys.scoring(target)
    passed: int = shard.call("scored", args, stream=shard.keys.scoring(scorer), target=next_stream)
    return passed


def waiting_entries(shard: Shard, scorer: str, first: str = "-", last: str = "+") -> Iterator[Entry]:
    """What stands in a scorer's stream from the entry `first` to the entry `last`, read page by page."""
    while True:
        page: Any = shard.connection.scripts.xrange(shard.keys.scoring(scorer), first, last, PAGE)
        yield from entries_of(shard.index, page)
        if len(page) < PAGE:
            return
        first = f"({page[-1][0].decode()}"


def packets_of(run: Run, scorer: str, entries: Iterable[Entry]) -> list[WaitingPacket]:
    """The packets of entries. Entries that are none are removed as malformed, and left out."""
    packets = []
    for entry in entries:
        try:
            packet, fields = read_packet(run, entry.shard, entry.fields), entry.fields
            size = int(fields[b"bytes"])
            members, columns = read_table(fields[b"table"], size)
            if members.table["index"].tolist() != [line.rollout_index for line in packet.members]:
                raise WireError("member table: its members are not those of the packet")
            stored = StoredPacket(packet.payload, size, int(fields[b"epoch"]), columns, members)
            packets.append(WaitingPacket(entry, packet.group_id, packet.members, stored))
        except WireError as error:
            shard = run.shards[entry.shard]
            reject(shard, shard.keys.scoring(scorer), entry.id, str(error), entry.fields, stage=scorer)
    return packets


def are_open(run: Run, packets: Sequence[Entry]) -> list[bool]:
    """Whether the group of each packet is open, so that a score would still count."""
    pipe = run.connection.scripts.pipeline(transaction=False)
    for packet in packets:
        pipe.exists(run.shards[packet.shard].keys.group(packet.fields[b"group_id"].decode()))
    return list(map(bool, pipe.execute() if packets else ()))


# Whole groups

# Packets of a scorer that is asked for whole groups: they wait until all rollouts of their group are there. A group is
# whole when no slot is free, and each member that was pushed and is not grouped yet stands in the scorer's stream.
# Several processes may hold packets of one group: the holder of its oldest entry scores all of them, the others wait
# until theirs are gone from the stream. Nothing of this is stored: what a dead process held is taken over.

FREE: Final = b"."
ON_ITS_WAY: Final = b"p"

Group = tuple[int, str]
"""Index of the shard, and the group's id."""


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

    def take(self, most: int) -> tuple[list[WaitingPacket], list[WaitingPacket], list[Entry]]:
        """What need not be held any longer.

        All packets of groups that this process scores, of `most` members together, one group at least; packets of
        groups that have ended; entries that another process has handed on.
        """
        taken, ended, gone = list[WaitingPacket](), list[WaitingPacket](), list[Entry]()
        whole, members = dict[Group, int](), 0
        pipe = self._run.connection.scripts.pipeline(transaction=False)
        for index, group_id in self._held:
            pipe.hget(self._run.shards[index].keys.group(group_id), "slots")
        slot_maps = pipe.execute() if self._held else []
        for group, slots in zip(list(self._held), slot_maps, strict=True):  # None of a group that has ended
            if slots is None:
                ended.extend(self._held.pop(group).values())
            elif slots and FREE not in slots:
                whole[group] = slots.count(ON_ITS_WAY)
        for group, packets in self._scored_here(whole, gone):
            if members >= most:
                break
            members += sum(len(packet.lines) for packet in packets)
            taken += packets
            self._held.pop(group)
        return taken, ended, gone

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
        # The packets of these that some process holds, in the order of their entries.
        found = {group: dict[str, WaitingPacket]() for group in shared}
        for index in {index for index, _ in shared}:
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
        for group, count in shared.items():
            held, there = self._held[group], found[group]
            gone += [held.pop(entry_id).entry for entry_id in held.keys() - there.keys()]
            if not held:
                self._held.pop(group)
            elif sum(len(each.lines) for each in there.values()) >= count and next(iter(there)) in held:
                yield group, [held.get(entry_id, each) for entry_id, each in there.items()]
