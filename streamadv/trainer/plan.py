"""Who trains on what: a batch's rows split over ranks and micro-batches, as a pure function.

Every rank computes the same plan from the same references, so nothing has to be agreed on over the network,
and another world size after a restart simply plans again.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple, Protocol


class Sized(Protocol):
    """What a plan needs to know of a trajectory: the token counts of its rows."""

    @property
    def row_lengths(self) -> Sequence[int]: ...


class RowRef(NamedTuple):
    """A row of a batch: position of its trajectory among the planned ones, and of the row in it."""

    trajectory: int
    row: int


def plan(trajectories: Sequence[Sized], world_size: int, budget: int | None) -> list[list[list[RowRef]]]:
    """Rows of each micro-batch of each rank: `plan(...)[rank][micro_batch]`.

    A trajectory stays on one rank; ranks are balanced by tokens (largest first, to the emptiest rank). Rows
    fill micro-batches of at most `budget` tokens (first fit, largest first; None = one micro-batch). Every
    rank gets the same number of micro-batches, the last ones of a short rank being empty. Raises ValueError
    for a row above the budget.
    """
    tokens = [sum(trajectory.row_lengths) for trajectory in trajectories]
    loads = [(0, rank) for rank in range(world_size)]  # a heap
    owned: list[list[int]] = [[] for _ in range(world_size)]
    for position in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        load, rank = loads[0]
        heapreplace(loads, (load + tokens[position], rank))
        owned[rank].append(position)
    planned = [_fill(trajectories, sorted(positions), budget) for positions in owned]
    count = max((len(micro_batches) for micro_batches in planned), default=0)
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in planned]


def _fill(trajectories: Sequence[Sized], positions: Sequence[int], budget: int | None) -> list[list[RowRef]]:
    rows = [
        (length, RowRef(position, row))
        for position in positions
        for row, length in enumerate(trajectories[position].row_lengths)
    ]
    if budget is None:
        return [[ref for _, ref in rows]] if rows else []
    bins: list[tuple[int, list[RowRef]]] = []
    for length, ref in sorted(rows, key=lambda item: (-item[0], item[1])):
        if length > budget:
            raise ValueError(
                f"row {ref.row} of trajectory {ref.trajectory} has {length} tokens, budget {budget}"
            )
        for index, (used, members) in enumerate(bins):
            if used + length <= budget:
                members.append(ref)
                bins[index] = (used + length, members)
                break
        else:
            bins.append((length, [ref]))
    return [sorted(members) for _, members in bins]
