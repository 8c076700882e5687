"""Batches: which groups, in which items of work, and scripts that may be repeated at any point."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms import build_chain
from streamadv.batch import ends, recovery, selection
from streamadv.batch import leader as batch_leader
from streamadv.batch import record as batch_record
from streamadv.batch.leader import Candidates
from streamadv.batch.progress import NamedBatch, Progress
from streamadv.batch.record import (
    ITEM_BYTES,
    ITEM_TRAJECTORIES,
    BatchRecord,
    Death,
    NamingSettings,
    apply,
    work_items,
)
from streamadv.errors import BatchLostError, EpochFencedError
from streamadv.grouping.groups_log import LoggedGroup, Pointer, read_entries, read_groups, read_log, sums_of
from streamadv.run import Run
from streamadv.run.run import Shard
from streamadv.store.connection import Connection
from streamadv.trajectory.members import (
    BASELINE,
    HAS_REWARD,
    HAS_VERSION,
    MEMBER,
    NO_MEMBERS,
    ROW,
    Members,
    offsets,
)
from streamadv.trajectory.packet import StoredPacket
from tests.shares import examples
from tests.support import compute_all, group_all, ledger, problems, pushed_run, some_of

CHAIN = build_chain("grpo").config.model_dump(mode="json")
WITH_KL = build_chain({"estimator": "grpo", "kl": {"coefficient": 0.1}}).config.model_dump(mode="json")
WHOLE_BATCH = build_chain("verl/gpg").config.model_dump(mode="json")
#: Of the session that has the run `named`.
FENCE = "1 1-0123456789ab"


def members(
    versions: Sequence[tuple[int, int] | None] = (None,),
    tokens: Sequence[Sequence[int]] = (),
    baseline: Sequence[bool] = (),
) -> Members:
    """Trajectories with these versions, tokens of rows (default: one row of 3), and roles."""
    table = np.zeros(len(versions), MEMBER)
    tokens = tokens or [[3]] * len(versions)
    table["index"], table["rows"] = np.arange(len(versions)), [len(rows) for rows in tokens]
    table["tokens"] = [sum(rows) for rows in tokens]
    table["flags"] = [HAS_REWARD | HAS_VERSION * (each is not None) for each in versions]
    table["flags"] |= BASELINE * np.array(baseline or [False] * len(versions), np.uint8)
    table["oldest"], table["newest"] = zip(*(each or (0, 0) for each in versions), strict=True)
    rows = np.zeros(sum(map(len, tokens)), ROW)
    rows["tokens"] = rows["trainable"] = [length for rows in tokens for length in rows]
    return Members(table, rows)


ONE_MEMBER = members()


def group(
    number: int, members: Members = ONE_MEMBER, columns: tuple[str, ...] = (), **changes: Any
) -> LoggedGroup:
    """A group that came in one packet."""
    key, count = f"payload-{number}", len(members)
    fields: dict[str, Any] = {
        **{"shard": 0, "entry": f"5-{number}", "group_id": f"g{number}", "size": 1, "data_source": None},
        **{"outcome": "complete", "opened_ms": 0, "epoch": 1, "version": None, "count": count},
        **{"payloads": ((key, 100),), "packets": (StoredPacket(key, 100, 1, columns, members),)},
        **{"members": members, "packet_of": (0,) * count, "position_of": tuple(range(count))},
    }
    if count:
        [fields["sums"]] = sums_of(members, offsets(np.array([count])))
    return LoggedGroup(**{**fields, **changes})


def rules(
    drop_after: int | None = None,
    needs: frozenset[str] = frozenset(),
    quotas: dict[str, float] | None = None,
    *,
    trained: Sequence[str] = (),
    named: Sequence[str] = (),
    restored: int | None = None,
    branch: int = 0,
    keep_rolled_back: bool = False,
) -> tuple[NamingSettings, Progress]:
    """What decides whether a group is trained on."""
    progress = Progress()
    progress.uncommitted = dict.fromkeys(trained, 0)
    progress.restored, progress.branch = restored, branch
    pointers = [Pointer(0, f"4-{number}", name, 1) for number, name in enumerate(named)]
    progress.batches[0] = NamedBatch(BatchRecord(k=0, id="0-0", epoch=1, groups=pointers, chain=CHAIN))
    naming = NamingSettings(
        *(8, 1, 1, None, drop_after, keep_rolled_back, needs, CHAIN, (), None), quotas=quotas or {}
    )
    return naming, progress


def test_groups_of_one_millisecond_stay_in_the_order_of_the_log() -> None:
    found = sorted((group(number) for number in reversed(range(30))), key=lambda each: each.position)
    assert [each.entry for each in found] == [f"5-{number}" for number in range(30)]


@pytest.mark.parametrize(
    ("given", "changes", "reason"),
    [
        ({}, {}, None),
        ({"trained": ["g0"]}, {}, "trained"),
        ({"drop_after": 2}, {"members": members([(8, 9)])}, None),
        ({"drop_after": 2}, {"members": members([(9, 9), (7, 20)])}, "stale"),
        ({"drop_after": 2}, {"members": members([None])}, None),
        ({"drop_after": 0}, {"members": members([(11, 11)])}, None),
        ({"drop_after": None}, {"members": members([(0, 0)])}, None),
        ({"needs": frozenset({"values"})}, {}, "dead:missing_column"),
        ({"needs": frozenset({"values"})}, {"columns": ("values",)}, None),
        ({"restored": 5, "branch": 2}, {"version": 6}, "rolled_back"),
        ({"restored": 5, "branch": 2, "keep_rolled_back": True}, {"version": 6}, None),
        ({"restored": 5, "branch": 2}, {"version": 5}, None),
        ({"restored": 5, "branch": 1}, {"version": 6}, None),
        ({"restored": 5, "branch": 2}, {}, None),
        ({}, {"members": NO_MEMBERS, "problem": "of any kind"}, "dead:undecodable"),
        ({}, {"members": NO_MEMBERS, "malformed": True}, "malformed"),
    ],
)
def test_why_a_group_is_not_trained_on(
    given: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    found, _ = selection.reason_against(group(0, **changes), 10, *rules(**given))
    assert found == reason


some_versions = st.none() | st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda v: (min(v), max(v)))
some_members = st.lists(
    st.tuples(some_versions, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans()),
    min_size=1,
    max_size=4,
).map(lambda each: members(*map(list, zip(*each, strict=True))))
some_groups = st.lists(
    st.fixed_dictionaries(
        {"members": some_members, "columns": st.sampled_from([(), ("a",), ("a", "b"), ("b", "values")])},
        optional={"version": st.integers(0, 9), "problem": st.just("broken"), "epoch": st.integers(0, 3)},
    ),
    max_size=12,
).map(lambda found: [group(number, **changes) for number, changes in enumerate(found)])


@settings(max_examples=examples(150), deadline=None)
@given(
    groups=some_groups,
    k=st.integers(0, 12),
    limit=st.integers(1, 12),
    drop_after=st.none() | st.integers(0, 6),
    restored=st.none() | st.integers(0, 6),
    needs=st.sampled_from([frozenset[str](), frozenset({"a"}), frozenset({"b"})]),
)
def test_rules_for_many_groups_are_those_for_each(
    groups: list[LoggedGroup],
    k: int,
    limit: int,
    drop_after: int | None,
    restored: int | None,
    needs: frozenset[str],
) -> None:
    def expected(each: LoggedGroup) -> str | None:
        if each.group_id == "g3":
            return "trained"
        if each.problem:
            return "dead:undecodable"
        if restored is not None and each.version is not None and each.version > restored and each.epoch < 2:
            return "rolled_back"
        for flags, oldest in each.members.table[["flags", "oldest"]].tolist():
            if drop_after is not None and flags & HAS_VERSION and max(0, k - oldest) > drop_after:
                return "stale"
        return None if needs <= set(each.packets[0].columns) else "dead:missing_column"

    by = rules(drop_after, needs, trained=["g3"], restored=restored, branch=2)
    chosen, refused = selection.choose(groups, k, limit, *by)
    fit = [each for each in groups if expected(each) is None]
    before = groups if len(fit) < limit else groups[: groups.index(fit[limit - 1])]
    assert chosen == fit[:limit]
    found = [(each.group_id, reason) for each, reason in refused]
    assert found == [(each.group_id, reason) for each in before if (reason := expected(each))]


@settings(max_examples=examples(150), deadline=None)
@given(groups=some_groups, budget=st.none() | st.integers(1, 10))
def test_commit_counts_each_member_once(groups: list[LoggedGroup], budget: int | None) -> None:
    for each in groups:
        found = ends.commit_arguments(each, budget)
        states = Counter[str]()
        rows = iter(each.members.rows["tokens"].tolist())
        for count, flags in each.members.table[["rows", "flags"]].tolist():
            longest = max(itertools.islice(rows, count))
            oversize = "oversize" if budget is not None and longest > budget else "trained"
            states["baseline" if flags & BASELINE else oversize] += 1
        numbers = [states[state] for state in ("trained", "baseline", "oversize")]
        text = " ".join(map(str, [each.entry, *numbers, 100, 1]))
        assert found == (text, (f"payload-{each.group_id[1:]}",), "")


@pytest.mark.parametrize("calls", range(7))
def test_an_interrupt_while_groups_are_read_loses_none(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    run = pushed_run(fake, "r", 3)
    group_all(run)
    interrupts, read = itertools.chain([False] * calls, [True], itertools.repeat(False)), read_entries

    class EntryId(bytes):
        def decode(self, *args: Any) -> str:
            if next(interrupts):
                raise KeyboardInterrupt
            return super().decode(*args)

    def read_with_interrupts(*args: Any) -> Any:
        return [(shard, EntryId(entry), fields) for shard, entry, fields in read(*args)]

    monkeypatch.setattr(batch_leader, "read_entries", read_with_interrupts)
    candidates = Candidates(run, [])
    with suppress(KeyboardInterrupt):
        candidates.read_on(5)
    candidates.read_on(5)
    with suppress(KeyboardInterrupt):
        list(candidates)
    assert [each.group_id for each in candidates] == ["g0000", "g0001", "g0002"]


def test_the_first_fit_groups_are_chosen_and_only_those_before_them_refused() -> None:
    groups = [group(number) for number in range(8)]
    chosen, refused = selection.choose(groups, 0, 3, *rules(trained=["g0", "g2", "g5"]))
    assert [each.group_id for each in chosen] == ["g1", "g3", "g4"]
    assert [(each.group_id, reason) for each, reason in refused] == [("g0", "trained"), ("g2", "trained")]


def test_a_group_of_a_named_batch_is_not_chosen_again() -> None:
    groups = [group(number) for number in (0, 1, 1, 2, 3)]
    chosen, refused = selection.choose(groups, 0, 3, *rules(named=["g0"]))
    assert [each.group_id for each in chosen] == ["g1", "g2", "g3"]
    assert [(each.group_id, each.problem, reason) for each, reason in refused] == [
        ("g1", "a copy of another entry", "malformed")
    ]


pointers = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 1500), st.integers(1, 1 << 21)), min_size=1, max_size=20
)


@settings(max_examples=examples(120), deadline=None)
@given(found=pointers, chain=st.sampled_from([CHAIN, WITH_KL, WHOLE_BATCH]))
def test_every_group_is_in_one_work_item_of_its_shard(
    found: list[tuple[int, int, int]], chain: dict[str, Any]
) -> None:
    groups = [Pointer(shard, f"1-{n}", f"g{n:02}", *sizes) for n, (shard, *sizes) in enumerate(found)]
    record = BatchRecord(
        k=3, id="3-x", epoch=1, groups=groups, chain=chain, late=["values"], kl_coefficient=0.5
    )
    items = work_items(record)
    assert [item.number for item in items] == list(range(len(items)))
    published = [p for item in items for p in item.groups if p.shard == item.shard]
    assert sorted(published) == sorted(groups)
    assert {(item.k, item.batch, tuple(item.late), item.kl_coefficient) for item in items} == {
        (3, "3-x", ("values",), 0.5)
    }
    if chain is WHOLE_BATCH:
        assert all(item.groups == groups for item in items)
        return
    token_bytes = 0 if chain is CHAIN else 1 + 4 + 4  # response_mask, rollout_log_probs, ref_log_probs

    def fits(parts: list[Pointer]) -> bool:
        size = sum(p.tokens for p in parts) * token_bytes
        return sum(p.trajectories for p in parts) <= ITEM_TRAJECTORIES and size <= ITEM_BYTES

    assert all(len(item.groups) == 1 or fits(item.groups) for item in items)
    for one, two in itertools.pairwise(items):
        assert one.shard != two.shard or not fits([*one.groups, two.groups[0]])


def test_a_chain_without_columns_computes_a_batch_as_one_item_of_each_shard() -> None:
    groups = [Pointer(n % 2, f"1-{n}", f"g{n:03}", 8, 8 << 20) for n in range(512)]
    record = BatchRecord(k=0, id="0-x", epoch=1, groups=groups, chain=CHAIN)
    assert [item.shard for item in work_items(record)] == [0, 1]


def test_a_record_whose_groups_have_no_tokens_is_read() -> None:
    text = '{"k":0,"id":"0-x","epoch":1,"groups":[[0,"1-0","g",8]],"chain":{}}'
    assert BatchRecord.model_validate_json(text).groups == [Pointer(0, "1-0", "g", 8, 0)]


def record_of(k: int, epoch: int, groups: Sequence[LoggedGroup]) -> BatchRecord:
    pointers = [each.pointer for each in sorted(groups, key=lambda each: each.group_id)]
    return BatchRecord(k=k, id=f"{k}-{random.randbytes(6).hex()}", epoch=epoch, groups=pointers, chain=CHAIN)


@pytest.fixture
def named(fake: Connection) -> tuple[Run, BatchRecord]:
    """A run of two shards with batch 0 named and epoch 1 taken."""
    run = pushed_run(fake, "r", 8, settings={"shards": 2})
    group_all(run)
    run.home.call("take_epoch", ["", 0, "job", "", "", "0123456789ab", "", "", "0", 1])
    logged = [each for shard in range(2) for each in read_log(run, shard, "0-0", 100)]
    record = record_of(0, 1, sorted(logged, key=lambda each: each.group_id)[:6])
    assert batch_record.name_batch(run, record, FENCE)
    return run, record


def test_a_batch_is_named_once(named: tuple[Run, BatchRecord]) -> None:
    run, record = named
    assert not batch_record.name_batch(run, record_of(0, 1, []), FENCE)
    assert batch_record.read_records(run) == {0: record}
    assert [pointer.group_id for pointer in record.groups] == sorted(p.group_id for p in record.groups)


def test_naming_applying_and_committing_may_be_repeated(named: tuple[Run, BatchRecord]) -> None:
    run, record = named
    for _ in range(3):
        apply(run, record, FENCE)
        assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (12, 4)
        assert problems(run) == []
    assert compute_all(run) == 2
    for _ in range(3):
        ends.commit(run, record, FENCE)
        assert (ledger(run)["trained"], ledger(run)["in_flight"]) == (12, 0)
        assert problems(run) == []
    assert batch_record.read_records(run) == {}
    with pytest.raises(BatchLostError, match="is gone: restart the trainer"):
        read_groups(run, record.groups)


@pytest.mark.parametrize("undone", [False, True])
def test_a_shard_may_learn_of_a_batch_in_parts(
    named: tuple[Run, BatchRecord], undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may die in between, and the home shard may lose the batch's record then."""
    run, record = named
    shard = run.shards[record.groups[0].shard]
    first = record.in_shard(shard.index)[0]
    shard.call("apply_batch", [FENCE, record.id, "complete", 1, f"{first.entry} {first.trajectories}"])
    assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (2, 14)
    assert problems(run) == []
    assert not run.connection.scripts.xlen(shard.keys.work)
    if undone:
        recovery.undo_unknown(run, [], FENCE)
        assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (0, 16)
        assert problems(run) == []
    monkeypatch.setattr(batch_record, "APPLY_SLICE", 2)
    for _ in range(2):
        apply(run, record, FENCE)
        assert (ledger(run)["in_flight"], ledger(run)["queued"]) == (12, 4)
        assert problems(run) == []
    assert compute_all(run) == 2


def test_the_ledger_holds_in_the_middle_of_a_commit(
    named: tuple[Run, BatchRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the steps of a commit: other processes may look, and the trainer may die."""
    run, record = named
    apply(run, record, FENCE)
    compute_all(run)
    monkeypatch.setattr(ends, "COMMIT_SLICE", 1)
    call, calls, lives = Shard.call, list[str](), 0

    def checked(shard: Shard, script: str, *args: Any, **keys: Any) -> Any:
        reply = call(shard, script, *args, **keys)
        assert problems(run) == []
        calls.append(script)
        if len(calls) == lives:
            raise InterruptedError
        return reply

    monkeypatch.setattr(Shard, "call", checked)
    while len(calls) == lives:
        calls.clear()
        lives += 1
        with suppress(InterruptedError):
            ends.commit(run, record, FENCE)
    assert lives > 2
    assert ledger(run)["trained"] == 12
    assert run.connection.scripts.hlen(run.home.keys.batches) == 0


def test_groups_taken_out_of_the_log_are_counted_once(named: tuple[Run, BatchRecord]) -> None:
    run, record = named
    taken = {pointer.group_id for pointer in record.groups}
    left = [g for shard in range(2) for g in read_log(run, shard, "0-0", 100) if g.group_id not in taken]
    for _ in range(2):
        ends.drop(run, [(left[0], "stale"), (left[1], "trained")], FENCE, 0, None, ())
        assert (ledger(run)["dropped"], ledger(run)["trained"]) == ({"stale": 2}, 2)
    assert problems(run) == []


@pytest.mark.parametrize("seed", some_of(range(12), 3))
def test_a_group_has_one_owner(named: tuple[Run, BatchRecord], seed: int) -> None:
    """Data loss may leave a shard with batches nobody knows, whose groups are named again, dropped, or committed."""
    run, draw = named[0], random.Random(seed)
    logged = {group.group_id: group for shard in range(2) for group in read_log(run, shard, "0-0", 100)}
    records = [record_of(k, 1, draw.sample(list(logged.values()), 5)) for k in range(4)]
    owners: dict[str, str] = {}
    applied: set[str] = set()

    def apply_once(record: BatchRecord) -> None:
        apply(run, record, FENCE)
        if record.id not in applied:
            owners.update((p.group_id, record.id) for p in record.groups if p.group_id in logged)
        applied.add(record.id)

    def undo(record: BatchRecord) -> None:
        recovery.undo_unknown(run, [each for each in records if each is not record], FENCE)
        applied.discard(record.id)
        for group_id in [group_id for group_id, owner in owners.items() if owner == record.id]:
            del owners[group_id]

    def leave_log(group_ids: list[str]) -> None:
        for group_id in group_ids:
            logged.pop(group_id, None)
            owners.pop(group_id, None)

    def commit(record: BatchRecord) -> None:
        ends.commit(run, record, FENCE)
        applied.discard(record.id)
        leave_log([pointer.group_id for pointer in record.groups])

    def drop(_: BatchRecord) -> None:
        group = draw.choice([*logged.values()])
        ends.drop(run, [(group, "trained")], FENCE, 0, None, ())
        leave_log([group.group_id])

    def dead_letter(record: BatchRecord) -> None:
        group = draw.choice([*logged.values()])
        batch = record.id if group.pointer in record.groups else ""
        ends.dead_letter(run, group, Death("crashed", ""), batch, FENCE)
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
    run.home.call("take_epoch", ["", 0, "job", "", "", "0123456789ab", "", "", "0", 1])
    for shard in run.shards:
        shard.call("set_trainer", ["2 2-0123456789ab", 0, "", 1, "", "", "", "0"])
    before = ledger(run)
    logged = read_log(run, 0, "0-0", 1) or read_log(run, 1, "0-0", 1)
    for attempt in (
        lambda: batch_record.name_batch(run, record_of(1, 1, []), FENCE),
        lambda: apply(run, record, FENCE),
        lambda: ends.commit(run, record, FENCE),
        lambda: ends.drop(run, [(logged[0], "stale")], FENCE, 0, None, ()),
    ):
        with pytest.raises(EpochFencedError, match="another trainer has taken over"):
            attempt()
    assert ledger(run) == before
    assert problems(run) == []


def test_another_session_of_the_same_epoch_changes_nothing(named: tuple[Run, BatchRecord]) -> None:
    """A server that lost the session before gave its epoch away once more."""
    run, record = named
    for shard in run.shards:
        shard.call("set_trainer", [FENCE, 0, "", 1, "", "", "", "0"])
    scripts, other = run.connection.scripts, "1 1-ba9876543210"
    before = {key: scripts.dump(key) for key in scripts.scan_iter()}
    for attempt in (
        lambda: batch_record.name_batch(run, record_of(1, 1, []), other),
        lambda: apply(run, record, other),
        lambda: run.home.call("set_trainer", [other, 5, "", 1, "", "", "1", "0"]),
    ):
        with pytest.raises(EpochFencedError, match="another trainer has taken over"):
            attempt()
    assert {key: scripts.dump(key) for key in scripts.scan_iter()} == before
    assert problems(run) == []
