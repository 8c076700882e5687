"""Results find their trajectories again, in every way that work items cut a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from streamadv.advantage.results import BatchResults, Result, counts_of, misfit, parse_result
from streamadv.batch.record import WorkItem
from streamadv.grouping.groups_log import LoggedGroup, Pointer
from streamadv.grouping.layout import Layout, place
from streamadv.store.keys import ShardKeys
from streamadv.trajectory.columns import Array
from tests.unit.grouping.layouts import StoredGroups


def item_of(number: int, groups: Sequence[LoggedGroup]) -> WorkItem:
    pointers = [Pointer(0, group.entry, group.group_id, len(group.members)) for group in groups]
    return WorkItem(batch="b", k=0, number=number, shard=0, groups=pointers, chain={})


def code_of(layout: Layout) -> Array:
    """A number for each member, which tells who it is."""
    numbers = np.array([int(group.group_id[1:]) for group in layout.groups], np.int64)
    return numbers[layout.group] * 100 + layout.members.table["index"]


def numbers_of(layout: Layout, level: str) -> Array:
    """A number for each trajectory, row, step or token: the code of its member."""
    code = code_of(layout)
    counts = {"trajectory": np.ones(len(layout), np.int64), "row": layout.members.table["rows"]}
    counts |= {"step": layout.members.table["steps"], "token": layout.members.table["tokens"]}
    return np.repeat(code, counts[level])


def result_of(item: WorkItem, layout: Layout, level: str, columns: Sequence[str] = ()) -> Result:
    """A result as a worker publishes it; `layout` has the item's groups of the batch that are published."""
    header = {
        **{"unit": item.number, "level": level, "metrics": {}, "weights": {}, "dead": {}, "columns": columns},
        "groups": counts_of(layout),
    }
    fields = {
        **{b"batch": b"b", b"header": json.dumps(header).encode(), b"output": b"r:0:0:output:x"},
        b"output_bytes": b"0",
        b"rewards": numbers_of(layout, "trajectory").astype("<f8").tobytes(),
        b"step_rewards": numbers_of(layout, "step").astype("<f8").tobytes(),
    }
    if level != "token":
        fields[b"advantages"] = numbers_of(layout, level).astype("<f4").tobytes()
    return parse_result(ShardKeys("r:0:0"), {**fields, b"output": ShardKeys("r:0:0").output("x").encode()})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("level", ["row", "step", "token"])
def test_every_number_goes_back_to_its_owner(seed: int, level: str) -> None:
    """Also if groups died after they were computed, and if a work item computed none."""
    stored = StoredGroups(seed, 7)
    rng = np.random.default_rng(seed)
    parts = np.split(np.arange(7), np.sort(rng.integers(0, 8, 3)))
    results = []
    for number, part in enumerate(parts):
        published = Layout.of([stored.groups[i] for i in part])
        results.append(result_of(item_of(number, [stored.groups[i] for i in part]), published, level))
    living = [group for group in range(7) if group == 0 or rng.random() < 0.7]
    layout = Layout.of([stored.groups[group] for group in living])
    code = code_of(layout)
    batch = BatchResults(results, layout)
    names = {"rewards": "trajectory", "step_rewards": "step"} | (
        {} if level == "token" else {"advantages": level}
    )
    assert batch.level == level
    assert batch.names == set(names)
    lengths = {"trajectory": np.ones(len(layout), np.int64), "row": layout.members.table["rows"]}
    lengths |= {"step": layout.members.table["steps"], "token": layout.members.table["tokens"]}
    for members in (np.arange(len(layout)), np.arange(len(layout))[::2], np.zeros(0, np.int64)):
        for name, of in names.items():
            assert (
                batch.numbers(name, members).tolist()
                == np.repeat(code[members], lengths[of][members]).tolist()
            )
        outputs = [
            numbers_of(Layout.of([stored.groups[i] for i in part]), "token") for part in parts if len(part)
        ]
        assert [len(output) for output in outputs] == batch.num_tokens
        column = np.full(int(lengths["token"][members].sum()), -1)
        for number, pieces in batch.pieces(members).items():
            place(outputs[number], pieces, column)
        assert column.tolist() == np.repeat(code[members], lengths["token"][members]).tolist()


def test_a_batch_without_living_groups() -> None:
    batch = BatchResults([result_of(item_of(0, []), Layout.of([]), "row")], Layout.of([]))
    assert (batch.names, batch.columns, batch.pieces([])) == (set(), [], {})
    assert batch.numbers("rewards", []).tolist() == []


def test_results_of_other_groups_do_not_fit() -> None:
    stored = StoredGroups(0, 3)
    groups = {counts.group_id: counts for counts in counts_of(Layout.of(stored.groups))}
    first = item_of(0, stored.groups[:2])
    right = result_of(first, Layout.of(stored.groups[:2]), "row")
    assert misfit(right, first, groups) is None
    foreign: Any = result_of(first, Layout.of(stored.groups), "row")
    assert misfit(foreign, first, groups) == "it has groups twice, or groups of other work items"
    twice: Any = result_of(first, Layout.of([stored.groups[0], *stored.groups[:2]]), "row")
    assert misfit(twice, first, groups) == "it has groups twice, or groups of other work items"
    short: Any = result_of(first, Layout.of(stored.groups[:1]), "row")
    assert misfit(short, first, groups) == "group g001 has other counts than in the log"
