"""Who is admitted: pacing over all shards, bytes by what trajectories need, and what changes meanwhile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import streamadv.producer.logic
from streamadv import cli
from streamadv.errors import Busy, NoBatchError, SettingError
from streamadv.grouping.groups_log import read_log
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.run.manifest import RunSettings
from streamadv.status import read_shards
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.support import (
    compute_all,
    delivered_batch,
    group_all,
    join,
    ledger,
    make_overdue,
    next_batch,
    problems,
    producing,
    references,
    some_of,
    trajectory,
)

MB = 1 << 20
CHAIN = {"estimator": "reinforce"}


def reserved(run: Run) -> int:
    return sum(shard.reservation.total_bytes for shard in read_shards(run))


def live(run: Run) -> int:
    return sum(shard.counters["live_bytes"] for shard in read_shards(run))


def started(
    connection: Connection, batch_groups: int, max_staleness: int, drop_after: int = 100
) -> TrainerQueue:
    """A trainer that has said how it paces, and waits for its first batch."""
    queue = TrainerQueue(
        connection,
        "r",
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        drop_after=drop_after,
        chain=CHAIN,
        settings=RunSettings(),
        commit="each_batch",
    )
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    return queue


def begin_until_busy(producer: Producer, size: int = 8, at_most: int = 100_000) -> int:
    """How many more groups are admitted."""
    for count in range(at_most):
        try:
            producer.begin_group(size, timeout=0)
        except Busy:
            return count
    return at_most


# Pacing over several shards


def ids_of(run: Run, spread: str) -> Iterator[str]:
    """Group ids of one shard only, of two, or as the hash spreads them."""
    allowed = {"one": {0}, "two": {0, 1}, "all": set(range(64))}[spread]
    names = (f"prompt-{number:05d}" for number in itertools.count())
    return (name for name in names if run.keys.shard_of(name) in allowed)


def begin_whole(producer: Producer, group_id: str | None) -> None:
    group = producer.begin_group(1, group_id=group_id, timeout=0)
    group.push([{"rollout_index": 0, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}])


def push_whole(producer: Producer, group_id: str | None) -> None:
    producer.push([trajectory(group_id, 0, 1)])  # opens the group, as replay does


@pytest.mark.parametrize("seed", some_of(range(12), 3))
@pytest.mark.slow
def test_who_is_refused_for_pacing_waits_for_a_batch_that_can_be_named(fake: Connection, seed: int) -> None:
    draw = random.Random(seed)
    shards, batch_groups, max_staleness = draw.choice([2, 3, 4, 8]), draw.randint(1, 9), draw.randint(0, 2)
    spread = ("one", "two", "all", "new")[seed % 4]
    produce = begin_whole if spread == "new" or seed % 3 else push_whole
    with producing(fake, "r", {"shards": shards}) as producer:
        run = join(fake, "r")
        ids = itertools.repeat(None) if spread == "new" else ids_of(run, spread)
        queue = started(fake, batch_groups, max_staleness)
        limit, ahead = (max_staleness + 1) * batch_groups, 0
        for _ in range(4):
            for group_id in ids:
                try:
                    produce(producer, group_id)
                except Busy:
                    break
                ahead += 1
                assert ahead < 2 * limit
            batch = next_batch(queue, run)
            assert batch is not None, "refused, and no batch can be named"
            queue.trained(batch)
            ahead -= batch_groups
    assert problems(run) == []


@pytest.mark.parametrize(("shards", "batch_groups"), [(4, 8), (2, 3), (3, 4), (5, 2), (8, 1)])
def test_pacing_over_shards_allows_no_more_than_one_shard_would(
    fake: Connection, shards: int, batch_groups: int
) -> None:
    """Also where the groups cannot be shared evenly: what is begun beyond is too old for the batch it comes into."""
    with producing(fake, "r", {"shards": shards}) as producer:
        run = join(fake, "r")
        queue = started(fake, batch_groups, 0)
        for _ in range(4):
            begun = 0
            with suppress(Busy):
                while begun < 100:
                    begin_whole(producer, None)
                    begun += 1
            assert begun == batch_groups
            batch = delivered_batch(queue, run)
            queue.trained(batch)
    assert ledger(run)["dropped"] == {}


# Bytes: what trajectories of this run have needed


def play(producer: Producer, size: int, tokens: int, **options: Any) -> None:
    """A whole group of one length."""
    group = producer.begin_group(size, timeout=0, **options)
    group.push([columns(index, tokens) for index in range(size)])


def columns(index: int, tokens: int) -> dict[str, Any]:
    return {
        "rollout_index": index,
        "input_ids": np.ones(tokens, np.int32),
        "response_mask": np.ones(tokens, np.uint8),
        "rollout_log_probs": np.zeros(tokens, np.float32),
        "reward": 1.0,
    }


def test_a_group_reserves_what_trajectories_have_needed(fake: Connection) -> None:
    """2 GB hold thousands of open rollouts of 4,096 tokens, although each could have 4 MiB."""
    with producing(fake, "r", {"max_bytes": 2_000_000_000}) as producer:
        run = join(fake, "r")
        assert begin_until_busy(producer, 8, 20) == 20, "before anything is known: the limit"
        assert reserved(run) == 160 * 4 * MB
        for _ in range(3):
            play(producer, 8, 4096)
        assert begin_until_busy(producer, 8, 400) == 400
        assert reserved(run) < 2_000_000_000
    assert problems(run) == []


@pytest.mark.parametrize(("large", "bucket"), [(10, 20), (11, 60)])
def test_a_rollout_reserves_what_99_of_100_trajectories_have_needed(
    fake: Connection, large: int, bucket: int
) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        sizes = run.keys.home.sizes
        fake.scripts.hset(sizes, mapping={"h20": 1000 - large, "h60": large})
        producer.begin_group(1)
        assert reserved(run) == 2 ** (bucket // 4)
        assert fake.scripts.hget(sizes, f"u{2 ** (bucket // 4)}") == b"1"


def test_sizes_count_from_the_eighth_trajectory_on(fake: Connection) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": MB}) as producer:
        run = join(fake, "r")
        play(producer, 7, 10)
        producer.begin_group(1)
        assert reserved(run) == MB
        play(producer, 1, 10)
        producer.begin_group(1)
        assert MB < reserved(run) < MB + 10_000


def test_each_of_several_shards_has_its_part_of_the_byte_budget(fake: Connection) -> None:
    with producing(
        fake, "r", {"shards": 4, "max_bytes": 32 * MB, "max_trajectory_bytes": 2 * MB}
    ) as producer:
        ids = ids_of(join(fake, "r"), "one")
        for _ in range(4):
            producer.begin_group(1, group_id=next(ids), timeout=0)
        with pytest.raises(Busy, match=f"of max_bytes {8 * MB}"):
            producer.begin_group(1, group_id=next(ids), timeout=0)


def test_a_reservation_covers_the_results_too(redis_url: str, run: str) -> None:
    """The chain stores columns per token: what a worker publishes was reserved with the rollout."""
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        for _ in range(4):
            play(producer, 4, 1000)
        group_all(joined)
        producer.begin_group(1, group_id="before")
        before = reserved(joined)
        queue = TrainerQueue(
            redis_url, run, batch_groups=4, chain={"estimator": "reinforce_plus_plus"}, commit="each_batch"
        )
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        pushed = live(joined)
        compute_all(joined)
        ratio = live(joined) / pushed
        assert ratio > 1.2
        producer.begin_group(1, group_id="after")
        # the group begun before counts at the present size
        assert reserved(joined) >= 2 * before * ratio * 0.99
        queue.close()


@pytest.mark.parametrize("seed", some_of(range(6), 3))
@pytest.mark.slow
def test_bytes_reserved_and_live_stay_within_the_budget_at_every_admission(
    fake: Connection, seed: int
) -> None:
    """Sizes grow in mid-run; groups fail, expire, come twice, and have places to spare."""
    draw = random.Random(seed)
    budget, limit = 4 * MB, 64 << 10
    with producing(
        fake, "r", {"max_bytes": budget, "max_trajectory_bytes": limit, "redundancy": 2}
    ) as producer:
        run = join(fake, "r")
        groups: list[Any] = []
        admitted, early = 0, 0
        for step in range(300):
            tokens = draw.randint(20, 60) * (1 if step < 120 else 40)
            try:
                groups.append(producer.begin_group(4, timeout=0))
                admitted += 1
                assert reserved(run) + live(run) <= budget
            except Busy:
                pass
            early = admitted if step < 120 else early
            group = draw.choice(groups)
            rollout = draw.choice(list(group))
            action = draw.random()
            if action < 0.75:
                group.push([columns(rollout.rollout_index, tokens)])  # a duplicate at times
            elif action < 0.9:
                rollout.fail()
            else:
                make_overdue(run, group.group_id)
            if step % 7 == 0:
                group_all(run)
                groups = groups[-60:]
        assert early > 60, "small ones: more than the limit would have let in"
        group_all(run)
        assert problems(run) == []
        open_now = [member.decode() for member, _ in fake.scripts.zscan_iter(run.keys.home.open)]
        for group_id in open_now:
            make_overdue(run, group_id)
        group_all(run)
        assert reserved(run) == 0
        assert problems(run) == []


def test_members_of_an_admitted_group_are_never_refused(fake: Connection) -> None:
    with producing(fake, "r", {"max_bytes": MB, "max_trajectory_bytes": 100_000}) as producer:
        run = join(fake, "r")
        for _ in range(3):
            play(producer, 8, 10)
            group_all(run)
        groups = [producer.begin_group(8, timeout=0) for _ in range(20)]
        for group in groups:
            assert group.push([columns(index, 2000) for index in range(8)]).codes == ["pushed"] * 8
        assert live(run) > MB
        with pytest.raises(Busy, match="max_bytes"):
            producer.begin_group(1, timeout=0)
    assert problems(run) == []


def test_a_group_that_no_budget_has_room_for_is_an_error(fake: Connection) -> None:
    with producing(fake, "r", {"max_bytes": 8 * MB, "max_trajectory_bytes": 2 * MB}) as producer:
        with pytest.raises(SettingError, match="max_bytes"):
            producer.begin_group(5, timeout=0)
        for _ in range(4):
            play(producer, 2, 10)
        producer.begin_group(500, timeout=0)  # small ones, as far as is known


def test_a_budget_given_later_reaches_producers_that_are_open(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 0.01)
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        producer.begin_group(8, timeout=0)
        with producing(redis_url, run, {"max_bytes": 40 * MB}):
            pass

        def refused() -> bool:
            try:
                producer.begin_group(1, group_id=f"g{next(numbers)}", timeout=0)
            except Busy:
                return True
            make_overdue(joined, f"g{next(numbers) - 2}")
            group_all(joined)
            return False

        numbers = itertools.count()
        until(refused, "the smaller budget is known")
        assert reserved(joined) <= 40 * MB


# Before there is a trainer


def test_tickets_given_before_the_first_trainer_carry_version_0_and_age(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        for number in range(8):
            group = producer.begin_group(1, group_id=f"g{number}")
            assert [ticket.model_version for ticket in group.tickets] == [0]
            next(iter(group)).push(**columns(0, 3))
        producer.push([trajectory("unversioned", 0, 1)])  # a line of a file without versions
        queue = started(fake, 2, 1, drop_after=1)
        versions = []
        for _ in range(2):
            batch = delivered_batch(queue, run)
            versions += [reference.versions for reference in batch.references]
            queue.trained(batch)
        producer.finish()
        batch = delivered_batch(queue, run)
        assert [reference.group_id for reference in batch.references] == ["unversioned"]
    assert versions == [(0, 0)] * 4
    assert ledger(run)["dropped"] == {"stale": 4}


def test_a_record_pushed_under_a_ticket_has_its_version_unless_it_says_none(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(3, group_id="g")
        item = trajectory("g", 0, 3)  # a Trajectory that says nothing of versions
        group.push([item, {**columns(1, 3), "model_version": None}, columns(2, 3)])
        run = join(fake, "r")
        group_all(run)
        (logged,) = read_log(run, 0, "0-0", 10)
    assert [member.versions for member in references(logged)] == [(0, 0), None, (0, 0)]


def test_a_producer_without_a_trainer_says_what_limits_it(
    fake: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with producing(fake, "r") as producer:
        producer.begin_group(1)
        producer.begin_group(1)
    said = [record.message for record in caplog.records if "no trainer" in record.message]
    assert len(said) == 1
    assert "max_bytes" in said[0]
    started(fake, 2, 1)
    caplog.clear()
    with producing(fake, "r") as producer:
        producer.begin_group(1)
    assert not [record for record in caplog.records if "no trainer" in record.message]


def test_a_run_is_created_with_pacing_for_the_time_before_its_trainer(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"runs create --redis {redis_url} --run {run} --batch-groups 3 --max-staleness 1"
    assert cli.main(words.split()) == 0
    assert "max_staleness" in capsys.readouterr().out
    with producing(redis_url, run) as producer:
        assert begin_until_busy(producer, 1, 100) == 6


def test_pacing_before_the_first_trainer_by_the_settings_of_the_run(fake: Connection) -> None:
    with producing(fake, "r", {"batch_groups": 3, "max_staleness": 1}) as producer:
        join(fake, "r")
        assert begin_until_busy(producer, 1, 100) == 6
        started(fake, 10, 1)  # the trainer's own are in force from now on
        assert begin_until_busy(producer, 1, 100) == 14


def test_sizes_of_older_trajectories_count_less(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        sizes = join(fake, "r").keys.home.sizes
        fake.scripts.hset(sizes, mapping={"h20": 4000, "h24": 95})
        producer.begin_group(1)
        assert fake.scripts.hmget(sizes, "h20", "h24") == [b"4000", b"95"]
        fake.scripts.hset(sizes, "h28", 1)
        producer.begin_group(1)
        assert fake.scripts.hmget(sizes, "h20", "h24", "h28") == [b"2000", b"47", None]


def test_a_group_of_a_server_that_has_forgotten_all_sizes_is_admitted_again(fake: Connection) -> None:
    """It was admitted at what trajectories needed; at the limit no budget would have room for it."""
    with producing(fake, "r", {"max_bytes": 8 * MB, "max_trajectory_bytes": 2 * MB}) as producer:
        for _ in range(4):
            play(producer, 2, 10)
        group = producer.begin_group(500, timeout=0)
        fake.scripts.flushall()
        assert group.push([columns(0, 10)]).codes == ["pushed"]
        run = join(fake, "r")
        with pytest.raises(Busy, match="max_bytes"):
            producer.begin_group(1, timeout=0)
        group.push([columns(index, 10) for index in range(1, 8)])  # now sizes are known again
        producer.begin_group(1, timeout=0)
        assert live(run) + reserved(run) <= 8 * MB
    assert problems(run) == []
