"""Several ranks: a restart with another number of them, and what one of them cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.batch.ends import leave_out
from streamadv.batch.record import read_records
from streamadv.batch.session import random_job
from streamadv.errors import SettingError, StreamadvError
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.run.dead_letters import list_dead, purge, requeue, show_dead
from streamadv.store.connection import Connection
from streamadv.trainer.microbatch import Batch
from streamadv.trainer.queue import TrainerQueue
from tests.shares import examples
from tests.support import (
    OneClient,
    delivered_batch,
    fence_of,
    group_all,
    identities,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    pushed_run,
    trajectory,
)
from tests.support import logged as logged_groups

Identity = tuple[str, int]


def delivered(batch: Batch) -> list[Identity]:
    return identities([item.reference for item in batch.delivered])


def start_job(
    connection: Connection, run: str, world_size: int, state: dict[str, Any] | None = None, **options: Any
) -> list[TrainerQueue]:
    """The ranks of a job, as one process group would start them: rank 0 first."""
    options = {"commit": "manual", "job": random_job(), **options}
    ranks = [
        TrainerQueue(connection, run, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    if state is not None:
        for queue in ranks:
            queue.load_state_dict(state)
    return ranks


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_another_world_size_after_a_restart(redis_url: str, run: str, before: int, after: int) -> None:
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 6, size=3, finish=True)

    def step(ranks: list[TrainerQueue]) -> list[tuple[str, int]]:
        """One batch on every rank; what the ranks got together."""
        parts = [next_batch(queue, joined) for queue in ranks]
        members: list[tuple[str, int]] = []
        for queue, part in zip(ranks, parts, strict=True):
            assert part is not None
            assert len(part) == len(parts[0] or ())  # the same number of micro-batches
            members += delivered(part)
            queue.trained(part)
        return members

    first = start_job(connection, run, before, batch_groups=2)
    start = step(first)
    state = first[0].state_dict()
    lost = [step(first), step(first)]  # trained after the checkpoint, by weights that are gone
    second = start_job(connection, run, after, state, batch_groups=2)
    again = [step(second), step(second)]
    assert [sorted(part) for part in again] == [sorted(part) for part in lost]
    everything = start + again[0] + again[1]
    assert len(everything) == len(set(everything)) == 18
    second[0].commit(second[0].state_dict())
    assert ledger(joined)["trained"] == 18
    assert problems(joined) == []


def test_a_rank_of_another_world_size_is_refused(fake: Connection) -> None:
    leader = TrainerQueue(fake, "r", rank=0, world_size=2, job="job1", commit="each_batch").open()
    other = TrainerQueue(fake, "r", rank=1, world_size=3, job="job1", commit="each_batch")
    with pytest.raises(SettingError, match="world_size is 3, rank 0 of job job1 has 2: give every rank"):
        other.next_batch(timeout=0)
    same = TrainerQueue(fake, "r", rank=1, world_size=2, job="job1", commit="each_batch").open()
    assert same.epoch == leader.epoch
    for queue in (leader, other, same):
        queue.close()


@pytest.fixture
def logged(redis_url: str, run: str) -> Run:
    """A run with four groups of four in the log, of different lengths, pushed one by one or two at once."""
    connection = Connection(redis_url)
    with producing(connection, run, {"keep_bytes": 0}) as producer:
        for number in range(4):
            push_apart(producer, f"g{number}", 4, 1 + number % 2)
        producer.finish()
    joined = join(connection, run)
    group_all(joined)
    return joined


def push_apart(producer: Producer, group_id: str, size: int, at_once: int) -> None:
    members = [trajectory(group_id, i, size, tokens=5 + int(group_id[1:]) + i) for i in range(size)]
    for start in range(0, size, at_once):
        producer.push(members[start : start + at_once])


def payload_keys(run: Run) -> dict[Identity, str]:
    """The key of the payload that has a trajectory, perhaps with others."""
    return {
        (group.group_id, index): group.packets[packet].key
        for group in logged_groups(run).values()
        for index, packet in zip(group.members.table["index"].tolist(), group.packet_of, strict=True)
    }


def lose(run: Run, wanted: Sequence[Identity]) -> list[Identity]:
    """Delete the payloads of these trajectories; all that are lost with them."""
    keys = payload_keys(run)
    deleted = {keys[identity] for identity in wanted}
    for key in deleted:
        run.connection.scripts.delete(key)
    return sorted(identity for identity, key in keys.items() if key in deleted)


def all_next(ranks: Sequence[TrainerQueue], run: Run) -> list[Batch]:
    parts = [next_batch(queue, run) for queue in ranks]
    return [part for part in parts if part is not None]


def in_step(parts: Sequence[Batch]) -> None:
    """What ranks have to agree on, or one of them waits for ever in a collective call."""
    assert len({len(part) for part in parts}) == 1
    assert len({(part.num_tokens, part.num_rows, part.num_trajectories, part.id) for part in parts}) == 1
    assert len({tuple(identities(part.references)) for part in parts}) == 1
    assert len({frozenset(mb.columns) for part in parts for mb in part}) <= 1


@pytest.mark.parametrize("wanted", [[("g1", 2)], [("g0", 0), ("g0", 3), ("g3", 1)]], ids=["one", "three"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_rank_cannot_read_stops_nobody(logged: Run, world_size: int, wanted: list[Identity]) -> None:
    everything = sorted(payload_keys(logged))
    lost = lose(logged, wanted)
    ranks = start_job(logged.connection, logged.name, world_size, tokens_per_micro_batch=16, batch_groups=4)
    parts = all_next(ranks, logged)
    in_step(parts)
    assert parts[0].num_trajectories == 16
    assert sorted(identity for part in parts for identity in delivered(part)) == [
        identity for identity in everything if identity not in lost
    ]
    rows = [(r.group_id, r.rollout_index) for part in parts for mb in part for r in mb.references]
    assert sorted(rows) == [identity for identity in everything if identity not in lost]
    assert ledger(logged)["in_flight"] == 16
    assert problems(logged, deep=False) == []
    ranks[0].trained(parts[0])
    ranks[0].commit(ranks[0].state_dict())
    counts = ledger(logged)
    assert (counts["trained"], counts["dead"]) == (16 - len(lost), {"undecodable": len(lost)})
    assert problems(logged) == []
    assert {dead.group_id: dead.trajectories for dead in list_dead(logged)} == {
        group_id: sum(each == group_id for each, _ in lost) for group_id, _ in lost
    }
    group_id = lost[0][0]
    details = {f"rollout {i}: payload is gone, or is no hash" for each, i in lost if each == group_id}
    assert show_dead(logged, group_id).detail in details
    with pytest.raises(StreamadvError, match="cannot be requeued"):
        requeue(logged, group_id)
    purge(logged, group_id)
    assert ledger(logged)["dead"] == {"undecodable": len(lost)}
    assert problems(logged) == []


def test_a_rank_that_can_read_nothing_keeps_in_step(logged: Run) -> None:
    def job() -> list[Batch]:
        late = {"old_log_probs": lambda mb: mb.rollout_log_probs}
        ranks = start_job(logged.connection, logged.name, 2, batch_groups=4, late=late)
        return all_next(ranks, logged)

    lost = lose(logged, delivered(job()[1]))
    parts = job()
    in_step(parts)
    assert [mb.num_rows for mb in parts[1]] == [0]
    assert parts[1].delivered == []
    assert len(parts[0].delivered) == 16 - len(lost)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_left_out_once_stays_out(logged: Run, world_size: int) -> None:
    """A restart plans again, and the rank that has the trajectory now might read it."""
    key = payload_keys(logged)["g2", 1]
    stored: Any = logged.connection.scripts.hgetall(key)
    lose(logged, [("g2", 1)])
    first = start_job(logged.connection, logged.name, 2, batch_groups=4)
    all_next(first, logged)
    logged.connection.scripts.hset(key, mapping=stored)
    second = start_job(logged.connection, logged.name, world_size, batch_groups=4)
    parts = all_next(second, logged)
    assert ("g2", 1) not in [identity for part in parts for identity in delivered(part)]
    second[0].trained(parts[0])
    second[0].commit(second[0].state_dict())
    assert (ledger(logged)["trained"], ledger(logged)["dead"]) == (15, {"undecodable": 1})
    assert problems(logged) == []


def test_one_rank_alone_buries_the_group_that_two_have_trained_a_part_of(logged: Run) -> None:
    lose(logged, [("g2", 1)])
    first = start_job(logged.connection, logged.name, 2, batch_groups=4)
    all_next(first, logged)
    lose(logged, [("g2", 3)])
    (alone,) = start_job(logged.connection, logged.name, 1, batch_groups=4)
    batch = delivered_batch(alone, logged)
    assert "g2" not in {group_id for group_id, _ in delivered(batch)}
    alone.trained(batch)
    alone.commit(alone.state_dict())
    assert (ledger(logged)["trained"], ledger(logged)["dead"]) == (12, {"undecodable": 4})
    assert problems(logged, deep=False) == []
    (dead,) = list_dead(logged)
    assert (dead.group_id, dead.trajectories, dead.emptied) == ("g2", 4, False)


def test_saying_it_again_changes_nothing(logged: Run) -> None:
    """A reply may be lost; what stands there is the same rank's word, or another's of an earlier job."""
    lose(logged, [("g2", 1)])
    ranks = start_job(logged.connection, logged.name, 2, batch_groups=4)
    parts = all_next(ranks, logged)
    record = read_records(logged)[0]
    for _ in range(2):
        assert leave_out(logged, record, {(record.groups[2].group_id, 1): "gone"}, fence_of(logged))
    ranks[0].trained(parts[0])
    ranks[0].commit(ranks[0].state_dict())
    assert (ledger(logged)["trained"], ledger(logged)["dead"]) == (15, {"undecodable": 1})
    assert [dead.trajectories for dead in list_dead(logged)] == [1]


def test_what_is_left_out_after_a_purge_has_a_letter_of_its_own(logged: Run) -> None:
    ranks = start_job(logged.connection, logged.name, 2, batch_groups=4)
    all_next(ranks, logged)
    record = read_records(logged)[0]
    for index in range(2):
        assert leave_out(logged, record, {("g2", index): "gone"}, fence_of(logged))
        assert [(dead.group_id, dead.trajectories) for dead in list_dead(logged)] == [("g2", 1)]
        purge(logged, "g2")
    assert problems(logged) == []


def test_nothing_is_counted_for_a_rank_that_comes_after_the_commit(logged: Run) -> None:
    ranks = start_job(logged.connection, logged.name, 2, batch_groups=4)
    (part,) = all_next(ranks[:1], logged)
    record = read_records(logged)[0]
    ranks[0].trained(part)
    ranks[0].commit(ranks[0].state_dict())
    assert not leave_out(logged, record, {(record.groups[0].group_id, 0): "gone"}, fence_of(logged))
    assert (ledger(logged)["trained"], ledger(logged)["dead"]) == (16, {})
    assert list(list_dead(logged)) == []
    assert problems(logged) == []


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_whatever_is_lost_between_restarts_what_is_trained_on_is_what_the_ledger_says(
    data: st.DataObject,
) -> None:
    """Jobs of any size, one after another, each after another loss; the last one commits."""
    connection = OneClient()
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    with producing(connection, "r") as producer:
        for number, size in enumerate(sizes):
            push_apart(producer, f"g{number}", size, data.draw(st.integers(1, size)))
        producer.finish()
    run = join(connection, "r")
    group_all(run)
    everything = sorted(payload_keys(run))
    lost: set[Identity] = set()
    for world_size in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        fresh = data.draw(st.sets(st.sampled_from(everything), max_size=3))
        lost |= {*fresh, *lose(run, sorted(fresh & payload_keys(run).keys()))}
        ranks = start_job(connection, "r", world_size, batch_groups=3, chain="grpo")
        parts = all_next(ranks, run)
        if parts:
            in_step(parts)
    trained = [identity for part in parts for identity in delivered(part)]
    assert len(trained) == len(set(trained))
    assert not lost & set(trained)
    if parts:
        ranks[0].trained(parts[0])
        ranks[0].commit(ranks[0].state_dict())
    counts = ledger(run)
    assert (counts["trained"], counts["in_flight"]) == (len(trained), 0)
    assert counts["dead"].get("undecodable", 0) == len(everything) - len(trained)
    assert problems(run, deep=False) == []
