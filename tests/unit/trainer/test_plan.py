"""The plan: every row once, within the budget, the same count of micro-batches on every rank."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.trainer.plan import Rank, RowRef, plan, share_of
from streamadv.trajectory.reference import Reference
from streamadv.trajectory.schema import Role

from ...support import CPU


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


def reference(number: int, rows: list[int], role: Role = Role.TRAIN) -> Reference:
    return Reference(
        **{"group_id": f"g{number // 2}", "rollout_index": number % 2, "key": f"k{number}", "size": 1},
        **{"row_lengths": tuple(rows), "row_trainable": tuple(rows), "role": role},
    )


@settings(max_examples=100, deadline=None)
@given(batch=batches, world_size=st.integers(1, 4), chance=st.randoms(use_true_random=False))
def test_shares_have_every_trajectory_once_without_those_left_out(
    batch: list[Sized], world_size: int, chance: random.Random
) -> None:
    references = [reference(number, item.row_lengths) for number, item in enumerate(batch)]
    left_out = {(r.group_id, r.rollout_index) for r in references if chance.random() < 0.3}
    ranks = [Rank(number, world_size, CPU) for number in range(world_size)]
    shares = [share_of(references, BUDGET, rank, left_out) for rank in ranks]
    rest = [r.key for r in references if (r.group_id, r.rollout_index) not in left_out]
    assert sorted(r.key for share in shares for r in share.references) == sorted(rest)
    for share, rank in zip(shares, ranks, strict=True):
        assert share.batch_references == references, "the counts of a batch are those of all ranks"
        rows = sorted(ref for refs in share.rows for ref in refs)
        assert rows == [
            RowRef(i, n) for i, r in enumerate(share.references) for n in range(len(r.row_lengths))
        ]
        whole = share_of(references, BUDGET, rank)
        assert len(share.rows) == len(whole.rows), "the ranks stay in step"
        assert [r.key for r in share.references] == [r.key for r in whole.references if r.key in rest]


def test_baselines_and_rows_above_the_budget_are_in_no_share() -> None:
    references = [
        reference(0, [4]),
        reference(1, [4], Role.BASELINE),
        reference(2, [BUDGET + 1]),
        reference(3, [2]),
    ]
    share = share_of(references, BUDGET, Rank(0, 1, CPU))
    assert share.batch_references == share.references == [references[0], references[3]]
    assert share.rows == [[RowRef(0, 0), RowRef(1, 0)]]
