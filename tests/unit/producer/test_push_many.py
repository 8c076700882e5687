"""`producer.push_many`: trajectories of several groups in few calls, each with the outcome of a push of its own."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from streamadv import metrics
from streamadv.errors import Busy, TrajectoryError
from streamadv.producer import Producer
from streamadv.producer.requests import (
    MAX_SLICE_BYTES,
    MAX_SLICE_MEMBERS,
    MAX_SLICE_PACKETS,
    Pause,
    Push,
)
from streamadv.store.connection import Connection
from tests.support import (
    Forward,
    group_all,
    join,
    ledger,
    payload_keys,
    problems,
    producing,
    push_one,
    trajectory,
)

MB = 1 << 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Push]:
    """The pushes that are sent."""
    sent: list[Push] = []
    carry_out = Producer._carry_out

    def note(self: Producer, request: Any) -> Any:
        if isinstance(request, Push):
            sent.append(request)
        return carry_out(self, request)

    monkeypatch.setattr(Producer, "_carry_out", note)
    return sent


def group_of(name: str, size: int = 2, **fields: Any) -> list[Any]:
    return [trajectory(name, index, size, **fields) for index in range(size)]


def test_several_groups_go_in_one_call(fake: Connection, calls: list[Push]) -> None:
    with producing(fake, "r") as producer:
        push_one(producer, trajectory("c", 0))  # the shard learns the run's layout
        calls.clear()
        results = producer.push_many([group_of("a"), group_of("b", 3), []])
        assert [result.codes for result in results] == [["pushed"] * 2, ["pushed"] * 3, []]
        assert [result.indices for result in results] == [[0, 1], [0, 1, 2], ()]
        assert len(calls) == 1
        assert producer.push_many([]) == []
    run = join(fake, "r")
    assert group_all(run) == ["complete"] * 2
    assert problems(run) == []


def test_each_group_has_its_own_outcome(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_one(producer, trajectory("a", 1))
        results = producer.push_many([group_of("a"), group_of("b"), [trajectory("b", 0)], group_of("c")])
        assert [result.codes for result in results] == [
            ["pushed", "duplicate"],
            ["pushed", "pushed"],
            ["duplicate"],
            ["pushed", "pushed"],
        ]
    run = join(fake, "r")
    assert fake.scripts.hget(run.keys.home.ledger, "duplicates") == b"2"
    assert group_all(run) == ["complete"] * 3
    assert len(payload_keys(run)) == 4
    assert problems(run) == []


def test_calls_are_bounded(fake: Connection, calls: list[Push]) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": 2 * MB}) as producer:
        producer.push_many([group_of(f"big{number}", 2, tokens=150_000) for number in range(4)])
        producer.push_many([group_of(f"small{number}", 50) for number in range(6)])
        producer.push_many([group_of(f"smallest{number}", 1) for number in range(100)])
    assert len(calls) >= 7
    for call in calls:
        packets = call.packets
        assert len(packets) <= MAX_SLICE_PACKETS
        assert sum(len(packet.indices) for packet in packets) <= MAX_SLICE_MEMBERS
        assert sum(packet.size + len(packet.table) for packet in packets) <= MAX_SLICE_BYTES
    run = join(fake, "r")
    assert ledger(run)["pushed"] == 408
    assert problems(run) == []


def test_groups_of_several_shards(fake: Connection, calls: list[Push]) -> None:
    with producing(fake, "r", {"shards": 3}) as producer:
        # the shards learn the run's layout
        producer.push_many([group_of(f"g{number}") for number in range(12)])
        calls.clear()
        producer.push_many([group_of(f"h{number}") for number in range(12)])
        assert sum(len(call.groups) for call in calls) == 12
        assert len(calls) == 3
    assert problems(join(fake, "r")) == []


def test_groups_refused_are_pushed_again_until_the_time_is_over(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        fake.scripts.hset(run.keys.home.trainer, mapping={"max_staleness": "0", "batch_groups": "2"})
        with pytest.raises(Busy, match="max_staleness allows 2"):
            producer.push_many([group_of(name) for name in "abc"], timeout=0.02)
        assert ledger(run)["pushed"] == 4
        fake.scripts.hset(run.keys.home.trainer, "max_staleness", "1")
        results = producer.push_many([group_of(name) for name in "abc"], timeout=0)
        assert [result.codes[0] for result in results] == ["duplicate", "duplicate", "pushed"]
    assert problems(run) == []


def test_what_a_call_has_pushed_counts_when_it_opens_the_next_group(fake: Connection) -> None:
    """Two groups of nearly a megabyte: the budget has room for the first one's reservation alone."""
    with producing(fake, "r", {"max_bytes": 3 * MB // 2, "max_trajectory_bytes": MB}) as producer:
        large = [[trajectory(name, 0, 1, tokens=70_000)] for name in "ab"]  # 9 bytes a token
        push_one(producer, trajectory("c", 0, 1))  # the shard learns the run's layout
        with pytest.raises(Busy, match="max_bytes"):
            producer.push_many(large, timeout=0)
    run = join(fake, "r")
    assert ledger(run)["pushed"] == 2
    assert problems(run) == []


def test_what_is_wrong_is_raised(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        with pytest.raises(TrajectoryError, match="one group at a time"):
            producer.push_many([group_of("a"), [*group_of("b"), trajectory("c", 0)]])
        assert ledger(run)["pushed"] == 0
        push_one(producer, trajectory("b", 0, 3))
        with pytest.raises(TrajectoryError, match="group_size is 2, group b is open with 3"):
            producer.push_many([group_of("a"), group_of("b"), group_of("c")])
        assert ledger(run)["pushed"] == 5
    assert problems(run) == []


def test_a_wrong_group_costs_no_other_that_waits(fake: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        push_one(producer, trajectory("b", 0, 3))
        fake.scripts.hset(run.keys.home.trainer, mapping={"max_staleness": "0", "batch_groups": "1"})
        carry_out = Producer._carry_out

        def make_room(self: Producer, request: Any) -> Any:
            if isinstance(request, Pause):
                fake.scripts.hset(run.keys.home.trainer, "batch_groups", "2")
            return carry_out(self, request)

        with monkeypatch.context() as patch:
            patch.setattr(Producer, "_carry_out", make_room)
            with pytest.raises(TrajectoryError, match="group_size is 2, group b is open with 3"):
                producer.push_many([group_of("b"), group_of("c")], timeout=10)
        assert ledger(run)["pushed"] == 3
    assert problems(run) == []


def test_a_producer_that_was_admitted_no_longer_waits(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    carry_out = Producer._carry_out

    def admit_after_pauses(self: Producer, request: Any) -> Any:
        if not isinstance(request, Pause):
            return carry_out(self, request)
        forward(2.0)
        if next(pauses, None) is None:
            fake.scripts.hincrby(run.keys.home.trainer, "batch_groups", 1)
        return None

    with producing(fake, "r") as producer, monkeypatch.context() as patch:
        run = join(fake, "r")
        fake.scripts.hset(run.keys.home.trainer, mapping={"max_staleness": "0", "batch_groups": "1"})
        patch.setattr(Producer, "_carry_out", admit_after_pauses)
        for name in ("ab", "c"):
            pauses = iter(range(8))  # 18 seconds: too short to be told
            producer.push_many([group_of(group) for group in name])
            assert b"streamadv_blocked{" not in generate_latest(metrics.REGISTRY)
    assert "not admitted" not in caplog.text
