"""Batches: which groups, in which items of work, and scripts that may be repeated at any point."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms import build_chain
from streamadv.batch import commit as batch_commit
from streamadv.batch import exclusion, recovery, selection
from streamadv.batch import record as batch_record
from streamadv.batch.record import BatchRecord, Death
from streamadv.batch.selection import NamingRules
from streamadv.batch.work import ITEM_TRAJECTORIES, apply, work_items
from streamadv.errors import BatchLostError, EpochFencedError
from streamadv.grouping.groups_log import LoggedGroup, Pointer, packets_of, read_groups, read_log
from streamadv.run import Run
from streamadv.store.connection import Connection
from streamadv.trajectory.reference import Reference
from tests.support import compute_all, group_all, join, ledger, problems, producing, push_groups

CHAIN = build_chain("grpo").config.model_dump(mode="json")
WHOLE_BATCH = build_chain("verl/gpg").config.model_dump(mode="json")


def reference(
    group_id: str, versions: tuple[int, int] | None = None, columns: tuple[str, ...] = ()
) -> Reference:
    return Reference(
        **{"group_id": group_id, "rollout_index": 0, "key": "k", "size": 1, "versions": versions},
        **{"row_lengths": [3], "row_trainable": [2], "columns": list(columns)},
    )


def group(number: int, **changes: Any) -> LoggedGroup:
    members = changes.pop("members", (reference(f"g{number}"),))
    fields: dict[str, Any] = {
        **{"shard": 0, "entry": f"5-{number}", "group_id": f"g{number}", "size": 1, "data_source": None},
        **{
            "outcome": "complete",
            "opened_ms": 0,
            "epoch": 1,
            "version": None,
            "count": len(members),
            "payloads": (),
            **packets_of(members),
        },
    }
    return LoggedGroup(**{**fields, **changes})


def test_groups_of_one_millisecond_stay_in_the_order_of_the_log() -> None:
    found = sorted((group(number) for number in reversed(range(30))), key=lambda each: each.position)
    assert [each.entry for each in found] == [f"5-{number}" for number in range(30)]


@pytest.mark.parametrize(
    ("rules", "changes", "reason"),
    [
        ({}, {}, None),
        ({"trained": frozenset({"g0"})}, {}, "trained"),
        ({"drop_after": 2}, {"members": (reference("g0", (8, 9)),)}, None),
        ({"drop_after": 2}, {"members": (reference("g0", (9, 9)), reference("g0", (7, 20)))}, "stale"),
        ({"drop_after": 2}, {"members": (reference("g0"),)}, None),
        ({"drop_after": 0}, {"members": (reference("g0", (11, 11)),)}, None),
        ({"drop_after": None}, {"members": (reference("g0", (0, 0)),)}, None),
        ({"needs": frozenset({"values"})}, {}, "dead:missing_column"),
        ({"needs": frozenset({"values"})}, {"members": (reference("g0", None, ("values",)),)}, None),
        ({"rolled_back_above": 5, "branch": 2}, {"version": 6}, "rolled_back"),
        ({"rolled_back_above": 5, "branch": 2}, {"version": 5}, None),
        ({"rolled_back_above": 5, "branch": 1}, {"version": 6}, None),
        ({"rolled_back_above": 5, "branch": 2}, {}, None),
    ],
)
def test_why_a_group_is_not_trained_on(
    rules: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    assert NamingRules(**{"drop_after": None, **rules}).reason_against(group(0, **changes), 10) == reason


def test_the_first_fit_groups_are_chosen_and_only_those_before_them_refused() -> None:
    rules = NamingRules(drop_after=None, trained=frozenset({"g0", "g2", "g5"}))
    chosen, refused = selection.choose([group(number) for number in range(8)], 0, 3, rules)
    assert [each.group_id for each in chosen] == ["g1", "g3", "g4"]
    assert [(each.group_id, reason) for each, reason in refused] == [("g0", "trained"), ("g2", "trained")]


pointers = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150)), min_size=1, max_size=20)


@settings(max_examples=80, deadline=None)
@given(found=pointers, batch_scope=st.booleans())
def test_every_group_is_in_one_work_item_of_its_shard(
    found: list[tuple[int, int]], batch_scope: bool
) -> None:
    groups = [Pointer(shard, f"1-{n}", f"g{n:02}", size) for n, (shard, size) in enumerate(found)]
    record = BatchRecord(
        k=3,
        id="3-x",
        epoch=1,
        groups=groups,
        chain=WHOLE_BATCH if batch_scope else CHAIN,
        late=["values"],
        kl_coefficient=0.5,
    )
    items = work_items(record)
    assert [item.number for item in items] == list(range(len(items)))
    published = [p for item in items for p in item.groups if p.shard == item.shard]
    assert sorted(published) == sorted(groups)
    assert {(item.k, item.batch, tuple(item.late), item.kl_coefficient) for item in items} == {
        (3, "3-x", ("values",), 0.5)
    }
    if batch_scope:
        assert all(item.groups == groups for item in items)
        return
    for item in items:
        assert len(item.groups) == 1 or sum(p.trajectories for p in item.groups) <= ITEM_TRAJECTORIES
    for one, two in itertools.pairwise(items):
        if one.shard == two.shard:
            assert sum(p.trajectories for p in one.groups) + two.groups[0].trajectories > ITEM_TRAJECTORIES


@pytest.fixture
def named(fake: Connection) -> tuple[Run, BatchRecord]:
    """A run of two shards with batch 0 named and epoch 1 taken."""
    with producing(fake, "r", {"shards": 2}) as producer:
        push_groups(producer, 8)
    run = join(fake, "r")
    group_all(run)
    run.home.call("take_epoch", ["", 0, "job", "", "", "0123456789ab", "", "", "0"])
    logged = [each for shard in range(2) for each in read_log(run, shard, "0-0", 100)]
    record = selection.make_record(0, 1, sorted(logged, key=lambda each: each.group_id)[:6], chain=CHAIN)
    assert batch_record.name_batch(run, record, record.epoch)
    return run, record


def test_a_batch_is_named_once(named: tuple[Run, BatchRecord]) -> None:
    run, record = named
    assert not batch_record.name_batch(run, selection.make_record(0, 1, [], chain=CHAIN), 1)
    assert batch_record.read_records(run) == {0: record}
    assert [pointer.group_id for pointer in record.groups] == sorted(p.group_id for p in record.groups)


def test_naming_applying_and_committing_may_be_repeated(named: tuple[Run, BatchRecord]) -> None:
    run, record = named
    for _ in range(3):
        apply(run, record, 1)
        assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (12, 4)
        assert problems(run) == []
    assert compute_all(run) == 2
    for _ in range(3):
        batch_commit.commit(run, record, 1)
        assert (ledger(run)["trained"], ledger(run)["in_flight"]) == (12, 0)
        assert problems(run) == []
    assert batch_record.read_records(run) == {}
    with pytest.raises(BatchLostError, match="is gone: restart the trainer"):
        read_groups(run, record.groups)


def test_the_ledger_holds_in_the_middle_of_a_commit(named: tuple[Run, BatchRecord]) -> None:
    """Between the steps of a commit: other processes may look, and the trainer may die."""
    run, record = named
    apply(run, record, 1)
    compute_all(run)
    for shard in run.shards:
        batch_commit.commit_groups(run, shard, record, record.in_shard(shard.index)[:1], 1, {})
        assert problems(run) == []
    for shard in run.shards:
        batch_commit.commit_groups(run, shard, record, record.in_shard(shard.index), 1, {})
        assert problems(run) == []
        batch_commit.close(shard, record.id, 1, batch_commit.read_results(run))
        assert problems(run) == []
    assert ledger(run)["trained"] == 12


def test_groups_taken_out_of_the_log_are_counted_once(named: tuple[Run, BatchRecord]) -> None:
    run, record = named
    taken = {pointer.group_id for pointer in record.groups}
    left = [g for shard in range(2) for g in read_log(run, shard, "0-0", 100) if g.group_id not in taken]
    for _ in range(2):
        exclusion.drop(run, [(left[0], "stale"), (left[1], "trained")], 1)
        assert (ledger(run)["dropped"], ledger(run)["trained"]) == ({"stale": 2}, 2)
    assert problems(run) == []


@pytest.mark.parametrize("seed", range(12))
def test_a_group_has_one_owner(named: tuple[Run, BatchRecord], seed: int) -> None:
    """Data loss may leave a shard with batches nobody knows, whose groups are named again, dropped, or committed."""
    run, draw = named[0], random.Random(seed)
    logged = {group.group_id: group for shard in range(2) for group in read_log(run, shard, "0-0", 100)}
    records = [
        selection.make_record(k, 1, draw.sample(list(logged.values()), 5), chain=CHAIN) for k in range(4)
    ]
    owners: dict[str, str] = {}
    applied: set[str] = set()

    def apply_once(record: BatchRecord) -> None:
        apply(run, record, 1)
        if record.id not in applied:
            owners.update((p.group_id, record.id) for p in record.groups if p.group_id in logged)
        applied.add(record.id)

    def undo(record: BatchRecord) -> None:
        recovery.undo_unknown(run, [each for each in records if each is not record], 1)
        applied.discard(record.id)
        for group_id in [group_id for group_id, owner in owners.items() if owner == record.id]:
            del owners[group_id]

    def leave_log(group_ids: list[str]) -> None:
        for group_id in group_ids:
            logged.pop(group_id, None)
            owners.pop(group_id, None)

    def commit(record: BatchRecord) -> None:
        batch_commit.commit(run, record, 1)
        applied.discard(record.id)
        leave_log([pointer.group_id for pointer in record.groups])

    def drop(_: BatchRecord) -> None:
        group = draw.choice([*logged.values()])
        exclusion.drop(run, [(group, "trained")], 1)
        leave_log([group.group_id])

    def dead_letter(record: BatchRecord) -> None:
        group = draw.choice([*logged.values()])
        batch = record.id if group.pointer in record.groups else ""
        exclusion.dead_letter(run, group, Death("crashed", ""), batch, 1)
        if not batch or batch in applied:
            leave_log([group.group_id])

    steps = [apply_once, apply_once, apply_once, undo, commit, drop, dead_letter]
    for _ in range(12):
        if logged:
            draw.choice(steps)(draw.choice(records))
        in_flight = sum(len(logged[group_id].members) for group_id in owners)
        grouped = sum(len(group.members) for group in logged.values()) - in_flight
        assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (in_flight, grouped)
        assert problems(run) == []


def test_an_older_epoch_changes_nothing(named: tuple[Run, BatchRecord]) -> None:
    run, record = named
    run.home.call("take_epoch", ["", 0, "job", "", "", "0123456789ab", "", "", "0"])
    for shard in run.shards:
        shard.call("set_trainer", [2, 0, "", 1, "", "0"])
    before = ledger(run)
    logged = read_log(run, 0, "0-0", 1) or read_log(run, 1, "0-0", 1)
    for attempt in (
        lambda: batch_record.name_batch(run, selection.make_record(1, 1, [], chain=CHAIN), 1),
        lambda: apply(run, record, 1),
        lambda: batch_commit.commit(run, record, 1),
        lambda: exclusion.drop(run, [(logged[0], "stale")], 1),
    ):
        with pytest.raises(EpochFencedError, match="a newer trainer has taken over"):
            attempt()
    assert ledger(run) == before
    assert problems(run) == []
