"""Prompts through checkpoints, dead producers and dead letters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import streamadv as sa
from streamadv import cli
from streamadv.errors import NoBatchError
from streamadv.prompts.spec import identity
from streamadv.prompts.stored import (
    Stored,
    carry_ends,
    give_back_of_lost,
)
from streamadv.run import Run, Shard
from streamadv.run.heartbeats import Attendance
from streamadv.status.causes import reasons_of
from streamadv.status.read import read_status
from streamadv.trainer.queue import TrainerQueue
from streamadv.view.board import is_over
from tests.support import delivered_batch, group_all, heartbeat, join, next_batch, problems

from .test_once import COUNT, SIZE, prompts, record, stored

CHAIN = {"estimator": "reinforce"}


def play(groups: Iterator[Any], count: int, **changes: Any) -> list[str]:
    """Play so many groups; their ids."""
    ids = []
    for _ in range(count):
        _, group = next(groups)
        group.run(lambda rollout: rollout.push(**record(rollout) | changes), threads=1)
        ids.append(group.group_id)
    return ids


@contextmanager
def queue_of(url: str, name: str, **options: Any) -> Iterator[TrainerQueue]:
    with TrainerQueue(url, name, batch_groups=2, min_groups=1, chain=CHAIN, **options) as queue:
        yield queue


def copy_of(queue: TrainerQueue) -> Any:
    """A checkpoint, as one that was saved and read."""
    return json.loads(json.dumps(queue.state_dict()))


def train(queue: TrainerQueue, run: Run, batches: int) -> list[str]:
    """Train so many batches; their groups."""
    trained = []
    for _ in range(batches):
        batch = delivered_batch(queue, run)
        trained += sorted({each.group_id for each in batch.references})
        queue.trained(batch)
    return trained


def trained_of(found: Stored) -> int:
    return sum(count for name, count in found.counters.items() if name.startswith("trained "))


def test_an_older_checkpoint_plays_again_what_ended_after_it(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        play(groups, 6)
        with queue_of(redis_url, run) as queue:
            before = train(queue, joined, 1)
            older = json.loads(json.dumps(queue.state_dict()))
            queue.commit(older)
            after = train(queue, joined, 1)
            queue.commit(queue.state_dict())
        assert trained_of(stored(joined)) == 4
        with queue_of(redis_url, run, keep_rolled_back=True) as queue:
            queue.load_state_dict(older)
            assert trained_of(stored(joined)) == 2
            again = play(groups, 3)
            assert {identity(group) for group in after} < {identity(group) for group in again}
            assert not set(after) & set(again)
            trained = before + train(queue, joined, 3)
            queue.commit(queue.state_dict())
        assert sorted(map(identity, trained)) == sorted({identity(group) for group in trained})
        assert trained_of(stored(joined)) == COUNT
        assert next(groups, None) is None
        assert not problems(joined)


def test_the_newest_checkpoint_takes_nothing_back(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        play(groups, 4)
        with queue_of(redis_url, run) as queue:
            trained = train(queue, joined, 1)
            state = queue.state_dict()
            queue.commit(state)
        play(groups, 3)
        with queue_of(redis_url, run, world_size=1) as queue:
            queue.load_state_dict(state)
            trained += train(queue, joined, 3)
            queue.commit(queue.state_dict())
        assert len(trained) == len(set(trained)) == COUNT
        assert next(groups, None) is None
        assert stored(joined).counters == {"trained 1 0": COUNT}


def test_what_a_lost_producer_has_leased_is_there_for_others(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run, name="engine") as lost, sa.Producer(redis_url, run) as other:
        _, group = next(lost.prompts(prompts(epochs=1), SIZE))
        joined = join(redis_url, run)
        assert give_back_of_lost(joined, {b"engine": 0}) == 0
        assert give_back_of_lost(joined, {b"engine": 10**15}) == 1
        assert play(other.prompts(prompts(epochs=1), SIZE), 1) == [group.group_id]


def test_an_iterator_that_is_left_gives_its_prompt_back(redis_url: str, run: str) -> None:
    settings = sa.RunSettings(batch_groups=1, max_staleness=0)
    with sa.Producer(redis_url, run, settings=settings) as producer:
        groups = producer.prompts(prompts(epochs=1), SIZE, timeout=0)
        play(groups, 1)
        with pytest.raises(sa.errors.Busy):
            next(groups)
        found = stored(join(redis_url, run))
        assert len(found.entries) == 2
        assert len(found.of("-")) == 1


def test_commands_say_how_far_it_is(redis_url: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--redis", redis_url, "--run", run]
    with sa.Producer(redis_url, run) as producer:
        groups = producer.prompts(prompts(), SIZE)
        play(groups, 1)
        with next(groups)[1]:
            pass  # its rollouts fail
        group_all(join(redis_url, run))
        heartbeat(producer)
        assert cli.main(["prompts", "list", *options]) == 0
        text = "prompts train: epoch 1 of 2, trained 0 of 14, in play 2, left 12, played again 1 times"
        assert capsys.readouterr().out.strip() == text
        assert cli.main(["status", *options]) == 0
        assert text in capsys.readouterr().out
        assert cli.main(["prompts", "show", "--json", *options]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [line["state"] for line in shown["prompts"]] == ["in play", "again"]
        seen = [(each["tries"], each["dropped"], each["reward_mean"]) for each in shown["seen"]]
        assert seen == [(1, 1, None)]
        assert cli.main(["prompts", "show", *options]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")] == [
            text,
            "begun and not ended (`again`: it waits to be played again), or given up:",
            "what the last groups have shown, over all epochs:",
        ]
        assert cli.main(["prompts", "show", "other", *options]) == 1
        with queue_of(redis_url, run) as queue:
            train(queue, join(redis_url, run), 1)
            queue.commit(queue.state_dict())
        assert cli.main(["prompts", "list", "--json", *options]) == 0
        (source,) = json.loads(capsys.readouterr().out)["prompts"]
        assert (source["trained"], source["skipped"], source["weight"]) == (1, 0, COUNT)
        known = {
            name: source["seen"][name]
            for name in ("tries", "trained", "dropped", "tokens", "reward_deviation")
        }
        assert known == {"tries": 2, "trained": 1, "dropped": 1, "tokens": SIZE * 5, "reward_deviation": 0.5}


def test_a_trainer_that_waits_for_the_last_prompts_to_end_says_so(redis_url: str, run: str) -> None:
    """Their groups are in batches that wait for a checkpoint: no producer makes them come."""
    few = sa.Prompts(range(2), shuffle=None)
    with sa.Producer(redis_url, run) as producer, queue_of(redis_url, run, commit="manual") as queue:
        groups = producer.prompts(few, SIZE)
        play(groups, 2)
        group_all(join(redis_url, run))
        train(queue, join(redis_url, run), 1)
        with pytest.raises(NoBatchError, match=r"2 prompts are in play, none .*\[prompts_begun\]"):
            queue.next_batch(timeout=0)
        groups.close()


@pytest.mark.parametrize("is_committed_for_long", [False, True])
def test_another_try_of_a_trained_prompt_is_dropped(
    redis_url: str, run: str, is_committed_for_long: bool
) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        first = play(producer.prompts(prompts(epochs=1), SIZE), 1)[0]
        with queue_of(redis_url, run, durability_window=0.0) as queue:
            trained = train(queue, joined, 1)
            if is_committed_for_long:
                queue.commit(queue.state_dict())
                with pytest.raises(sa.errors.NoBatchError):
                    queue.next_batch(timeout=0)
                assert not queue.state_dict()["groups"]
            another = producer.begin_group(SIZE, group_id=f"{identity(first)}:1")
            another.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
            group_all(joined)
            with pytest.raises(sa.errors.NoBatchError):
                queue.next_batch(timeout=0)
            queue.commit(queue.state_dict())
        assert trained == [first]
        assert joined.counters()["dropped:repeated"] == SIZE
        assert stored(joined).counters == {"trained 1 0": 1}
        assert not problems(joined)


def test_a_checkpoint_has_prompts_that_were_committed_long_before_it(redis_url: str, run: str) -> None:
    """Their groups are forgotten by then: no server can lose their commit any more."""

    def train_and_forget(queue: TrainerQueue) -> Any:
        train(queue, joined, 1)
        for _ in range(2):  # it commits, then servers say that they cannot lose this
            with pytest.raises(NoBatchError):
                queue.next_batch(timeout=0)
        state = copy_of(queue)
        assert not state["groups"]
        return state

    with sa.Producer(redis_url, run) as producer:
        joined, groups = join(redis_url, run), producer.prompts(prompts(epochs=1), SIZE)
        before = play(groups, 2)
        with queue_of(redis_url, run, commit="each_batch", durability_window=0.0) as queue:
            older = train_and_forget(queue)
            play(groups, 2)
            train_and_forget(queue)
        with queue_of(redis_url, run, commit="each_batch") as queue:
            queue.load_state_dict(older)
            assert stored(joined).counters == {"trained 1 0": 2}
            assert not {identity(group) for group in play(groups, 3)}.intersection(map(identity, before))


@pytest.mark.parametrize("begun", [0, 4])
def test_a_trainer_that_goes_back_after_all_producers_have_left_waits_for_one(
    redis_url: str, run: str, begun: int
) -> None:
    """begun: how many prompts are in play in the checkpoint."""
    few = sa.Prompts(range(4), shuffle=None)
    with sa.Producer(redis_url, run) as producer:
        joined, groups = join(redis_url, run), producer.prompts(few, SIZE)
        with queue_of(redis_url, run) as queue:
            play(groups, begun)
            older = copy_of(queue)
            for _ in range(2):
                play(groups, 2 - begun // 2)
                train(queue, joined, 1)
                queue.commit(queue.state_dict())
        assert next(groups, None) is None
    with queue_of(redis_url, run) as queue:
        queue.load_state_dict(older)
        with pytest.raises(
            NoBatchError, match=r"of prompts train 4 are left, and nobody plays them.*prompts_left"
        ):
            queue.next_batch(timeout=0)
        status = read_status(joined)
        assert [reason.name for reason in reasons_of(status)] == ["prompts_left"]
        assert not is_over(status)
    with queue_of(redis_url, run) as queue:  # as after a crash, at the same place
        queue.load_state_dict(older)
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        with sa.Producer(redis_url, run) as producer:
            groups = producer.prompts(few, SIZE)
            play(groups, 4)
            train(queue, joined, 2)
            queue.commit(queue.state_dict())
            assert next(groups, None) is None
        assert next_batch(queue, joined) is None
    assert stored(joined).counters == {"trained 1 0": 4}


def test_prompts_that_were_set_back_are_played_though_a_producer_has_left_them(
    redis_url: str, run: str
) -> None:
    """Another one had finished before they were set back."""
    few = sa.Prompts(range(3), shuffle=None)
    with sa.Producer(redis_url, run) as producer:
        joined, groups = join(redis_url, run), producer.prompts(few, SIZE)
        with queue_of(redis_url, run) as queue:
            older = copy_of(queue)
            play(groups, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
            groups.close()
            producer.finish()
    with queue_of(redis_url, run) as queue:
        queue.load_state_dict(older)
        queue.open()
        with sa.Producer(redis_url, run) as leaves:
            groups = leaves.prompts(few, SIZE)
            play(groups, 1)
            groups.close()
            leaves.finish()
            train(queue, joined, 1)
        with pytest.raises(NoBatchError, match="prompts_left"):
            queue.next_batch(timeout=0)
        with sa.Producer(redis_url, run) as comes:
            groups = comes.prompts(few, SIZE)
            play(groups, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
            assert next(groups, None) is None
        assert next_batch(queue, joined) is None
    assert stored(joined).counters == {"trained 1 0": 3}


def test_what_was_trained_is_remembered_from_its_deletion_on(
    redis_url: str, run: str, forward: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard deletes long after the run's session says that a batch is committed, and may lose that."""
    call = Shard.call

    def slow(shard: Shard, script: str, *args: Any, **keys: Any) -> Any:
        if script == "commit":
            forward(60.0)
        return call(shard, script, *args, **keys)

    with sa.Producer(redis_url, run) as producer:
        trained = play(producer.prompts(prompts(epochs=1), SIZE), 2)
        with queue_of(redis_url, run, durability_window=30.0) as queue:
            train(queue, join(redis_url, run), 1)
            monkeypatch.setattr(Shard, "call", slow)
            queue.commit(queue.state_dict())
            for is_remembered in (True, False):
                with pytest.raises(NoBatchError):
                    queue.next_batch(timeout=0)  # servers say what they may still lose
                assert sorted(queue.state_dict()["groups"]) == trained * is_remembered
                forward(60.0)


def test_a_prompt_whose_group_a_server_has_lost_ends_with_its_commit(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        play(producer.prompts(prompts(epochs=1), SIZE), 1)
        with queue_of(redis_url, run) as queue:
            train(queue, joined, 1)
            state = queue.state_dict()
        log = joined.home.keys.groups
        [(entry, _)] = joined.connection.scripts.xrange(log)
        joined.connection.scripts.xdel(log, entry)
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(state)
        carry_ends(joined)
        assert stored(joined).counters == {"trained 1 0": 1}


def test_what_is_in_the_weights_ends_though_nobody_plays_any_more(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has lost a commit holds the group once more, in part: it expires after all producers have left."""
    joined = join(redis_url, run)
    with queue_of(redis_url, run) as queue:
        with sa.Producer(redis_url, run) as producer:
            groups = producer.prompts(prompts(epochs=1), SIZE)
            play(groups, COUNT)
            train(queue, joined, (COUNT + 1) // 2)
            queue.commit(queue.state_dict())
            assert next(groups, None) is None
            home = joined.keys.home
            joined.connection.scripts.hset(home.prompt_entries("train"), "1 0", "1 1 -")
            joined.connection.scripts.zadd(home.prompt_again("train"), {"1 0": 0})
        monkeypatch.setattr(Attendance, "has_loop", lambda *_: False)  # as half a minute later
        assert next_batch(queue, joined) is None
    assert stored(joined).is_over


def test_prompts_of_a_newer_checkpoint_are_those_of_it_after_an_older_one_was_loaded(
    redis_url: str, run: str
) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        play(producer.prompts(prompts(epochs=1), SIZE), 4)
        states = []
        with queue_of(redis_url, run) as queue:
            for _ in range(2):
                train(queue, joined, 1)
                queue._progress.servers_confirmed(math.inf, True)  # as long after the commit
                states.append(queue.state_dict())
                queue.commit(states[-1])
        before = stored(joined)
        for state in states:
            with queue_of(redis_url, run) as queue:
                queue.load_state_dict(state)
        assert (stored(joined).counters, stored(joined).entries) == (before.counters, before.entries)


def test_a_run_that_has_lost_its_prompts_gets_them_from_the_checkpoint(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        play(groups, 4)
        with queue_of(redis_url, run) as queue:
            trained = train(queue, joined, 1)
            state = queue.state_dict()
            queue.commit(state)
        home = joined.keys.home
        names = ("state", "entries", "again", "given_up")
        lost = [getattr(home, f"prompt_{name}")("train") for name in names]
        joined.connection.scripts.delete(home.prompts, *lost)
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(state)
            queue.open()
            assert stored(joined).following == [4]
            trained += train(queue, joined, 1)
            play(groups, COUNT - 4)
            trained += train(queue, joined, 2)
            queue.commit(queue.state_dict())
        assert sorted(map(identity, trained)) == sorted(set(map(identity, trained)))
        assert len(trained) == COUNT
        assert next(groups, None) is None
        assert stored(joined).is_over


def test_what_somebody_has_carried_is_not_read_by_others(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sa.Producer(redis_url, run) as producer, queue_of(redis_url, run) as queue:
        play(producer.prompts(prompts(epochs=1), SIZE), 4)
        joined = join(redis_url, run)
        train(queue, joined, 2)
        queue.commit(queue.state_dict())
        assert trained_of(stored(joined)) == 4
        read = []
        call = Shard.call
        monkeypatch.setattr(Shard, "call", lambda *args: read.append(call(*args)) or read[-1])
        carry_ends(joined)
        assert [ends for _, ends, _ in read] == [b""]


@pytest.mark.parametrize(
    "rest", [b"", b" odd\nwords 1", b" incomplete\t\xff - - -", b"\nincomplete", b" \x0b"]
)
def test_ends_that_nobody_of_the_run_has_written_change_nothing(
    redis_url: str, run: str, rest: bytes
) -> None:
    with sa.Producer(redis_url, run) as producer:
        group_id, other = play(producer.prompts(prompts(epochs=1), SIZE), 2)
        joined = join(redis_url, run)
        for entry in ({"end": group_id.encode() + rest}, {"x": "y"}, {"end": f"{other} incomplete "}):
            joined.connection.scripts.xadd(joined.keys.home.prompt_ends, entry)
        carry_ends(joined)
        found = stored(joined)
    assert (len(found.entries), found.counters) == (2, {"again:incomplete 1 0": 1})


def test_the_checkpoint_of_a_trainer_that_began_without_one_has_prompts(redis_url: str, run: str) -> None:
    """With `commit="each_batch"` it goes on from weights with prompts that others have trained on."""
    with sa.Producer(redis_url, run) as producer:
        joined, groups = join(redis_url, run), producer.prompts(prompts(epochs=1), SIZE)
        play(groups, 2)
        with queue_of(redis_url, run, commit="each_batch") as queue:
            before = train(queue, joined, 1)
            with pytest.raises(NoBatchError):
                queue.next_batch(timeout=0)  # which commits
        for _ in range(2):
            producer.begin_group(SIZE).run(lambda rollout: rollout.push(**record(rollout)), threads=1)
        with queue_of(redis_url, run, commit="each_batch") as queue:
            train(queue, joined, 1)
            state = copy_of(queue)
            play(groups, 2)
            train(queue, joined, 1)
            with pytest.raises(NoBatchError):
                queue.next_batch(timeout=0)
        with queue_of(redis_url, run, commit="each_batch") as queue:
            queue.load_state_dict(state)
            queue.open()
            found = stored(joined)
            assert trained_of(found) == len(before) == 2
            assert not {identity(group) for group in before} & {
                identity(found.group_id(item)) for item in found.entries
            }
