"""The consumer loop: nothing read is lost, nothing in hand is given twice, what vanishes is made again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
from redis.exceptions import MasterDownError, MovedError, ReadOnlyError, ResponseError

from streamadv.run import Run, Shard
from streamadv.run import consumer as streams
from streamadv.run.consumer import ADVANTAGE, GROUPER, Consumer
from streamadv.store.connection import Connection
from tests.support import consumer_of, ids, join, pushed_run, read_all


@pytest.fixture
def pushed(fake: Connection) -> Run:
    """A run with 40 packets in its rollouts stream."""
    return pushed_run(fake, "r", 40)


def test_every_entry_is_given_once(pushed: Run) -> None:
    consumer = consumer_of(pushed)
    found = ids(read_all(consumer, 7))
    assert len(found) == len(set(found)) == 40
    assert consumer.read(7) == []


def test_own_pending_entries_come_first_after_a_restart(pushed: Run) -> None:
    first = consumer_of(pushed, name="same")
    lost = first.read(25)  # more than one page below
    again = consumer_of(pushed, name="same")
    found = read_all(again, 10)
    assert ids(found[:25]) == ids(lost)
    assert len(set(ids(found))) == 40


def test_after_a_failed_hand_off_everything_pending_comes_again(pushed: Run) -> None:
    consumer = consumer_of(pushed)
    lost = consumer.read(5)
    consumer.start_over()
    assert ids(consumer.read(5)) == ids(lost)


def test_entries_in_hand_are_not_given_twice(pushed: Run) -> None:
    """Also when their lease is over and the consumer claims them from itself."""
    consumer = consumer_of(pushed, lease_s=0)
    found = read_all(consumer, 7)
    consumer.reread_pending()
    assert read_all(consumer, 7) == []
    consumer.done(found[:3])
    consumer.reread_pending()
    assert ids(read_all(consumer, 7)) == ids(found[:3]), "not handed off after all"


def test_what_a_dead_consumer_left_is_taken_over_after_its_lease(pushed: Run) -> None:
    dead = ids(consumer_of(pushed, name="dead").read(15))
    patient = consumer_of(pushed, name="patient", lease_s=1000)
    assert not set(dead) & set(ids(read_all(patient, 4)))
    heir = consumer_of(pushed, name="heir", lease_s=0)
    found = ids(read_all(heir, 4))
    assert len(found) == len(set(found)) == 40


def test_given_back_entries_are_there_for_others_at_once(pushed: Run) -> None:
    leaving = consumer_of(pushed, name="leaving", lease_s=1000)
    held = leaving.read(5)
    leaving.done(held[:2])
    leaving.give_back()
    other = consumer_of(pushed, name="other", lease_s=1000)
    found = ids(read_all(other, 50))
    assert set(ids(held[2:])) <= set(found)
    assert not set(ids(held[:2])) & set(found), "still pending, and its lease goes on"


@pytest.mark.parametrize(
    "error", [ReadOnlyError("READONLY"), MovedError("1 127.0.0.1:7000"), MasterDownError("MASTERDOWN")]
)
def test_a_failover_is_waited_out(pushed: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """These are replies like WRONGTYPE, but pass by themselves."""
    consumer = consumer_of(pushed)
    slept: list[float] = []
    consumer._outage._sleep = slept.append
    with monkeypatch.context() as patch:
        patch.setattr(Consumer, "_advance", lambda *_: (_ for _ in ()).throw(error))
        assert consumer.read(5) == []
    assert slept
    with monkeypatch.context() as patch:  # also while the consumer group is made again
        patch.setattr(Consumer, "_advance", lambda *_: (_ for _ in ()).throw(ResponseError("NOGROUP")))
        patch.setattr(Shard, "call", lambda *_, **__: (_ for _ in ()).throw(error))
        assert consumer.read(5) == []
    assert consumer.read(5)


def test_another_error_of_the_server_is_not_swallowed(pushed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = consumer_of(pushed)
    monkeypatch.setattr(Consumer, "_advance", lambda *_: (_ for _ in ()).throw(ResponseError("WRONGTYPE")))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        consumer.read(5)


def test_every_shard_is_read(fake: Connection) -> None:
    run = pushed_run(fake, "r", 20, size=1, settings={"shards": 4})
    consumer = Consumer(run, GROUPER, lambda keys: keys.rollouts, lease_s=5, stop=threading.Event())
    for shard in run.shards:
        shard.call("ensure_group", [GROUPER], stream=shard.keys.rollouts)
    found = read_all(consumer, 3)
    assert len(found) == 20
    assert {entry.shard for entry in found} == {0, 1, 2, 3}
    assert all(run.keys.shard_of(e.fields[b"group_id"].decode()) == e.shard for e in found)


def test_consumers_that_are_gone_are_forgotten_but_never_with_work_pending(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pushed_run(fake, "r", 1)
    keys = run.keys.home
    holder, idle, me = (consumer_of(run, name=name) for name in ("holder", "idle", "me"))
    assert len(holder.read(10)) == 1
    idle.read(1)
    me.read(1)
    monkeypatch.setattr(streams, "RETIRE_AFTER_MS", 0)
    me.retire()
    left: Any = fake.scripts.xinfo_consumers(keys.rollouts, GROUPER)
    assert {consumer["name"] for consumer in left} == {b"holder", b"me"}


def test_one_that_leaves_is_forgotten_by_each_shard_that_answers(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pushed_run(fake, "r", 20, size=1, settings={"shards": 3})
    leaving, call = consumer_of(run, name="leaving"), Shard.call
    read_all(leaving, 10)

    def first_is_away(shard: Shard, script: str, *args: Any, **keys: Any) -> Any:
        if script == "retire" and shard.index == 0:
            raise redis.exceptions.ConnectionError("away")
        return call(shard, script, *args, **keys)

    monkeypatch.setattr(Shard, "call", first_is_away)
    leaving.give_back()
    named = [
        {each["name"] for each in fake.scripts.xinfo_consumers(shard.keys.rollouts, GROUPER)}  # type: ignore[union-attr]
        for shard in run.shards
    ]
    assert [b"leaving" in names for names in named] == [True, False, False]


@pytest.mark.parametrize("stage", [GROUPER, ADVANTAGE, "judge"])
def test_every_stage_forgets_consumers_that_are_gone(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    run = join(fake, "r")
    monkeypatch.setattr(streams, "RETIRE_AFTER_MS", 0)
    for name in ("gone", "me"):
        consumer = consumer_of(run, stage, name=name)
        assert consumer.read(1) == []
    left: Any = fake.scripts.xinfo_consumers(consumer._cursors[0].stream, stage)
    assert [each["name"] for each in left] == [b"me"]
