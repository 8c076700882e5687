"""The plan: every row once, within the budget, the same count of micro-batches on every rank."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.grouping.layout import Layout
from streamadv.trainer.plan import Rank, plan, share_of
from streamadv.trajectory.columns import Array
from streamadv.trajectory.members import offsets
from tests.shares import examples
from tests.support import CPU
from tests.unit.grouping.layouts import StoredGroups

BUDGET = 16


@dataclass(frozen=True)
class Rows:
    """What a plan is made for."""

    tokens: list[list[int]]  # of each trajectory's rows
    packet_of: list[int]

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        counts = np.array([len(rows) for rows in self.tokens], np.int64)
        tokens = np.array([length for rows in self.tokens for length in rows], np.uint32)
        return tokens, offsets(counts), np.array(self.packet_of, np.int64)

    @property
    def owner(self) -> list[int]:
        """The trajectory of each row."""
        return [member for member, rows in enumerate(self.tokens) for _ in rows]

    def plan(
        self, world_size: int, budget: int | None, group_of: list[int] | None = None
    ) -> list[list[list[int]]]:
        groups = None if group_of is None else np.array(group_of, np.int64)
        planned = plan(*self.arrays, world_size, budget, groups)
        return [[rows.tolist() for rows in rank] for rank in planned]

    def loads(self, ranks: list[list[list[int]]]) -> list[int]:
        tokens = self.arrays[0].tolist()
        return [sum(tokens[row] for rows in rank for row in rows) for rank in ranks]


@st.composite
def batches(draw: st.DrawFn, least: int = 0) -> Rows:
    rows = st.lists(st.integers(1, BUDGET), min_size=1, max_size=4)
    tokens = draw(st.lists(rows, min_size=least, max_size=12))
    numbers = st.integers(0, draw(st.integers(0, 12)))
    return Rows(tokens, draw(st.lists(numbers, min_size=len(tokens), max_size=len(tokens))))


@settings(max_examples=examples(200), deadline=None)
@given(batch=batches(), world_size=st.integers(1, 5), budget=st.sampled_from([None, BUDGET, 40]))
def test_every_row_is_planned_once_and_fits(batch: Rows, world_size: int, budget: int | None) -> None:
    ranks = batch.plan(world_size, budget)
    assert len(ranks) == world_size
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    planned = [row for rank in ranks for micro_batch in rank for row in micro_batch]
    assert sorted(planned) == list(range(len(batch.owner)))
    tokens = batch.arrays[0].tolist()
    for rank in ranks:
        for micro_batch in rank:
            assert micro_batch == sorted(micro_batch)
            if budget is not None:
                assert sum(tokens[row] for row in micro_batch) <= budget
    owners = [{batch.owner[row] for micro_batch in rank for row in micro_batch} for rank in ranks]
    assert not any(a & b for a, b in itertools.combinations(owners, 2)), "a trajectory stays on one rank"
    assert batch.plan(world_size, budget) == ranks


@settings(max_examples=examples(200), deadline=None)
@given(batch=batches(least=1), world_size=st.integers(1, 5))
def test_no_rank_has_an_empty_place_that_another_could_fill(batch: Rows, world_size: int) -> None:
    ranks = batch.plan(world_size, BUDGET)
    loads, tokens = batch.loads(ranks), batch.arrays[0].tolist()
    assert max(loads) - min(loads) <= max(map(sum, batch.tokens))
    for rank in ranks:
        sums = [sum(tokens[row] for row in rows) for rows in rank if rows]
        assert all(a + b > BUDGET for a, b in itertools.combinations(sums, 2)), "two would fit into one"
        assert all(rank[: len(sums)]), "empty ones come last"
    assert any(all(rank) for rank in ranks), "no more micro-batches than the fullest rank needs"


@settings(max_examples=examples(300), deadline=None)
@given(
    batch=batches(least=1),
    world_size=st.integers(1, 4),
    budget=st.sampled_from([None, BUDGET, 40, 100]),
    data=st.data(),
)
def test_groups_that_are_kept_stay_together(
    batch: Rows, world_size: int, budget: int | None, data: st.DataObject
) -> None:
    members = len(batch.tokens)
    group_of = sorted(data.draw(st.lists(st.integers(0, 4), min_size=members, max_size=members)))
    ranks = batch.plan(world_size, budget, group_of)
    planned = [row for rank in ranks for micro_batch in rank for row in micro_batch]
    assert sorted(planned) == list(range(len(batch.owner)))
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    tokens = batch.arrays[0].tolist()
    for group in set(group_of):
        rows = {row for row, owner in enumerate(batch.owner) if group_of[owner] == group}
        places = [rows & set(rows_of) for rank in ranks for rows_of in rank if rows & set(rows_of)]
        assert sum(any(rows & set(rows_of) for rows_of in rank) for rank in ranks) == 1, "on one rank"
        size = sum(tokens[row] for row in rows)
        if budget is None or size <= budget:
            assert places == [rows]
        else:
            sums = [sum(tokens[row] for row in place) for place in places]
            assert all(a + b > budget for a, b in itertools.combinations(sums, 2))
    for rank in ranks:
        assert all(budget is None or sum(tokens[row] for row in rows) <= budget for rows in rank)


@pytest.mark.parametrize(("world_size", "most_reads"), [(8, 1.1), (16, 1.2), (32, 1.5)])
def test_few_packets_are_read_by_several_ranks(world_size: int, most_reads: float) -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 0.6, 512).astype(int).tolist()
    batch = Rows([[length] for length in lengths], [number // 8 for number in range(512)])
    ranks = batch.plan(world_size, None)
    loads = batch.loads(ranks)
    assert max(loads) <= 1.01 * np.mean(loads) or world_size == 32
    reads = sum(len({batch.packet_of[row] for rows in rank for row in rows}) for rank in ranks)
    assert reads / 64 <= most_reads


def test_without_a_budget_a_rank_runs_its_part_at_once() -> None:
    assert Rows([[3, 2], [9]], [0, 0]).plan(1, None) == [[[0, 1, 2]]]
    assert Rows([[3]], [0]).plan(2, None) == [[[0]], [[]]]
    assert Rows([], []).plan(3, None) == [[], [], []]


def test_a_row_above_the_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="row 1 has 17 tokens, budget 16"):
        Rows([[3], [17]], [0, 0]).plan(1, BUDGET)


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 99), world_size=st.integers(1, 4), budget=st.sampled_from([None, 40, 20]))
def test_shares_have_every_trajectory_once_without_those_left_out(
    seed: int, world_size: int, budget: int | None
) -> None:
    batch = Layout.of(StoredGroups(seed, 5).groups)
    longest = [int(batch.members.select([m]).rows["tokens"].max()) for m in range(len(batch))]
    trained = [
        batch.identity(member)
        for member in range(len(batch))
        if not batch.members.is_baseline[member] and (budget is None or longest[member] <= budget)
    ]
    chance = random.Random(seed)
    left_out = {identity for identity in trained if chance.random() < 0.3}
    ranks = [Rank(number, world_size, CPU) for number in range(world_size)]
    shares = [share_of(batch, budget, rank, left_out) for rank in ranks]
    rest = sorted(set(trained) - left_out)
    assert sorted(identity for share in shares for identity in identities(share.own)) == rest
    for share, rank in zip(shares, ranks, strict=True):
        assert identities(share.trained) == trained, "the counts of a batch are those of all ranks"
        assert [batch.identity(position) for position in share.positions] == identities(share.own)
        rows = sorted(row for rows in share.rows for row in rows.tolist())
        assert rows == list(range(len(share.own.members.rows)))
        whole = share_of(batch, budget, rank)
        assert len(share.rows) == len(whole.rows), "the ranks stay in step"
        assert identities(share.own) == [each for each in identities(whole.own) if each in rest]


def identities(layout: Layout) -> list[tuple[str, int]]:
    return [layout.identity(member) for member in range(len(layout))]
