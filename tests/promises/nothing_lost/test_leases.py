"""What a dead consumer left is taken over once, by the clock of whoever takes it; a vanished stream is made again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from streamadv.producer import Producer
from streamadv.run import Run, Shard
from streamadv.run.consumer import GROUPER, Consumer
from tests.support import Forward, consumer_of, ids, join, push_groups, pushed_run, read_all


def heir_of(run: Run, name: str = "heir") -> Consumer:
    stop = threading.Event()
    stop.set()
    return Consumer(run, GROUPER, lambda keys: keys.rollouts, lease_s=1000.0, stop=stop, name=name)


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_leases_end_by_the_readers_clock_whatever_the_servers_says(
    redis_url: str, run: str, forward: Forward, hours: int
) -> None:
    """The server's clock went back or ahead after these were delivered, or a failover brought another one."""
    joined = pushed_run(redis_url, run, 40, size=1)
    dead = ids(read_all(consumer_of(joined, name="dead"), 100))
    assert len(dead) == 40
    scripts = joined.connection.scripts
    delivered_ms = scripts.time()[0] * 1000 - hours * 3_600_000
    scripts.xclaim(joined.keys.home.rollouts, GROUPER, "dead", 0, list(dead), time=delivered_ms, justid=True)
    heir = heir_of(joined)
    assert heir.read(100) == []
    forward(900.0)
    assert heir.read(100) == [], "its lease goes on"
    forward(500.0)
    assert sorted(ids(read_all(heir, 7))) == sorted(dead)


def test_whoever_takes_or_renews_an_entry_begins_its_lease_anew(
    redis_url: str, run: str, forward: Forward
) -> None:
    joined = pushed_run(redis_url, run, 4, size=1)
    first, second = consumer_of(joined, name="first"), consumer_of(joined, name="second", lease_s=0)
    held = ids(first.read(2))
    heir = heir_of(joined)
    rest = ids(read_all(heir, 2))
    assert len(held) == len(rest) == 2
    for _ in range(5):
        forward(800.0)
        first.renew()
        assert heir.read(2) == []
    taken = ids(read_all(second, 2))
    assert set(held) <= set(taken)
    forward(800.0)
    assert heir.read(2) == []
    forward(2000.0)
    assert set(held) <= set(ids(read_all(heir, 4)))


def test_two_heirs_take_an_entry_once(redis_url: str, run: str, forward: Forward) -> None:
    joined = pushed_run(redis_url, run, 60, size=1)
    assert len(read_all(consumer_of(joined, name="dead"), 100)) == 60
    one, other = heir_of(joined), heir_of(joined, name="other")
    assert one.read(20) == other.read(20) == []
    forward(2000.0)
    found = []
    for _ in range(9):  # the first read of each finds all 60 free
        found += ids(one.read(20)) + ids(other.read(20))
    assert len(set(found)) == len(found) == 60


def test_entries_deleted_while_pending_are_no_longer_pending(redis_url: str, run: str) -> None:
    joined = pushed_run(redis_url, run, 4, size=1)
    held = ids(consumer_of(joined, name="dead").read(10))
    scripts = joined.connection.scripts
    scripts.xdel(joined.keys.home.rollouts, *held[:2])
    assert sorted(ids(read_all(consumer_of(joined, name="heir", lease_s=0), 10))) == sorted(held[2:])
    pending: Any = scripts.xpending(joined.keys.home.rollouts, GROUPER)
    assert pending["pending"] == 2


def test_a_stream_that_vanishes_is_made_again_without_a_hot_loop(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = join(redis_url, run)
    consumer = consumer_of(joined)
    assert consumer.read(5) == []
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    calls: list[str] = []
    original = Shard.call

    def count(self: Shard, script: str, args: Any = (), **given: Any) -> Any:
        calls.extend([script] if script != "retire" else [])
        return original(self, script, args, **given)

    monkeypatch.setattr(Shard, "call", count)
    assert consumer.read(5) == []
    assert calls == ["ensure_group"]
    joined.refresh()
    with Producer(redis_url, run) as producer:
        push_groups(producer, 2, size=1)
    assert len(read_all(consumer, 5)) == 2
    assert calls == ["ensure_group"]

    slept: list[float] = []
    consumer._outage._sleep = slept.append
    monkeypatch.setattr(
        Consumer, "_advance", lambda *_: (_ for _ in ()).throw(ResponseError("NOGROUP No such key"))
    )
    for _ in range(20):
        assert consumer.read(5) == []
    assert len(slept) == 20, "slower and slower"
