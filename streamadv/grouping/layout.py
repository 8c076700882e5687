"""The layout of a batch: the members of its groups end to end, and where the server has their columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..trajectory.columns import Array
from ..trajectory.members import MEMBER, Members, Positions, join_records, offsets
from ..trajectory.packet import StoredPacket
from .groups_log import LoggedGroup


class Piece(NamedTuple):
    """Entries start : stop of a column of the batch. They lie together from `source` on in a column of their source."""

    start: int
    stop: int
    source: int


@dataclass(frozen=True, eq=False)
class Layout:
    """M members of groups in batch order, in each group by rollout_index. Their columns lie in this order too."""

    groups: Sequence[LoggedGroup]
    members: Members
    group: Positions  # [M]: its group's position in `groups`, ascending
    packets: Sequence[StoredPacket]  # of all groups
    packet: Positions  # [M]: the position of its packet in `packets`
    position: Positions  # [M]: its own position in this packet

    @staticmethod
    def of(groups: Sequence[LoggedGroup]) -> Layout:
        """All members of `groups`, which must have been readable."""
        num_packets = offsets(np.array([len(group.packets) for group in groups], np.int64))
        num_members = np.array([len(group.members) for group in groups], np.int64)
        none = np.zeros(0, np.int64)
        return Layout(
            groups,
            Members.concat([group.members for group in groups]),
            np.repeat(np.arange(len(groups)), num_members),
            [packet for group in groups for packet in group.packets],
            np.concatenate([none, *(group.packet_of for group in groups)], dtype=np.int64)
            + np.repeat(num_packets[:-1], num_members),
            np.concatenate([none, *(group.position_of for group in groups)], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_tokens(self) -> int:
        return int(self.members.table["tokens"].sum())

    def select(self, positions: Positions | Sequence[int]) -> Layout:
        """The members at these positions, which ascend. Groups and packets keep their numbers."""
        positions = np.asarray(positions, np.int64)
        if len(positions) == len(self) and (np.diff(positions) == 1).all():
            return self
        return replace(
            self,
            members=self.members.select(positions),
            group=self.group[positions],
            packet=self.packet[positions],
            position=self.position[positions],
        )

    def identity(self, member: int) -> tuple[str, int]:
        """(group_id, rollout_index) of the member at this position."""
        return self.groups[self.group[member]].group_id, int(self.members.table["index"][member])

    def pieces(self) -> tuple[dict[int, list[Piece]], list[int]]:
        """How a column is put together from those of its packets: pieces by position of the packet.

        All columns per token have the same pieces. A packet none of whose members is in the layout is not there. Also
        the tokens of each of `packets`, those of its other members among them.
        """
        tables = [packet.members.table for packet in self.packets]
        first_member = offsets(np.array([len(table) for table in tables], np.int64))
        entry, first = offsets(join_records(tables, MEMBER)["tokens"]), first_member[self.packet]
        source = entry[first + self.position] - entry[first]
        found = pieces(self.packet, source, self.members.table["tokens"])
        return found, np.diff(entry[first_member]).tolist()


def pieces(origin: Positions, source: Positions, lengths: Positions) -> dict[int, list[Piece]]:
    """How K consecutive parts of a column are put together from other columns.

    Part k is lengths[k] entries from source[k] on of the column number origin[k]. Parts that lie together in both
    columns become one piece. By number of column, in order.
    """
    if not len(origin):
        return {}
    bounds = offsets(lengths)
    is_first = np.ones(len(origin), np.bool_)
    is_first[1:] = (origin[1:] != origin[:-1]) | (source[1:] != source[:-1] + lengths[:-1])
    first = np.flatnonzero(is_first)
    stops = bounds[np.append(first[1:], len(origin))]
    by_origin: dict[int, list[Piece]] = {}
    table = zip(
        origin[first].tolist(), bounds[first].tolist(), stops.tolist(), source[first].tolist(), strict=True
    )
    for number, *piece in table:
        by_origin.setdefault(number, []).append(Piece(*piece))
    return by_origin


def place(column: Array, parts: Iterable[Piece], out: Array) -> None:
    """Copy the `parts` of a source's column into `out`, the batch's."""
    for start, stop, source in parts:
        out[start:stop] = column[source : source + stop - start]
