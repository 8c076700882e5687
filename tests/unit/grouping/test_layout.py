"""The layout of a batch: every entry of every column comes to its member's place."""

from __future__ import annotations

import numpy as np
import pytest

from streamadv.grouping.layout import Layout, place
from streamadv.trajectory.columns import Array

from .layouts import StoredGroups


def batch_column(stored: StoredGroups, layout: Layout, name: str) -> Array:
    """The column put together from its packets."""
    column = np.full(layout.num_tokens, -1.0)
    for packet, pieces in layout.pieces()[0].items():
        place(stored.columns[layout.packets[packet].key][name], pieces, column)
    return column


@pytest.mark.parametrize("seed", range(5))
def test_columns_come_to_the_places_of_their_members(seed: int) -> None:
    stored = StoredGroups(seed, 6)
    layout = Layout.of(stored.groups)
    trajectories = [trajectory for group in stored.trajectories for trajectory in group]
    selections = [np.arange(len(layout)), np.arange(0, len(layout), 2), np.zeros(0, np.int64)]
    for positions in selections:
        part = layout.select(positions)
        members = [trajectories[position] for position in positions]
        identities = [(member.group_id, member.rollout_index) for member in members]
        assert [part.identity(number) for number in range(len(part))] == identities
        expected = [row.rollout_log_probs for member in members for row in member.rows]
        column = batch_column(stored, part, "rollout_log_probs")
        assert np.array_equal(column, np.concatenate([np.zeros(0), *expected]))
        assert part.num_tokens == len(column)


@pytest.mark.parametrize("seed", range(5))
def test_packets_have_the_tokens_of_all_their_members(seed: int) -> None:
    stored = StoredGroups(seed, 6)
    layout = Layout.of(stored.groups)
    tokens = [len(stored.columns[packet.key]["input_ids"]) for packet in layout.packets]
    assert layout.select([]).pieces()[1] == layout.pieces()[1] == tokens


def test_members_that_lie_side_by_side_are_one_piece() -> None:
    stored = StoredGroups(3, 1, most_members=1)
    whole = Layout.of(stored.groups * 1)
    assert [len(pieces) for pieces in whole.pieces()[0].values()] == [1]


def test_a_layout_of_no_groups() -> None:
    layout = Layout.of([])
    assert (len(layout), layout.num_tokens, layout.pieces()) == (0, 0, ({}, []))
