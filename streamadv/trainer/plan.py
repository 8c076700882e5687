"""Who trains on what: a batch's rows split over ranks and micro-batches, as a pure function.

Every rank computes the same plan from the same member tables, so nothing has to be agreed on over the network, and
another world size after a restart simply plans again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
import torch

from ..batch.commit import is_oversize
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

    trained: Layout  # what is trained on, all ranks together: the batch's counts
    own: Layout  # this rank's trajectories
    positions: Positions  # of `own` in the batch
    rows: list[Positions]  # of each micro-batch, ascending


def share_of(
    batch: Layout, budget: int | None, rank: Rank, left_out: Collection[tuple[str, int]] = frozenset()
) -> Share:
    """This rank's share of a batch, given all its living groups.

    left_out: (group_id, rollout_index) of trajectories that some rank could not read. Their rows are in no
    micro-batch, but the plan counts them: the other ranks, which share it, do not know of them.
    """
    positions = np.flatnonzero(~batch.members.is_baseline & ~is_oversize(batch.members, budget))
    trained = batch.select(positions)
    members, first_row = trained.members, trained.members.first_row
    planned = plan(members.rows["tokens"], first_row, trained.packet, rank.world_size, budget)[rank.number]
    owner = np.repeat(np.arange(len(members)), members.table["rows"])
    own = np.unique(owner[np.concatenate([*planned, np.zeros(0, np.int64)])])
    if left_out:
        own = own[[trained.identity(member) not in left_out for member in own.tolist()]]
    number = np.full(len(owner), -1)
    of_own = spans(first_row, own)
    number[of_own] = np.arange(len(of_own))
    rows = [numbers[numbers >= 0] for numbers in (number[rows] for rows in planned)]
    return Share(trained, trained.select(own), positions[own], rows)


def plan(
    row_tokens: Array, first_row: Positions, packet_of: Positions, world_size: int, budget: int | None
) -> list[list[Positions]]:
    """Rows of each micro-batch of each rank, ascending: `plan(...)[rank][micro_batch]`.

    row_tokens: [R] tokens of each row. first_row: [M + 1], trajectory m has the rows first_row[m] : first_row[m + 1].
    packet_of: [M], equal numbers = in one packet.

    A trajectory stays on one rank. Ranks are balanced by tokens: whole packets first (largest first, to the emptiest
    rank), because each rank reads all of a packet, then single trajectories until the fullest rank is within 1 % of the
    mean. Rows fill micro-batches of at most `budget` tokens (first fit, largest first; None = one micro-batch). Every
    rank gets the same number of micro-batches, the last ones of a short rank being empty. Raises ValueError for a row
    above the budget.
    """
    if budget is not None and len(row_tokens) and int(row_tokens.max()) > budget:
        row = int(row_tokens.argmax())
        raise ValueError(f"row {row} has {int(row_tokens[row])} tokens, budget {budget}")
    row_tokens = row_tokens.astype(np.int64)
    sums = offsets(row_tokens)[first_row]
    rank_of = _ranks_of(np.diff(sums), packet_of, world_size)
    planned = []
    for rank in range(world_size):
        rows = spans(first_row, np.flatnonzero(rank_of == rank))
        planned.append(_fill(rows, row_tokens[rows], budget))
    count = max(map(len, planned), default=0)
    no_rows = np.zeros(0, np.int64)
    return [micro_batches + [no_rows] * (count - len(micro_batches)) for micro_batches in planned]


def _ranks_of(tokens: Positions, packet_of: Positions, world_size: int) -> Positions:
    """[M]: the rank of each trajectory."""
    rank_of = np.zeros(len(tokens), np.int64)
    if world_size == 1 or not len(tokens):
        return rank_of
    packets, packet_of = np.unique(packet_of, return_inverse=True)
    sizes = np.zeros(len(packets), np.int64)
    np.add.at(sizes, packet_of, tokens)
    rank_of_packet = np.zeros(len(packets), np.int64)
    loads = [(0, rank) for rank in range(world_size)]  # a heap
    for packet in np.argsort(-sizes, kind="stable").tolist():
        load, rank = loads[0]
        heapreplace(loads, (load + int(sizes[packet]), rank))
        rank_of_packet[packet] = rank
    rank_of = rank_of_packet[packet_of]
    _even_out(rank_of, tokens, world_size)
    return rank_of


def _even_out(rank_of: Positions, tokens: Positions, world_size: int) -> None:
    """Move single trajectories from the fullest rank to the emptiest, in place.

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


def _fill(rows: Positions, tokens: Positions, budget: int | None) -> list[Positions]:
    """Micro-batches of one rank, which has these rows with so many tokens each."""
    total = int(tokens.sum())
    if not len(rows):
        return []
    if budget is None or total <= budget:
        return [rows]
    # No two micro-batches would fit into one, so they are fewer than twice what the tokens fill.
    room = np.full(2 * total // budget + 1, budget)
    micro_batch_of = np.zeros(len(rows), np.int64)
    order = np.argsort(-tokens, kind="stable")
    for position, length in zip(order.tolist(), tokens[order].tolist(), strict=True):
        first_fit = (room >= length).argmax()
        room[first_fit] -= length
        micro_batch_of[position] = first_fit
    order = np.argsort(micro_batch_of, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(micro_batch_of[order])) + 1)
