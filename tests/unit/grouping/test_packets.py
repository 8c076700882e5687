"""Packets through the scripts: registered whole or not at all, several groups in a call, members that do not count."""

from __future__ import annotations

from typing import Any

import pytest

from streamadv.grouping import grouper, housekeeping
from streamadv.grouping.scorer import Scorer
from streamadv.run import Run
from streamadv.store.connection import Connection
from tests.support import (
    batches_read,
    consumer_of,
    ended,
    group_all,
    identities,
    join,
    ledger,
    logged,
    make_overdue,
    payload_keys,
    problems,
    producing,
    references,
    trajectory,
    unscored,
)

from .pushing import LIMITS, MB, push_together, push_without_payloads


@pytest.fixture
def run(fake: Connection) -> Run:
    """A run whose shard knows its layout."""
    with producing(fake, "r"):
        run = join(fake, "r")
    run.home.call("lay_out", [1])
    return run


def whole(group_id: str, size: int = 2, **fields: Any) -> list[Any]:
    return [trajectory(group_id, index, size, **fields) for index in range(size)]


def packets_in(run: Run) -> int:
    return int(run.connection.scripts.xlen(run.keys.home.rollouts))


def test_a_whole_group_is_one_packet_and_one_entry(run: Run) -> None:
    assert push_together(run, whole("g", 8)) == [["ok", *["pushed"] * 8]]
    assert (packets_in(run), len(payload_keys(run))) == (1, 1)
    assert problems(run) == []
    assert group_all(run) == ["complete"]
    (group,) = logged(run).values()
    assert len(group.packets) == 1
    assert (list(group.packet_of), list(group.position_of)) == ([0] * 8, list(range(8)))
    assert group.members.table["reward"].tolist() == [float(index) for index in range(8)]
    assert problems(run) == []


def test_groups_of_one_call_are_answered_one_by_one(run: Run) -> None:
    push_together(run, [trajectory("open", 0, 3)], whole("ended"))
    assert group_all(run) == ["complete"]
    run.connection.scripts.hset(run.keys.home.group("broken"), "slots", "many")
    replies = push_together(
        run,
        whole("new"),
        [trajectory("open", 1, 3)],
        whole("open", 2),
        whole("ended"),
        whole("broken"),
        [ended("short", 0, 2, "failed"), trajectory("short", 1, 2)],
    )
    assert replies == [
        ["ok", "pushed", "pushed"],
        ["ok", "pushed"],
        ["mismatch", "3", "train"],
        ["ok", "duplicate", "duplicate"],
        ["broken"],
        ["ok", "pushed", "pushed"],
    ]
    # those of the other two groups, and a record without
    assert len(payload_keys(run)) == packets_in(run) + 2 - 1
    run.connection.scripts.delete(run.keys.home.group("broken"))
    assert (ledger(run)["pushed"], ledger(run)["queued"]) == (8, 8)
    assert problems(run) == []


def test_groups_of_one_call_count_for_each_other(run: Run) -> None:
    paced = ("test", f"{MB} {1 << 40} 1 - 1 1 1")
    replies = push_together(run, *(whole(f"g{number}") for number in range(3)), limits=paced)
    assert [reply[:2] for reply in replies] == [["ok", "pushed"]] * 2 + [["busy", "max_staleness"]]
    assert replies[2][2:] == ["2", "2", ""]
    # A group of two reserves 2 MB until sizes are known; one slot of the first is filled.
    bounded = ("test", f"{MB} {5 * MB} 1 - - - 1")
    replies = push_together(
        run, [trajectory("a", 0)], [trajectory("b", 0)], [trajectory("c", 0)], whole("d"), limits=bounded
    )
    assert [reply[0] for reply in replies] == ["ok", "ok", "ok", "busy"]
    assert replies[3][1] == "max_bytes"
    assert len(payload_keys(run)) == 5
    assert problems(run) == []


def test_a_packet_is_registered_whole_or_not_at_all(run: Run) -> None:
    push_together(run, [trajectory("g", 1, 4)])
    assert push_together(run, whole("g", 4)) == [["ok", "again", "duplicate", "again", "again"]]
    assert (packets_in(run), len(payload_keys(run))) == (1, 1)
    assert ledger(run)["pushed"] == 1
    assert run.connection.scripts.hget(run.keys.home.ledger, "duplicates") == b"1"
    rest = [trajectory("g", index, 4) for index in (0, 2, 3)]
    assert push_together(run, rest) == [["ok", "pushed", "pushed", "pushed"]]
    assert group_all(run) == ["complete"]
    assert identities(references(logged(run)["g"])) == [("g", index) for index in range(4)]
    assert problems(run) == []


def test_a_member_beyond_the_slots_refuses_its_packet(run: Run) -> None:
    replies = push_together(run, [trajectory("g", index, 2) for index in range(3)], slots=2)
    assert replies == [["ok", "again", "again", "range"]]
    assert payload_keys(run) == []
    assert ledger(run)["pushed"] == 0
    assert problems(run) == []


def test_a_packet_whose_payload_has_outlived_its_time_leaves_nothing(run: Run) -> None:
    failed = ended("g", 2, 3, "failed")
    assert push_without_payloads(run, [*whole("g", 2), failed], slots=3) == [["ok", "lost", "lost", "pushed"]]
    assert (packets_in(run), ledger(run)["pushed"]) == (1, 1)
    assert problems(run) == []
    assert push_together(run, [trajectory("g", 0, 2), trajectory("g", 1, 2)]) == [["ok", "pushed", "pushed"]]
    assert group_all(run) == ["complete"]
    assert problems(run) == []


def test_registered_payloads_have_no_end(run: Run) -> None:
    push_together(run, whole("g"), [unscored("h", 0)])
    assert {run.connection.scripts.pttl(key) for key in payload_keys(run)} == {-1}


def test_a_packet_with_an_index_twice_is_refused(run: Run) -> None:
    """No client sends one."""
    keys, scripts = run.keys.home, run.connection.scripts
    payload = keys.payload("x")
    scripts.hset(payload, "a", "b")
    scripts.pexpire(payload, 60_000)
    members = "0 usable 1.0 train\n0 usable 2.0 train\n"
    args = [*LIMITS, "0", 1, "g", "train 2 2 1000 ", 0, 1, 2, "", payload, 9, members, "table"]
    run.home.call("push", args, scorer=keys.void, group_hashes=[keys.group("g")], payloads=[payload])
    assert (packets_in(run), payload_keys(run), ledger(run)["pushed"]) == (0, [], 0)
    assert problems(run) == []


def test_bytes_of_members_that_do_not_count_go_with_their_packet(run: Run) -> None:
    push_together(run, [trajectory("g", index, 2) for index in range(3)], slots=3)
    assert group_all(run) == ["complete"]
    (group,) = logged(run).values()
    assert identities(references(group)) == [("g", 0), ("g", 1)]
    assert group.size_bytes == group.packets[0].size > int(group.members.table["size"].sum())
    assert len(group.packets[0].members) == 3
    assert ledger(run)["dropped"] == {"surplus": 1}
    assert problems(run) == []


def test_a_packet_none_of_whose_members_counts_goes_at_once(run: Run) -> None:
    push_together(run, whole("g"), slots=5)
    push_together(run, [unscored("h", index, 3) for index in range(2)])
    with producing(run.connection, "r") as producer:
        group_all(run)
        # after the end: never registered
        push_together(run, [trajectory("g", index) for index in (2, 3)], slots=5)
        for index in range(2):
            assert producer.score("h", index, None) == "scored"
        group_all(run)
    assert len(payload_keys(run)) == 1
    assert ledger(run)["dropped"] == {"surplus": 2, "unscorable": 2}
    assert problems(run) == []


def test_members_of_a_packet_may_be_scored_apart(run: Run) -> None:
    push_together(run, [unscored("g", index, 2) for index in range(3)], slots=3)
    with producing(run.connection, "r") as producer:
        assert producer.score("g", 2, 0.25) == "scored"
        assert group_all(run) == []
        assert problems(run) == []
        assert producer.score("g", 0, None) == "scored"
        assert producer.score("g", 1, 0.5, {"style": 0.5}) == "scored"
        group_all(run)
    (group,) = logged(run).values()
    assert [(member.rollout_index, member.reward) for member in references(group)] == [(1, 0.5), (2, 0.25)]
    assert [member.rewards for member in references(group)] == [{"style": 0.5}, {}]
    assert list(group.position_of) == [1, 2]
    assert problems(run) == []


def test_scores_of_members_that_came_with_a_reward_are_not_logged(run: Run) -> None:
    push_together(run, [trajectory("g", 0, 2, reward=1.0)])
    with producing(run.connection, "r") as producer:
        assert producer.score("g", 0, 0.0) == "scored"
        push_together(run, [unscored("g", 1, 2)])
        group_all(run)
        assert producer.score("g", 1, 3.0) == "scored"
        group_all(run)
    assert [member.reward for member in references(logged(run)["g"])] == [1.0, 3.0]
    assert problems(run) == []


def test_a_foreign_packet_takes_no_member_twice(run: Run) -> None:
    """It speaks of one slot of a genuine packet and comes before that: every trajectory is in one place."""
    keys, scripts = run.keys.home, run.connection.scripts
    push_together(run, whole("g", 3))
    ((entry, fields),) = scripts.xrange(keys.rollouts)
    scripts.xdel(keys.rollouts, entry)
    scripts.xadd(keys.rollouts, {**fields, b"members": b"1 usable 1.0 train\n"})
    scripts.xadd(keys.rollouts, fields)
    scripts.xadd(keys.rollouts, {**fields, b"payload": keys.payload("none").encode()})
    for entries in batches_read(consumer_of(run), 1):
        grouper.take(run, entries)
    counters = scripts.hgetall(keys.ledger)
    assert [int(counters[name]) for name in (b"rollouts", b"rollouts_packets", b"malformed")] == [0, 0, 2]
    assert ledger(run)["queued"] == 3


@pytest.mark.parametrize("is_late", [False, True])
def test_a_packet_that_no_scorer_can_read_ends_without_its_payload(fake: Connection, is_late: bool) -> None:
    """Somebody has deleted the payload. The scorer says that its members are unscorable."""
    with producing(fake, "r", {"scorers": ["judge"]}) as producer:
        run = join(fake, "r")
        producer.push([unscored("g", index) for index in range(2)])
    run.connection.scripts.delete(*payload_keys(run))
    if is_late:
        make_overdue(run, "g")
    consumer, judge = consumer_of(run, "judge"), Scorer(fake, "r", "judge")
    judge.work(consumer, consumer.read(1), lambda trajectories: [1.0] * len(trajectories))
    if is_late:
        housekeeping.expire(run, run.home)
    group_all(run)
    assert (ledger(run)["queued"], ledger(run)["dropped"]) == (0, {"unscorable": 2})
    assert problems(run) == []


def test_a_whole_group_without_anything_to_train_on_is_dropped(run: Run) -> None:
    push_together(run, whole("g", role="baseline"))
    assert group_all(run) == ["no_train_members"]
    assert ledger(run)["dropped"] == {"no_train_members": 2}
    assert payload_keys(run) == []
    assert problems(run) == []


def test_a_copy_of_a_whole_group_is_removed(run: Run) -> None:
    """Taken in one call with the genuine packet."""
    keys, scripts = run.keys.home, run.connection.scripts
    push_together(run, whole("g"))
    ((_, fields),) = scripts.xrange(keys.rollouts)
    scripts.xadd(keys.rollouts, fields)
    assert group_all(run) == ["complete"]
    counters = scripts.hgetall(keys.ledger)
    assert [int(counters[name]) for name in (b"rollouts", b"rollouts_packets", b"malformed")] == [0, 0, 1]
    assert len(payload_keys(run)) == 1
    assert problems(run) == []


def test_packets_that_come_after_the_end_of_their_group_are_dropped_whole(run: Run) -> None:
    push_together(run, whole("late", 3), [ended("short", 0, 2, "failed")])
    make_overdue(run, "late")
    make_overdue(run, "short")
    housekeeping.expire(run, run.home)
    assert ledger(run)["queued"] == 4
    assert problems(run) == []
    group_all(run)
    assert ledger(run)["dropped"] == {"late": 3, "failed": 1}
    assert payload_keys(run) == []
    assert problems(run) == []
    assert push_together(run, whole("late", 3), whole("short")) == [
        ["ok", "duplicate", "duplicate", "duplicate"],
        ["ok", "duplicate", "late"],
    ]
    assert problems(run) == []


def test_cancelled_slots_are_packets_without_a_payload(run: Run) -> None:
    with producing(run.connection, "r") as producer, producer.group(130) as group:
        assert group.cancel(130).indices == list(reversed(range(130)))
    assert packets_in(run) == 3  # 64, 64 and 2
    assert group_all(run) == ["incomplete"]
    assert ledger(run)["dropped"] == {"cancelled": 130}
    assert problems(run) == []


@pytest.mark.parametrize(
    ("field", "change", "problem"),
    [
        ("head", lambda text: text.replace(b" 2 ", b" 3 "), "count is"),
        ("head", lambda text: b"2", "head is"),
        ("payloads", lambda text: text.replace(b"11", b"1"), "count is"),
        ("payloads", lambda text: text + b"1", "count is"),
        ("payloads", lambda text: text.replace(b" 11", b" 1x"), "payloads"),
        ("payloads", lambda text: b"other" + text, "payloads"),
    ],
)
def test_an_entry_that_contradicts_itself_is_no_group(
    run: Run, field: str, change: Any, problem: str
) -> None:
    (group,) = changed_entry(run, field, change)
    assert group.malformed
    assert problem in str(group.problem)


@pytest.mark.parametrize(
    ("field", "change", "problem"),
    [
        ("tables", lambda raw: raw[:-1], "member table"),
        ("tables", lambda raw: raw + b"12", "member table"),
        ("tables", lambda raw: raw[:3], "member table"),
        ("tables", lambda raw: raw + raw, "member table"),
        ("scores", lambda text: b"{", "JSON"),
        ("scores", lambda text: b'{"0":{"reward":NaN}}', "finite"),
    ],
)
def test_a_group_whose_members_cannot_be_read_has_a_problem(
    run: Run, field: str, change: Any, problem: str
) -> None:
    (group,) = changed_entry(run, field, change)
    assert not group.malformed
    assert (group.count, group.size_bytes > 0) == (2, True)
    assert problem in str(group.problem)


def changed_entry(run: Run, field: str, change: Any) -> list[Any]:
    """The groups log after one field of its only group was changed."""
    push_together(run, whole("g"))
    group_all(run)
    scripts, key = run.connection.scripts, run.keys.home.groups
    ((entry, fields),) = scripts.xrange(key)
    scripts.xdel(key, entry)
    scripts.xadd(key, {**fields, field.encode(): change(fields.get(field.encode()))})
    return list(logged(run).values())


def test_a_rollout_index_in_two_packets_is_a_problem(run: Run) -> None:
    push_together(run, whole("g"))
    group_all(run)
    scripts, key = run.connection.scripts, run.keys.home.groups
    ((entry, fields),) = scripts.xrange(key)
    scripts.xdel(key, entry)
    twice = {b"payloads": fields[b"payloads"] + b"\n" + fields[b"payloads"], b"tables": fields[b"tables"] * 2}
    scripts.xadd(key, {**fields, **twice, b"head": fields[b"head"].replace(b"2 2 ", b"2 4 ")})
    (group,) = logged(run).values()
    assert "twice" in str(group.problem)
