"""Producers that wait say why: the same reason in the log, in Busy, and in `streamadv status`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from streamadv import clock
from streamadv.cli.replay import replay
from streamadv.errors import Busy, NoBatchError
from streamadv.producer import Producer
from streamadv.producer.group import Group
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.support import group_all, join, producing, push_groups, trajectory

SMALL = {"max_trajectory_bytes": 300_000, "max_bytes": 1_200_000}


@pytest.fixture(autouse=True)
def _time_flies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes the thread that looks 5 s: threads of other tests take no time from these."""
    own = threading.local()

    def now() -> float:
        own.passed = getattr(own, "passed", 0.0) + 5
        return float(own.passed)

    monkeypatch.setattr(clock, "now", now)


def said(caplog: pytest.LogCaptureFixture, what: str = "not admitted for ") -> list[str]:
    return [message for message in caplog.messages if what in message]


def begin_in_vain(producer: Producer, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    """The line that a producer says while a group is not admitted."""
    with caplog.at_level(logging.WARNING), pytest.raises(Busy) as caught:
        producer.begin_group(2, timeout=60, **options)
    line = said(caplog)[0]
    assert str(caught.value).partition("not admitted after 60 s: ")[2][:12] in line
    return line


def test_bytes(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    with producing(fake, "r", SMALL) as producer:
        producer.begin_group(2)
        producer.begin_group(2)
        line = begin_in_vain(producer, caplog)
    assert "1200000 bytes live or reserved of max_bytes 1200000, 2 groups are open and 0 wait" in line
    assert "; an open rollout reserves 300000: wait for commits" in line
    assert "[max_bytes]" in line


def test_a_batch_larger_than_the_budget(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    with producing(fake, "r", SMALL) as producer:
        with pytest.raises(NoBatchError):
            TrainerQueue(fake, "r", batch_groups=8, max_staleness=None).next_batch(timeout=0)
        push_groups(producer, 2, tokens=20_000)
        group_all(join(fake, "r"))
        line = begin_in_vain(producer, caplog)
    assert "by 2 groups, batch_groups is 8: raise max_bytes, lower batch_groups" in line
    assert "[batch_over_budget]" in line


@pytest.mark.parametrize("shards", [1, 3])
def test_pacing_by_all_shards_together(
    shards: int, fake: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with producing(fake, "r", {"shards": shards}) as producer:
        with pytest.raises(NoBatchError):
            TrainerQueue(fake, "r", batch_groups=3, max_staleness=0).next_batch(timeout=0)
        for _ in range(3):
            producer.begin_group(2)
        line = begin_in_vain(producer, caplog)
    assert ": 3 groups begun and not yet trained, max_staleness allows 3" in line
    assert "[pacing]" in line


def test_many_tasks_say_it_once(redis_url: str, run: str, caplog: pytest.LogCaptureFixture) -> None:
    async def wait_together() -> None:
        async with Producer(redis_url, run, settings=RunSettings(**SMALL)) as producer:
            for _ in range(2):
                await producer.begin_group(2)
            tasks = [asyncio.create_task(producer.begin_group(2, timeout=60)) for _ in range(16)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(each) for each in results} == {Busy}

    with caplog.at_level(logging.WARNING):
        asyncio.run(wait_together())
    lines = said(caplog)
    assert lines
    assert all("[max_bytes]" in line for line in lines)
    turns = len({line.partition(" for ")[2].partition(" s:")[0] for line in lines})
    assert turns == len(lines)


def test_an_admitted_group_ends_the_wait(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    with producing(fake, "r", SMALL) as producer:
        groups = [producer.begin_group(2) for _ in range(2)]
        for _ in range(3):
            with pytest.raises(Busy):
                producer.begin_group(2, timeout=0)
            for rollout in groups.pop(0):
                rollout.fail()
            group_all(join(fake, "r"))
            groups.append(producer.begin_group(2))
    assert not said(caplog)


@pytest.fixture
def full() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(maxmemory="40mb") as server:
        yield server


def push_first(group: Group) -> None:
    group.push([trajectory(group.group_id, 0)])


def fail_first(group: Group) -> None:
    next(iter(group)).fail()


def cancel_one(group: Group) -> None:
    group.cancel(1)


@pytest.mark.server
@pytest.mark.parametrize("push", [push_first, fail_first, cancel_one])
def test_a_server_above_its_maxmemory(
    full: EmbeddedServer, run: str, caplog: pytest.LogCaptureFixture, push: Callable[[Group], None]
) -> None:
    with producing(full.url, run) as producer, redis.Redis.from_url(full.url) as client:
        group = producer.begin_group(2)
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        assert "[maxmemory]" in begin_in_vain(producer, caplog)
        pushing = threading.Thread(target=push, args=(group,))
        with caplog.at_level(logging.INFO):
            pushing.start()
            while not said(caplog, "a push waits for "):
                pushing.join(0.01)
            client.config_set("maxmemory", 40 << 20)
            pushing.join(30)
        assert not pushing.is_alive()
    assert "the server is above its maxmemory" in said(caplog, "a push waits for ")[0]
    assert said(caplog, "a push waits: goes on after ")


def test_replay(fake: Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:

    with producing(fake, "r", SMALL) as producer:
        held = [producer.begin_group(2) for _ in range(2)]
        codes: Counter[str] = Counter()
        items = [trajectory("late", index) for index in range(2)]
        work = threading.Thread(target=replay, args=(producer, items, codes))
        with caplog.at_level(logging.WARNING):
            work.start()
            while not said(caplog, "replay: not admitted for "):
                work.join(0.01)
        for group in held:
            for rollout in group:
                rollout.fail()
        group_all(join(fake, "r"))
        work.join(30)
        assert codes["pushed"] == 2
    assert "[max_bytes]" in said(caplog, "replay: not admitted for ")[0]
