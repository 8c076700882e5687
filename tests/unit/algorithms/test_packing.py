"""`pack` and `pack_members` make the same batch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamadv.algorithms.packed import PackedBatch, Steps
from streamadv.algorithms.packing import pack, pack_members
from streamadv.errors import TrajectoryError
from streamadv.grouping.layout import Layout, place
from streamadv.trajectory.columns import Array
from streamadv.trajectory.schema import Trajectory
from tests.unit.grouping.layouts import StoredGroups, columns_of

NAMES = ("response_mask", "rollout_log_probs", "ref_log_probs")


def end_to_end(stored: StoredGroups, layout: Layout) -> dict[str, Array]:
    columns = {}
    pieces = layout.pieces()
    for name in NAMES:
        dtype = next(iter(stored.columns.values()))[name].dtype
        columns[name] = np.empty(layout.num_tokens, dtype)
        for packet, parts in pieces.items():
            place(stored.columns[layout.packets[packet].key][name], parts, columns[name])
    return columns


class Packable:
    """A trajectory as `pack` reads one."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.group_id, self.rollout_index = trajectory.group_id, trajectory.rollout_index
        self.reward, self.rewards = trajectory.reward, trajectory.rewards
        self.status, self.steps = trajectory.status, trajectory.steps
        self.is_baseline = trajectory.role == "baseline"
        self.row_lengths = [len(row) for row in trajectory.rows]
        self.row_trainable = [int(np.count_nonzero(row.response_mask)) for row in trajectory.rows]


def tensors_of(batch: PackedBatch) -> dict[str, Any]:
    values = {
        f.name: getattr(batch, f.name) for f in fields(PackedBatch) if f.name not in ("steps", "layout")
    }
    values |= {f"steps.{f.name}": getattr(batch.steps, f.name) for f in fields(Steps)}
    values |= {f"columns.{name}": column for name, column in values.pop("columns").items()}
    return values | {f"components.{name}": column for name, column in values.pop("components").items()}


def assert_same(got: PackedBatch, expected: PackedBatch) -> None:
    values, expected_values = tensors_of(got), tensors_of(expected)
    assert list(values) == list(expected_values)
    for name, value in values.items():
        other = expected_values[name]
        if isinstance(value, Tensor):
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name
        else:
            assert value == other, name


@pytest.mark.parametrize("seed", range(8))
def test_the_same_batch_from_arrays_as_from_single_trajectories(seed: int) -> None:
    stored = StoredGroups(seed, 5)
    trajectories = [trajectory for group in stored.trajectories for trajectory in group]
    layout = Layout.of(stored.groups)
    for positions in (np.arange(len(layout)), np.arange(1, len(layout), 3), np.zeros(0, np.int64)):
        part = layout.select(positions)
        members: list[Any] = [Packable(trajectories[position]) for position in positions]
        columns = [
            {name: columns_of(trajectories[position])[name] for name in NAMES} for position in positions
        ]
        assert_same(pack_members(part), pack(members))
        if members:
            assert_same(pack_members(part, end_to_end(stored, part)), pack(members, columns))


def test_errors_name_the_member() -> None:
    stored = StoredGroups(1, 3)
    layout = Layout.of(stored.groups)
    backwards = layout.select(np.arange(len(layout))[::-1])
    with pytest.raises(TrajectoryError, match=r"member \('g00.', \d+\) follows .*: sort by"):
        pack_members(backwards)
    with pytest.raises(TrajectoryError, match=r"member .* follows"):
        pack_members(Layout.of(stored.groups[::-1]))
    with pytest.raises(TrajectoryError, match=r"member .* follows"):
        pack_members(layout.select([0, 0]))
    table = layout.members.table.copy()
    table["reward"][1] = np.nan
    index = int(table["index"][1])
    wrong = replace(layout, members=replace(layout.members, table=table))
    with pytest.raises(TrajectoryError, match=rf"member \('g000', {index}\) has reward nan, needs a finite"):
        pack_members(wrong)
    table["flags"][1] = 0
    with pytest.raises(TrajectoryError, match="has reward None: leave unscorable members out"):
        pack_members(wrong)


def test_columns_that_do_not_fit_are_errors() -> None:
    stored = StoredGroups(2, 3)
    layout = Layout.of(stored.groups)
    columns = end_to_end(stored, layout)
    with pytest.raises(TrajectoryError, match=r"response_mask has shape \(1,\), needs"):
        pack_members(layout, columns | {"response_mask": np.ones(1, np.uint8)})
    with pytest.raises(TrajectoryError, match="has dtype object, needs numbers"):
        pack_members(layout, columns | {"values": np.array([None] * layout.num_tokens)})
    mask = np.ones(layout.num_tokens, np.uint8)
    full = layout.members.rows["tokens"] == layout.members.rows["trainable"]
    row = int(np.flatnonzero(~full)[0])
    member = int(np.searchsorted(layout.members.first_row, row, side="right")) - 1
    group_id, index = layout.identity(member)
    in_member = row - int(layout.members.first_row[member])
    with pytest.raises(
        TrajectoryError, match=rf"member \('{group_id}', {index}\) row {in_member}: response_mask has"
    ):
        pack_members(layout, columns | {"response_mask": mask})
