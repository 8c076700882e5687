"""When a run is over: heartbeats are watched for change, whatever the server's clock says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamadv.grouping.grouper import Housekeeping
from streamadv.run import Shard, heartbeats
from streamadv.run.heartbeats import Attendance
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.retry import NotNowError
from streamadv.trainer.queue import TrainerQueue
from tests.support import ends, join, producing


def producers_of(fake: Connection) -> str:
    return join(fake, "r").keys.home.producers


@pytest.mark.parametrize("seen_ms", [0, 1_000, 10**14], ids=["long ago", "1970", "in the year 5138"])
def test_a_producer_is_alive_as_long_as_its_heartbeat_changes(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, seen_ms: int
) -> None:
    """A server whose clock was set, or that another one with another clock took over from."""
    with producing(fake, "r") as one:
        one.finish()
    queue = TrainerQueue(fake, "r", batch_groups=1)
    fake.scripts.hset(producers_of(fake), "other", f"{seen_ms} open")
    assert not ends(queue)
    fake.scripts.hset(producers_of(fake), "other", f"{seen_ms + 1} open")
    assert not ends(queue)
    monkeypatch.setattr(heartbeats, "PRODUCER_TIMEOUT_S", -1.0)  # it has been silent for too long
    assert ends(queue)


def test_nobody_is_silent_while_a_server_refuses_writes(
    fake: Connection, standing: None, forward: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    attendance = Attendance(join(fake, "r"))
    fake.scripts.hset(producers_of(fake), mapping={"one": "1 finished", "other": "1 open"})
    attendance.look()

    def refuse(*_: Any, **__: Any) -> None:
        raise NotNowError("MISCONF unable to persist to disk")

    with monkeypatch.context() as refused:
        refused.setattr(Shard, "call", refuse)
        for _ in range(8):
            forward(6)
            with pytest.raises(NotNowError):
                attendance.look()
    for _ in range(5):
        attendance.look()
        assert not attendance.ended, "its next heartbeat may still come"
        forward(6)
    attendance.look()
    assert attendance.ended


def test_nobody_is_silent_while_a_reader_does_not_look(
    fake: Connection, standing: None, forward: Callable[[float], None]
) -> None:
    """As when its server was away."""
    attendance = Attendance(join(fake, "r"))
    fake.scripts.hset(producers_of(fake), mapping={"one": "1 finished", "other": "1 open"})
    attendance.look()
    forward(60)
    attendance.look()
    assert not attendance.ended


def test_the_end_comes_to_a_reader_that_looks_seldom(
    fake: Connection, standing: None, forward: Callable[[float], None]
) -> None:
    """As a trainer that asks for a batch between two long steps, with a short timeout."""
    attendance = Attendance(join(fake, "r"))
    fake.scripts.hset(producers_of(fake), mapping={"one": "1 finished", "other": "1 open"})
    ended = []
    for _ in range(8):
        attendance.look()
        ended.append(attendance.ended)
        forward(60)
    assert not any(ended[:6]), "a server may have been away in each of these times"
    assert ended[7]


def test_who_is_taken_off_the_list_has_not_finished(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with producing(fake, "r") as one, producing(fake, "r"):
        one.finish()
        queue = TrainerQueue(fake, "r", batch_groups=1)
        assert not ends(queue)
        stored: Any = fake.scripts.hgetall(producers_of(fake))
        fake.scripts.hdel(producers_of(fake), *(name for name, value in stored.items() if b"open" in value))
        assert not ends(queue), "the other one has not said that it is finished, or gone"
        monkeypatch.setattr(heartbeats, "PRODUCER_TIMEOUT_S", -1.0)
        assert ends(queue)


def test_a_producer_that_leaves_holds_nobody(fake: Connection) -> None:
    queue = TrainerQueue(fake, "r", batch_groups=1)
    with producing(fake, "r") as one:
        one.finish()
        with producing(fake, "r"):
            assert not ends(queue)
        assert ends(queue)
        assert fake.scripts.hlen(producers_of(fake)) == 1, "only the one that has finished stays on the list"


def test_producers_of_the_past_are_forgotten_and_the_run_still_ends(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = join(fake, "r")
    finished = {f"finished{number}": f"{number} finished" for number in range(1500)}
    silent = {f"silent{number}": f"{number} open" for number in range(1500)}
    fake.scripts.hset(producers_of(fake), mapping=finished | silent)
    with producing(fake, "r") as alive:
        Housekeeping(run).round()
        names = {producer.name for producer in read_status(run).producers}
        assert len(names - silent.keys()) == 101
        assert {f"finished{number}" for number in range(1400, 1500)} < names, "the latest are kept"
        queue = TrainerQueue(fake, "r", batch_groups=1)
        assert not ends(queue), "one is alive"
        alive.finish()
        assert not ends(queue), "the silent ones may be alive, as far as this trainer knows"
        monkeypatch.setattr(heartbeats, "PRODUCER_TIMEOUT_S", -1.0)
        assert ends(queue)
        assert len(read_status(run).producers) <= 200


def test_a_finished_producer_that_is_off_the_list_has_finished(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = join(fake, "r")
    monkeypatch.setattr(heartbeats, "PAST_KEPT", 1)
    queue = TrainerQueue(fake, "r", batch_groups=1)
    for _ in range(3):
        with producing(fake, "r") as producer:
            assert not ends(queue)
            producer.finish()
    Housekeeping(run).round()
    assert [producer.state for producer in read_status(run).producers] == ["finished"]
    assert ends(queue)
