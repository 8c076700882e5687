"""Splits a batch's rows over ranks and micro-batches, as a pure function.

Every rank computes the same plan from the same member tables. So ranks need not agree over the network, and a job
with another world size after a restart simply plans again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
import torch

from ..batch.ends import is_oversize
from ..grouping.layout import Layout
from ..trajectory.columns import Array
from ..trajectory.members import Positions, offsets, spans


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a training job."""

    number: int  # 0 to world_size - 1; rank 0 leads
    world_size: int
    device: torch.device  # of its micro-batches


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of a batch.

    Everything the rank makes for the batch (columns, results) has the order of `own`, and `rows` count in it.
    """

    batch: Layout  # all living groups
    trained: Layout  # what is trained on, all ranks together: the batch's counts
    own: Layout  # this rank's trajectories
    positions: Positions  # of `own` in the batch
    rows: list[Positions]  # of each micro-batch, ascending


def share_of(
    batch: Layout,
    budget: int | None,
    rank: Rank,
    left_out: Collection[tuple[str, int]] = frozenset(),
    keep_groups: bool = False,
) -> Share:
    """This rank's share of a batch, given all its living groups.

    keep_groups: rows of a group stay together, see `plan`.
    left_out: (group_id, rollout_index) of trajectories that some rank could not read. Their rows are in no
    micro-batch, but the plan counts them: the other ranks, which share it, do not know of them.
    """
    positions = np.flatnonzero(~batch.members.is_baseline & ~is_oversize(batch.members, budget))
    trained = batch.select(positions)
    members, first_row = trained.members, trained.members.first_row
    group_of = trained.group if keep_groups else None
    packets = trained.packet
    planned = plan(members.rows["tokens"], first_row, packets, rank.world_size, budget, group_of)[rank.number]
    owner = np.repeat(np.arange(len(members)), members.table["rows"])
    own = np.unique(owner[np.concatenate([*planned, np.zeros(0, np.int64)])])
    if left_out:
        own = own[[trained.identity(member) not in left_out for member in own.tolist()]]
    number = np.full(len(owner), -1)
    of_own = spans(first_row, own)
    number[of_own] = np.arange(len(of_own))
    rows = [numbers[numbers >= 0] for numbers in (number[rows] for rows in planned)]
    return Share(batch, trained, trained.select(own), positions[own], rows)


def plan(
    row_tokens: Array,
    first_row: Positions,
    packet_of: Positions,
    world_size: int,
    budget: int | None,
    group_of: Positions | None = None,
) -> list[list[Positions]]:
    """Rows of each micro-batch of each rank, ascending: `plan(...)[rank][micro_batch]`.

    row_tokens: [R] tokens of each row. first_row: [M + 1], trajectory m has the rows first_row[m] : first_row[m + 1].
    packet_of: [M], equal numbers = in one packet. group_of: [M], ascending, equal numbers = in one group.

    A trajectory stays on one rank. Ranks are balanced by tokens: whole packets first (largest first, to the emptiest
    rank), because each rank reads all of a packet, then single trajectories until the fullest rank is within 1 % of the
    mean. Rows fill micro-batches of at most `budget` tokens (first fit, largest first; None = one micro-batch). Every
    rank gets the same number of micro-batches, the last ones of a short rank being empty. Raises ValueError for a row
    above the budget.

    With `group_of` a group stays on one rank, so that ranks are balanced only as far as whole groups allow, and in one
    micro-batch. A group above the budget fills as few micro-batches as first fit needs for it.
    """
    if budget is not None and len(row_tokens) and int(row_tokens.max()) > budget:
        row = int(row_tokens.argmax())
        raise ValueError(f"row {row} has {int(row_tokens[row])} tokens, budget {budget}")
    row_tokens = row_tokens.astype(np.int64)
    sums = offsets(row_tokens)[first_row]
    rank_of = np.zeros(len(packet_of), np.int64)
    if world_size > 1 and len(packet_of):
        units = packet_of if group_of is None else group_of
        rank_of = _ranks_of(np.diff(sums), units, world_size, group_of is not None)
    planned = []
    for rank in range(world_size):
        members = np.flatnonzero(rank_of == rank)
        rows = spans(first_row, members)
        tokens = row_tokens[rows]
        if budget is None or int(tokens.sum()) <= budget:
            planned.append([rows] if len(rows) else [])
            continue
        if group_of is None:
            micro_batch_of = _first_fit(tokens, budget)
        else:
            micro_batch_of = _fit_groups(
                tokens, budget, np.repeat(group_of[members], np.diff(first_row)[members])
            )
        order = np.argsort(micro_batch_of, kind="stable")
        planned.append(np.split(rows[order], np.flatnonzero(np.diff(micro_batch_of[order])) + 1))
    count = max(map(len, planned), default=0)
    no_rows = np.zeros(0, np.int64)
    return [micro_batches + [no_rows] * (count - len(micro_batches)) for micro_batches in planned]


def _ranks_of(tokens: Positions, unit_of: Positions, world_size: int, keep_units: bool) -> Positions:
    """[M]: the rank of each trajectory. unit_of: [M], what is given to a rank whole, at first or for good."""
    units, unit_of = np.unique(unit_of, return_inverse=True)
    sizes = np.zeros(len(units), np.int64)
    np.add.at(sizes, unit_of, tokens)
    rank_of_unit = np.zeros(len(units), np.int64)
    loads = [(0, rank) for rank in range(world_size)]  # a heap
    for unit in np.argsort(-sizes, kind="stable").tolist():
        load, rank = loads[0]
        heapreplace(loads, (load + int(sizes[unit]), rank))
        rank_of_unit[unit] = rank
    if keep_units:
        _even_out(rank_of_unit, sizes, world_size)
        return rank_of_unit[unit_of]
    rank_of = rank_of_unit[unit_of]
    _even_out(rank_of, tokens, world_size)
    return rank_of


def _even_out(rank_of: Positions, tokens: Positions, world_size: int) -> None:
    """Move single trajectories (or groups) from the fullest rank to the emptiest, in place.

    Ends because every move makes the sum of the squares of the ranks' tokens smaller.
    """
    loads = np.zeros(world_size, np.int64)
    np.add.at(loads, rank_of, tokens)
    total, largest = int(loads.sum()), int(tokens.max())
    while True:
        fullest, emptiest = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[fullest] - loads[emptiest])
        if 100 * world_size * int(loads[fullest]) <= 101 * total and gap <= largest:
            return
        own = np.flatnonzero(rank_of == fullest)
        moved = own[np.abs(gap - 2 * tokens[own]).argmin()]
        if tokens[moved] >= gap:
            return
        rank_of[moved] = emptiest
        loads[fullest] -= tokens[moved]
        loads[emptiest] += tokens[moved]


def _fit_groups(tokens: Positions, budget: int, group_of: Positions) -> Positions:
    """[R]: the micro-batch of each row. group_of: of each, ascending. A group is one block, or as many as it needs."""
    first = np.flatnonzero(np.diff(group_of, prepend=-1))
    block_of = np.zeros(len(tokens), np.int64)
    block = 0
    for start, stop in zip(first.tolist(), [*first[1:].tolist(), len(tokens)], strict=True):
        own = tokens[start:stop]
        block_of[start:stop] = block
        if int(own.sum()) > budget:
            block_of[start:stop] += _first_fit(own, budget)
        block = int(block_of[start:stop].max()) + 1
    sizes = np.zeros(block, np.int64)
    np.add.at(sizes, block_of, tokens)
    return _first_fit(sizes, budget)[block_of]


def _first_fit(sizes: Positions, budget: int) -> Positions:
    """[K]: the bin of each block, largest first, each in the first bin that has room for it."""
    # No two bins would fit into one, so they are fewer than twice what the blocks fill.
    room = np.full(2 * int(sizes.sum()) // budget + 1, budget)
    bin_of = np.zeros(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    for position, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        first_fit = (room >= size).argmax()
        room[first_fit] -= size
        bin_of[position] = first_fit
    return bin_of
