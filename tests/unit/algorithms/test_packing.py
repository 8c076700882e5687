"""Batches of arrays and of whole trajectories are the same, and what their trajectories say."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamadv.algorithms.packed import PackedBatch, Steps
from streamadv.algorithms.packing import pack_members, pack_trajectories
from streamadv.errors import TrajectoryError
from streamadv.grouping.layout import Layout, place
from streamadv.trajectory.columns import Array
from tests.unit.grouping.layouts import StoredGroups

NAMES = ("response_mask", "rollout_log_probs", "ref_log_probs")


def end_to_end(stored: StoredGroups, layout: Layout) -> dict[str, Array]:
    columns = {}
    pieces = layout.pieces()[0]
    for name in NAMES:
        dtype = next(iter(stored.columns.values()))[name].dtype
        columns[name] = np.empty(layout.num_tokens, dtype)
        for packet, parts in pieces.items():
            place(stored.columns[layout.packets[packet].key][name], parts, columns[name])
    return columns


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
def test_the_same_batch_from_arrays_as_from_whole_trajectories(seed: int) -> None:
    stored = StoredGroups(seed, 5)
    trajectories = [trajectory for group in stored.trajectories for trajectory in group]
    layout = Layout.of(stored.groups)
    for positions in (np.arange(len(layout)), np.arange(1, len(layout), 3), np.zeros(0, np.int64)):
        part = layout.select(positions)
        chosen = [trajectories[position] for position in positions]
        assert_same(pack_members(part), pack_trajectories(chosen[::-1], ()))
        if chosen:
            assert_same(pack_members(part, end_to_end(stored, part)), pack_trajectories(chosen, NAMES))


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_says_what_its_trajectories_say(seed: int) -> None:
    trajectories = [trajectory for group in StoredGroups(seed, 5).trajectories for trajectory in group]
    batch = pack_trajectories(trajectories, NAMES)
    bounds, states = batch.cu_seqlens.tolist(), dict[str, int]()
    rows = [(m, row) for m, trajectory in enumerate(trajectories) for row in trajectory.rows]
    assert batch.row_trajectory.tolist() == [m for m, _ in rows]
    for number, (m, row) in enumerate(rows):
        span, is_baseline = slice(bounds[number], bounds[number + 1]), trajectories[m].role == "baseline"
        assert batch.columns["ref_log_probs"][span].tolist() == row.ref_log_probs.tolist()
        mask = 0 * row.response_mask if is_baseline else row.response_mask
        assert batch.columns["response_mask"][span].tolist() == mask.tolist()
        assert batch.row_trainable[number] == mask.sum()
    found = zip(
        *(getattr(batch.steps, name).tolist() for name in ("trajectory", "row", "start", "end", "rewards")),
        batch.steps.state.tolist(),
        strict=True,
    )
    for m, trajectory in enumerate(trajectories):
        first = batch.row_offsets[m]
        for step in trajectory.steps:
            start = bounds[first + step.row]
            state = -1 if step.state_key is None else states.setdefault(step.state_key, len(states))
            span = (start + step.start, start + step.end)
            assert next(found) == (m, first + step.row, *span, step.reward, state)
        named = {name: values[m].item() for name, values in batch.components.items()}
        assert named == {name: trajectory.rewards.get(name, 0.0) for name in batch.components}
    assert next(found, None) is None
    ids = [trajectory.group_id for trajectory in trajectories]
    assert batch.trajectory_group.tolist() == [list(dict.fromkeys(ids)).index(one) for one in ids]
    assert batch.rewards.tolist() == [trajectory.reward for trajectory in trajectories]


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
