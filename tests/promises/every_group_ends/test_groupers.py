"""Groupers on a real server: several at once, groups of producers that have died, what failed rollouts cost."""

from __future__ import annotations

import itertools
import threading
from typing import Any, cast

import pytest
import redis

import streamadv.producer.logic
import streamadv.run.heartbeats
from streamadv import cli
from streamadv.errors import Busy, NoBatchError
from streamadv.grouping import grouper, housekeeping
from streamadv.grouping.housekeeping import Housekeeping, Loss
from streamadv.producer import Producer
from streamadv.run import RunSettings
from streamadv.run.consumer import Consumer
from streamadv.run.heartbeats import PRODUCER_TIMEOUT_S
from streamadv.status import read_status
from streamadv.status.model import Bytes
from streamadv.store.connection import Connection
from streamadv.store.scripts import ScriptCall
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.support import (
    Forward,
    ended,
    group_all,
    heartbeat,
    identities,
    join,
    ledger,
    logged,
    make_overdue,
    problems,
    producing,
    references,
    threads,
    trajectory,
    unscored,
)


def test_several_groupers_race(redis_url: str, run: str) -> None:
    """Each trajectory lands in one group, each group in the log once."""
    with producing(redis_url, run, {"shards": 2}) as producer:
        joined = join(redis_url, run)
        for number in range(60):
            producer.push([trajectory(f"g{number}", index, 4) for index in (0, 1, 2)])
        stages = [lambda stop: grouper.run_grouper(join(redis_url, run), stop)] * 3
        with threads(*stages):
            for number in range(60):
                producer.push([trajectory(f"g{number}", 3, 4)])
            while ledger(joined)["queued"] > sum(len(g.members) for g in logged(joined).values()):
                assert problems(joined, deep=False) == []
    groups = logged(joined)
    assert len(groups) == 60
    assert all(len(group.members) == 4 for group in groups.values())
    assert problems(joined) == []


def test_a_grouper_that_is_told_to_end_begins_nothing_else(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call to a server that hangs would take another 20 s."""
    joined, stop = join(redis_url, run), threading.Event()
    calls: list[str] = []

    def read(*_: object, **__: object) -> list[object]:
        calls.append("read")
        stop.set()
        return []

    monkeypatch.setattr(housekeeping.Housekeeping, "round", lambda _: bool(calls.append("round")))
    monkeypatch.setattr(Consumer, "read", read)
    grouper.run_grouper(joined, stop)
    assert calls == ["round", "read"]


def test_packets_taken_together_or_one_by_one_come_to_the_same(redis_url: str, run: str) -> None:
    """Copies, lost payloads, scores that came first, more members than a group needs, a hash somebody wrote into."""
    connection, found = Connection(redis_url), []
    for name, count in ((f"{run}-alone", 1), (f"{run}-together", 128)):
        with producing(connection, name, {"redundancy": 2, "partial_min_usable": 1}) as producer:
            joined, scripts = join(connection, name), connection.scripts
            keys = joined.keys.home
            producer.push([unscored("scored", index, 2) for index in range(4)])
            producer.score("scored", 1, None)
            producer.score("scored", 2, 0.25)
            producer.score("scored", 3, 0.5)
            producer.push([ended("short", index, 2, "failed") for index in range(3)])
            producer.push([trajectory("short", 3, 2)])
            for index, group_id in itertools.product(range(4), ("broken", "lost")):
                producer.push([trajectory(group_id, index, 2)])
            producer.push([trajectory("waiting", 0, 2)])
            scripts.hset(keys.group("broken"), "head", "x")
            packets: Any = scripts.xrange(keys.rollouts)
            lost = next(fields for _, fields in packets if fields[b"group_id"] == b"lost")
            scripts.unlink(lost[b"payload"].decode())
            for _, fields in packets[::2]:
                scripts.xadd(keys.rollouts, fields)
            outcomes = group_all(joined, count=count)
            found_problems = problems(joined)  # the payload that somebody deleted, and its packet
            assert all("live_bytes" in each or "ledger rollouts" in each for each in found_problems)
        members = {group_id: identities(references(group)) for group_id, group in logged(joined).items()}
        found.append((sorted(outcomes), ledger(joined), members))
    assert found[0] == found[1]
    outcomes, _, members = found[0]
    assert outcomes == ["complete", "complete", "malformed", "partial"]
    assert members == {
        "scored": [("scored", 2), ("scored", 3)],
        "short": [("short", 3)],
        "lost": [("lost", 1), ("lost", 2)],
    }


def test_expiry_goes_on_while_full_pages_end(redis_url: str, run: str) -> None:
    """A fleet that died leaves thousands of open groups: all end in one round of housekeeping."""
    with producing(redis_url, run, {"shards": 2, "max_trajectory_bytes": 1024, "keep_bytes": 0}) as producer:
        joined = join(redis_url, run)
        for number in range(600):
            producer.begin_group(2, group_id=f"g{number}")
        producer.push([trajectory("g7", 0)])
        group_all(joined)
        for number in range(600):
            make_overdue(joined, f"g{number}")
        housekeeping.Housekeeping(joined).round()
    status = read_status(joined)
    assert status.groups.open == 0
    assert status.groups.outcomes == {"expired": 600}
    assert status.bytes == Bytes(live=0, reserved=0, dead=0, kept=0)
    assert problems(joined) == []


def test_groups_of_a_lost_producer_do_not_count_in_pacing(
    redis_url: str, run: str, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with every admitted group open, it must not stop the others until the deadline."""
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 3600.0)
    joined = join(redis_url, run)
    queue = TrainerQueue(
        redis_url, run, batch_groups=2, max_staleness=1, chain={"estimator": "grpo"}, commit="each_batch"
    )
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    killed = Producer(redis_url, run).open()
    lost = [killed.begin_group(2, timeout=0) for _ in range(4)]
    rounds = housekeeping.Housekeeping(joined)
    with producing(redis_url, run) as other:
        rounds.round()
        for _ in range(5):
            forward(PRODUCER_TIMEOUT_S / 5)
            heartbeat(other)
            rounds.round()
        mine = [other.begin_group(2, timeout=0) for _ in range(4)]
        with pytest.raises(Busy, match="4 groups begun"):
            other.begin_group(2, timeout=0)
        assert read_status(joined).groups.open == 8
        # What was handed on to a process that is alive counts again, and completes.
        for ticket in lost[0].tickets:
            other.rollout(ticket).push(input_ids=[1], response_mask=[1], reward=1.0)
        assert group_all(joined) == ["complete"]
        mine[0].cancel(2)
        mine[1].cancel(2)
        group_all(joined)
        rounds.round()
        assert read_status(joined).groups.open == 5
        other.begin_group(2, timeout=0)
        with pytest.raises(Busy, match="4 groups begun"):
            other.begin_group(2, timeout=0)
    assert read_status(joined).groups.abandoned == 3
    assert problems(joined) == []
    for group in lost[1:]:
        make_overdue(joined, group.group_id)
    group_all(joined)
    assert read_status(joined).groups.abandoned == 0
    assert problems(joined) == []
    killed.close()
    queue.close()


@pytest.mark.parametrize("grouper", ["knew its predecessor", "has just been started"])
def test_a_restarted_producer_does_not_wait_for_the_groups_of_its_predecessor(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, grouper: str
) -> None:
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 3600.0)
    settings, joined = RunSettings(batch_groups=2, max_staleness=1), join(redis_url, run)
    killed = Producer(redis_url, run, name="engine 0", settings=settings).open()
    before = [killed.begin_group(2, timeout=0) for _ in range(4)]
    rounds = housekeeping.Housekeeping(joined)
    if grouper == "knew its predecessor":
        rounds.round()
    with Producer(redis_url, run, name="engine 0") as producer:
        with pytest.raises(Busy, match="4 groups begun"):
            producer.begin_group(2, timeout=0)
        rounds.round()
        for _ in range(4):
            producer.begin_group(2, timeout=0)
        for _ in range(2):
            rounds.round()
            with pytest.raises(Busy, match="4 groups begun"):
                producer.begin_group(2, timeout=0)
        # What the successor plays on with its predecessor's tickets counts again.
        producer.rollout(before[0].tickets[0]).push(input_ids=[1], response_mask=[1], reward=1.0)
        rounds.round()
        assert read_status(joined).groups.abandoned == 3
        assert problems(joined) == []
    killed.close()


def test_a_producer_that_was_only_slow_goes_on_beside_its_successor(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 3600.0)
    settings, joined = RunSettings(batch_groups=2, max_staleness=1), join(redis_url, run)
    rounds = housekeeping.Housekeeping(joined)

    def states() -> list[str]:
        return sorted(producer.state for producer in read_status(joined).producers)

    slow = Producer(redis_url, run, name="engine-0", settings=settings).open()
    groups = [slow.begin_group(2, timeout=0) for _ in range(2)]
    with Producer(redis_url, run, name="engine-0") as successor:
        rounds.round()
        assert read_status(joined).groups.abandoned == 2
        heartbeat(slow)
        assert "another producer has taken the name engine-0: this one goes on as engine-0-" in caplog.text
        assert states() == ["open", "open"]
        for rollout in groups[0]:
            rollout.push(input_ids=[1], response_mask=[1], reward=1.0)
        slow.touch(groups[1].group_id)
        rounds.round()
        assert group_all(joined) == ["complete"]
        assert read_status(joined).groups.abandoned == 0
        for producer in (slow, successor):
            producer.begin_group(2, timeout=0)
            rounds.round()
        for producer in (slow, successor):
            with pytest.raises(Busy, match="4 groups begun"):
                producer.begin_group(2, timeout=0)
        heartbeat(slow)
        slow.finish()
        slow.close()
        assert states() == ["finished", "open"]
    assert problems(joined) == []


def test_a_group_of_a_producer_that_was_cut_off_as_it_left_does_not_count_in_pacing(
    redis_url: str, run: str, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened ahead, and is withdrawn at the close."""
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 3600.0)
    leaving = Producer(redis_url, run, settings=RunSettings(batch_groups=1, max_staleness=1)).open()
    groups = leaving.groups(1, ahead=1)
    (rollout,) = next(groups)
    rollout.push(input_ids=[1], response_mask=[1], reward=1.0)
    carry_out = leaving._carry_out

    def cut_off(request: Any) -> Any:
        if isinstance(request, ScriptCall) and request.script.name == "withdraw":
            raise redis.exceptions.ConnectionError("cut off")
        return carry_out(request)

    monkeypatch.setattr(leaving, "_carry_out", cut_off)
    leaving.close()
    rounds = housekeeping.Housekeeping(join(redis_url, run))
    with producing(redis_url, run) as other:
        rounds.round()
        with pytest.raises(Busy, match="2 groups begun"):
            other.begin_group(2, timeout=0)
        for _ in range(5):
            forward(PRODUCER_TIMEOUT_S / 5)
            heartbeat(other)
            rounds.round()
        other.begin_group(2, timeout=0)


def test_open_groups_are_looked_through_once_for_each_start_of_a_producer(redis_url: str, run: str) -> None:
    with (
        producing(redis_url, run, {"max_staleness": 1, "batch_groups": 2}) as producer,
        redis.Redis.from_url(redis_url) as client,
    ):
        producer.begin_group(2)
        client.config_resetstat()
        rounds = Housekeeping(join(redis_url, run))
        for _ in range(3):
            rounds.look_for_lost()
        with Producer(redis_url, run, name="another"):
            for _ in range(3):
                rounds.look_for_lost()
        statistics: Any = client.info("commandstats")
    assert statistics["cmdstat_zrange"]["calls"] == 2


def test_a_foreign_producer_without_a_name_has_no_groups(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamadv.run.heartbeats, "PRODUCER_TIMEOUT_S", 0.0)
    with producing(redis_url, run, {"max_staleness": 1, "batch_groups": 2}) as producer:
        producer.begin_group(2)
        joined = join(redis_url, run)
        scripts, producers = joined.connection.scripts, joined.keys.home.producers
        (state,) = cast(Any, scripts.hvals(producers))
        scripts.hset(producers, "", state)
        rounds = Housekeeping(joined)
        for _ in range(3):
            rounds.look_for_lost()
        assert read_status(joined).groups.abandoned == 1
        assert problems(joined) == []


def push_some_failed(producer: Producer, groups: int, failing: int) -> None:
    """Groups of 4; in the first `failing` of them one rollout fails."""
    for number in range(groups):
        group = producer.begin_group(4)
        members = [
            {"rollout_index": index, "input_ids": [1], "response_mask": [1], "reward": 1.0}
            for index in range(3)
        ]
        group.push(members)
        if number < failing:
            list(group)[3].fail()
        else:
            group.push([{**members[0], "rollout_index": 3}])


@pytest.mark.parametrize("failing", [3, 8])
@pytest.mark.slow
def test_what_failed_rollouts_cost_is_said(
    redis_url: str,
    run: str,
    failing: int,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Short groups are dropped by default, never silently: from a fifth of the groups on."""
    joined = join(redis_url, run)
    with threads(lambda stop: grouper.run_grouper(joined, stop)), producing(redis_url, run) as producer:
        until(lambda: joined.connection.scripts.exists(joined.keys.home.rollouts), "the grouper reads")
        push_some_failed(producer, 30, failing)
        until(lambda: read_status(joined).groups.open == 0, "all have ended")
        if failing == 8:
            until(lambda: "partial_min_usable" in caplog.text, "it is said")
    assert read_status(joined).groups.short == Loss(
        groups=failing, ended=30, trajectories=3 * failing, usable=120 - failing
    )
    assert ("8 of 30 groups" in caplog.text or "partial_min_usable" in caplog.text) == (failing == 8)
    assert cli.main(["status", "--redis", redis_url, "--run", run]) == 0
    out = capsys.readouterr().out
    assert (f"{failing} of 30 groups ended short" in out) == (failing == 8)
    assert ("partial_min_usable" in out) == (failing == 8)
