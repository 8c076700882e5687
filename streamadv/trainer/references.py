"""References: the trajectories of a batch one by one, made only for a loop that asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ..grouping.layout import Layout
from ..trajectory.members import Positions
from ..trajectory.reference import Reference, references_of


class References:
    """References of the members of a layout, or of those at `positions`, which may repeat. Made at the first look."""

    def __init__(self, layout: Layout, positions: Positions | None = None) -> None:
        self._layout = layout
        self._positions = positions

    def __iter__(self) -> Iterator[Reference]:
        return iter(self._made)

    @cached_property
    def _made(self) -> list[Reference]:
        layout = self._layout
        groups = [(group.group_id, group.data_source) for group in layout.groups]
        references = references_of(layout.members, [groups[number] for number in layout.group.tolist()])
        if self._positions is None:
            return references
        return [references[position] for position in self._positions.tolist()]
