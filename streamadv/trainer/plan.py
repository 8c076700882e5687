"""Who trains on what: a batch's rows split over ranks and micro-batches, as a pure function.

Every rank computes the same plan from the same references, so nothing has to be agreed on over the network,
and another world size after a restart simply plans again.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple, Protocol

import torch

from ..batch.commit import terminal_states
from ..trajectory.reference import Reference


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a training job."""

    number: int  # 0 to world_size - 1; rank 0 leads
    world_size: int
    device: torch.device  # of its micro-batches


class Sized(Protocol):
    """What a plan needs to know of a trajectory: the token counts of its rows."""

    @property
    def row_lengths(self) -> Sequence[int]: ...


class RowRef(NamedTuple):
    """A row: the position of its trajectory in the list that the plan is made for, and its own number in that."""

    trajectory: int
    row: int


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a batch.

    Everything the rank makes for the batch (payloads, packed columns, outputs) has the order of `references`, and
    `rows` count in it.
    """

    batch_references: list[
        Reference
    ]  # of the trajectories trained on, all ranks together: the batch's counts
    references: list[Reference]  # of this rank's trajectories
    rows: list[list[RowRef]]  # of each micro-batch


def share_of(
    references: Sequence[Reference],
    budget: int | None,
    rank: Rank,
    left_out: Container[tuple[str, int]] = frozenset(),
) -> Share:
    """This rank's share of a batch, given all references of its living groups in batch order.

    left_out: (group_id, rollout_index) of trajectories that some rank could not read. Their rows are in no
    micro-batch, but the plan counts them: the other ranks, which share it, do not know of them.
    """
    states = terminal_states(references, budget)
    trained = [reference for reference, state in zip(references, states, strict=True) if state == "trained"]
    planned = plan(trained, rank.world_size, budget)[rank.number]
    positions = [
        position
        for position in sorted({ref.trajectory for refs in planned for ref in refs})
        if (trained[position].group_id, trained[position].rollout_index) not in left_out
    ]
    index_of = {position: index for index, position in enumerate(positions)}
    rows = [
        [RowRef(index_of[ref.trajectory], ref.row) for ref in refs if ref.trajectory in index_of]
        for refs in planned
    ]
    return Share(trained, [trained[position] for position in positions], rows)


def plan(trajectories: Sequence[Sized], world_size: int, budget: int | None) -> list[list[list[RowRef]]]:
    """Rows of each micro-batch of each rank: `plan(...)[rank][micro_batch]`.

    A trajectory stays on one rank; ranks are balanced by tokens (largest first, to the emptiest rank). Rows
    fill micro-batches of at most `budget` tokens (first fit, largest first; None = one micro-batch). Every
    rank gets the same number of micro-batches, the last ones of a short rank being empty. Raises ValueError
    for a row above the budget.
    """
    tokens = [sum(trajectory.row_lengths) for trajectory in trajectories]
    loads = [(0, rank) for rank in range(world_size)]  # a heap
    positions_of: list[list[int]] = [[] for _ in range(world_size)]  # by rank
    for position in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        load, rank = loads[0]
        heapreplace(loads, (load + tokens[position], rank))
        positions_of[rank].append(position)
    planned = [_fill(trajectories, sorted(positions), budget) for positions in positions_of]
    count = max((len(micro_batches) for micro_batches in planned), default=0)
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in planned]


def _fill(trajectories: Sequence[Sized], positions: Sequence[int], budget: int | None) -> list[list[RowRef]]:
    """Micro-batches of one rank, which has the trajectories at these positions."""
    rows = [
        (length, RowRef(position, row))
        for position in positions
        for row, length in enumerate(trajectories[position].row_lengths)
    ]
    if budget is None:
        return [[ref for _, ref in rows]] if rows else []
    fill: list[int] = []  # tokens of each micro-batch
    micro_batches: list[list[RowRef]] = []
    for length, ref in sorted(rows, key=lambda row: (-row[0], row[1])):
        if length > budget:
            raise ValueError(
                f"row {ref.row} of trajectory {ref.trajectory} has {length} tokens, budget {budget}"
            )
        first_fit = next((n for n, tokens in enumerate(fill) if tokens + length <= budget), len(fill))
        if first_fit == len(fill):
            fill.append(0)
            micro_batches.append([])
        fill[first_fit] += length
        micro_batches[first_fit].append(ref)
    return [sorted(refs) for refs in micro_batches]
