"""The plan: every row once, within the budget, the same count of micro-batches on every rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.trainer.plan import RowRef, plan


@dataclass(frozen=True)
class Sized:
    row_lengths: list[int]


BUDGET = 16
batches = st.lists(
    st.builds(Sized, st.lists(st.integers(1, BUDGET), min_size=1, max_size=4)), min_size=0, max_size=12
)


@settings(max_examples=200, deadline=None)
@given(batch=batches, world_size=st.integers(1, 5), budget=st.sampled_from([None, BUDGET, 40]))
def test_every_row_is_planned_once_and_fits(batch: list[Sized], world_size: int, budget: int | None) -> None:
    ranks = plan(batch, world_size, budget)
    assert len(ranks) == world_size
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    planned = [ref for rank in ranks for micro_batch in rank for ref in micro_batch]
    rows = [RowRef(i, row) for i, item in enumerate(batch) for row in range(len(item.row_lengths))]
    assert sorted(planned) == rows
    for rank in ranks:
        for micro_batch in rank:
            assert micro_batch == sorted(micro_batch)
            if budget is not None:
                assert sum(batch[ref.trajectory].row_lengths[ref.row] for ref in micro_batch) <= budget
    owners = [{ref.trajectory for micro_batch in rank for ref in micro_batch} for rank in ranks]
    assert not any(a & b for a, b in itertools.combinations(owners, 2)), "a trajectory stays on one rank"
    assert plan(batch, world_size, budget) == ranks


@settings(max_examples=100, deadline=None)
@given(batch=batches.filter(bool), world_size=st.integers(1, 5))
def test_no_rank_has_an_empty_place_that_another_could_fill(batch: list[Sized], world_size: int) -> None:
    ranks = plan(batch, world_size, BUDGET)
    loads = [sum(batch[r.trajectory].row_lengths[r.row] for m in rank for r in m) for rank in ranks]
    assert max(loads) - min(loads) <= max(sum(item.row_lengths) for item in batch)
    for rank in ranks:
        sums = [sum(batch[r.trajectory].row_lengths[r.row] for r in m) for m in rank if m]
        assert all(a + b > BUDGET for a, b in itertools.combinations(sums, 2)), "two would fit into one"
        assert all(rank[: len(sums)]), "empty ones come last"
    assert any(all(rank) for rank in ranks), "no more micro-batches than the fullest rank needs"


def test_without_a_budget_a_rank_runs_its_part_at_once() -> None:
    assert plan([Sized([3, 2]), Sized([9])], 1, None) == [[[RowRef(0, 0), RowRef(0, 1), RowRef(1, 0)]]]
    assert plan([Sized([3])], 2, None) == [[[RowRef(0, 0)]], [[]]]
    assert plan([], 3, None) == [[], [], []]


def test_a_row_above_the_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 17 tokens, budget 16"):
        plan([Sized([17])], 1, BUDGET)
