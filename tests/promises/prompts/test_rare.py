"""What rarely happens to prompts: an older checkpoint, an end that comes in between, groups of another size."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from redis.client import Pipeline

import streamadv as sa
from streamadv import cli
from streamadv.batch.prompts import RunPrompts
from streamadv.batch.selection import share_out
from streamadv.grouping.housekeeping import Housekeeping
from streamadv.prompts.figures import TriesSeen, by_source
from streamadv.prompts.steps import Lease, lease, skip
from streamadv.prompts.stored import carry_ends, check_requeue, give_back_of_lost, read_sets
from streamadv.run import Run
from streamadv.run.dead_letters import requeue
from streamadv.run.run import Shard
from streamadv.status.prompts import read_ends, read_lines, read_progress
from streamadv.store.scripts import run_script
from streamadv.trainer.queue import TrainerQueue
from tests.support import group_all, join, make_overdue, producing

from .test_back import CHAIN, copy_of, play, queue_of, train, trained_of
from .test_once import SIZE, prompts, record, stored
from .test_requeued import kill_logged


def seen_of(run: Run, source: str = "") -> TriesSeen:
    return by_source(read_sets(run)[0], read_ends(run))[source]


# Prompts that are not played, or played although they are left out


def test_a_prompt_that_was_solved_twice_in_one_epoch_is_played_in_the_next(redis_url: str, run: str) -> None:
    given = sa.Prompts(["easy", "hard"], epochs=3, shuffle=None, skip_solved=2)
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(given, SIZE)
        with queue_of(redis_url, run) as queue:
            older = copy_of(queue)
        for _ in range(2):
            with queue_of(redis_url, run) as queue:
                queue.load_state_dict(older)
                for reward in (1.0, 0.0):
                    play(groups, 1, reward=reward)
                train(queue, joined, 1)
                queue.commit(queue.state_dict())
        prompt, group = next(groups)
        assert (prompt, group.tickets[0].metadata["epoch"]) == ("easy", 1)


def test_an_epoch_between_in_which_a_prompt_was_given_up_counts(redis_url: str, run: str) -> None:
    epochs = []
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(sa.Prompts(["one"], epochs=4, skip_solved=2, retries=0), SIZE)
        with queue_of(redis_url, run) as queue:
            for reward in (1.0, None, 1.0, 0.0):
                if (found := next(groups, None)) is None:
                    break
                epochs.append(found[1].tickets[0].metadata["epoch"])
                if reward is None:
                    found[1].cancel(SIZE)
                    group_all(joined)
                    carry_ends(joined)
                    continue
                found[1].run(lambda rollout: rollout.push(**record(rollout) | {"reward": 1.0}), threads=1)
                train(queue, joined, 1)
                queue.commit(queue.state_dict())
    assert epochs == [0, 1, 2, 3]


@pytest.mark.slow
def test_ends_of_many_groups_that_expire_at_once_are_carried(redis_url: str, run: str) -> None:
    """No server has lost anything: groups of killed producers expire while nobody asks for prompts."""
    count = 5000
    with producing(redis_url, run, {"max_trajectory_bytes": 4096}) as producer:
        joined = join(redis_url, run)
        for _, group in itertools.islice(producer.prompts(sa.Prompts(range(count), shuffle=None), 1), count):
            make_overdue(joined, group.group_id)
        housekeeping = Housekeeping(joined)
        for _ in range(count // 200):
            housekeeping.round()
        carry_ends(joined)
        assert stored(joined).counters == {"again:expired 1 0": count}


def test_solved_prompts_that_are_set_back_are_played(redis_url: str, run: str) -> None:
    given = sa.Prompts(["one", "two"], epochs=2, shuffle=None, skip_solved=1)
    with sa.Producer(redis_url, run) as producer:
        joined, groups = join(redis_url, run), producer.prompts(given, SIZE)
        with queue_of(redis_url, run) as queue:
            older = copy_of(queue)
            play(groups, 2, reward=1.0)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        home = joined.keys.home
        _, entry, item = leased = run_script(
            joined.connection.scripts, lease(home, given.set, "lease", "nonce", "producer 1")
        )
        assert leased == [b"leased", entry, b"1 2"]
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            queue.open()  # the prompts are set back
            call = skip(home, given.set, [Lease(item.decode(), entry.decode())])
            assert run_script(joined.connection.scripts, call) == [0]
            assert len(play(groups, 2, reward=1.0)) == 2  # the checkpoint has not trained on them
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        assert stored(joined).counters == {"trained 1 0": 2}
        assert item.decode() in stored(joined).entries


@pytest.mark.slow
def test_ends_of_many_groups_that_groupers_take_at_once_are_carried(redis_url: str, run: str) -> None:
    count = 5000
    with producing(redis_url, run, {"max_trajectory_bytes": 4096}) as producer:
        joined = join(redis_url, run)
        for _, group in itertools.islice(producer.prompts(sa.Prompts(range(count), shuffle=None), 1), count):
            group.cancel(1)
        group_all(joined)
        assert stored(joined).counters == {"again:incomplete 1 0": count}


@pytest.mark.parametrize("field", ["cursor:0", "again:incomplete 1 0", "given_up"])
@pytest.mark.parametrize("value", ["abc", str(2**63 - 1), "99999999999999999999-1"])
def test_what_a_producer_may_write_stops_no_grouper(redis_url: str, run: str, field: str, value: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        _, group = next(
            producer.prompts(sa.Prompts(range(5), shuffle=None, retries=int(field != "given_up")), 1)
        )
        joined.connection.scripts.hset(joined.keys.home.prompt_state("train"), field, value)
        group.cancel(1)
        group_all(joined)
        assert len(stored(joined).of("-")) == (0 if field == "given_up" else 1)


# The end, and what holds all others up


def test_groups_may_have_another_size_after_a_restart(redis_url: str, run: str) -> None:
    """Else no producer begins anything, until the deadline of the old groups: an hour."""
    with sa.Producer(redis_url, run, name="engine") as producer:
        _, group = next(producer.prompts(prompts(epochs=1), SIZE))
        group.tickets[0].to_json()  # somebody plays it, and dies
    with sa.Producer(redis_url, run, name="engine") as producer:
        assert give_back_of_lost(join(redis_url, run), {b"engine": 10**15}) == 1  # as groupers do
        _, again = next(producer.prompts(prompts(epochs=1), SIZE + 1))
        assert (again.group_id, again.size) == (group.group_id, SIZE)


@pytest.mark.parametrize("is_played_elsewhere", [False, True])
def test_a_group_that_nobody_plays_is_there_for_others_once_its_producer_leaves(
    redis_url: str, run: str, is_played_elsewhere: bool
) -> None:
    """An error in the loop ends it in good order. Its group would hold up the run until its deadline: an hour."""
    with suppress(ZeroDivisionError), sa.Producer(redis_url, run) as producer:
        for _, group in producer.prompts(prompts(epochs=1), SIZE):
            if is_played_elsewhere:
                group.tickets[0].to_json()
            raise ZeroDivisionError
    found = stored(join(redis_url, run))
    assert len(found.of("-")) == (0 if is_played_elsewhere else 1)
    assert len(found.entries) == 1
    with sa.Producer(redis_url, run) as other:
        _, again = next(other.prompts(prompts(epochs=1), SIZE))
    assert (again.group_id == group.group_id) is not is_played_elsewhere


# Figures


@pytest.fixture
def given_up_before(redis_url: str, run: str) -> Iterator[tuple[Run, str, Any]]:
    """A run that is back at a checkpoint before which a dead group's prompt was given up; that group, its trainer."""
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1, retries=0), SIZE)
        (dead,) = play(groups, 1)
        kill_logged(redis_url, run, joined)
        carry_ends(joined)
        with queue_of(redis_url, run) as queue:
            play(groups, 4)
            train(queue, joined, 1)
            older = copy_of(queue)
            queue.commit(older)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            assert stored(joined).counters == {"given_up:dead 1 0": 1, "trained 1 0": 2}
            yield joined, dead, queue


def test_what_was_given_up_before_an_older_checkpoint_is_shown_and_requeued(
    given_up_before: tuple[Run, str, Any],
) -> None:
    joined, dead, _ = given_up_before
    check_requeue(joined, dead)
    assert [line.group_id for line in read_lines(joined, stored(joined)) if line.state == "dead"] == [dead]


def test_what_is_requeued_after_an_older_checkpoint_counts_as_trained(
    given_up_before: tuple[Run, str, Any],
) -> None:
    joined, dead, queue = given_up_before
    requeue(joined, dead)
    assert train(queue, joined, 1) == [dead]
    queue.commit(queue.state_dict())
    assert Counter(stored(joined).counters) == Counter({"trained 1 0": 3})


def test_an_end_while_a_checkpoint_is_saved_is_in_its_figures(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer carries the end of a filtered group between the two halves of `stored.read`."""
    settings = sa.RunSettings(zero_variance_filter=True)
    with sa.Producer(redis_url, run, settings=settings) as producer:
        joined, other = join(redis_url, run), join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        carry, hgetall = RunPrompts.carry, Pipeline.hgetall

        def carried_before(self: Any, **options: Any) -> Any:
            monkeypatch.setattr(Pipeline, "hgetall", first_half_at_once)
            return read_sets(joined)

        def first_half_at_once(self: Any, key: Any) -> Any:
            monkeypatch.setattr(Pipeline, "hgetall", hgetall)
            execute = self.execute
            first = hgetall(self, key).execute()
            carry_ends(other)
            self.execute = lambda: first + execute()
            return self

        with queue_of(redis_url, run) as queue:
            play(groups, 2)
            train(queue, joined, 1)
            play(groups, 1, reward=1.0)
            group_all(other)
            monkeypatch.setattr(RunPrompts, "carry", carried_before)
            older = copy_of(queue)
            monkeypatch.setattr(RunPrompts, "carry", carry)
            queue.commit(older)
            play(groups, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            play(groups, 4)
            train(queue, joined, 2)
            queue.commit(queue.state_dict())
        assert stored(joined).is_over
        [line] = read_progress(joined, joined.now_ms())
        assert (line.trained, line.filtered, line.left) == (6, {"zero_variance": 1}, 0)


def test_weights_are_those_of_the_checkpoint(redis_url: str, run: str) -> None:
    asked: list[int] = []

    def select(seen: Mapping[str, TriesSeen]) -> Mapping[str, float]:
        asked.append(seen["a"].tries)
        return {"a": 0, "b": 1}

    given = sa.Prompts({"a": range(9), "b": range(9)}, select=select, select_every=2)
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(given, SIZE)
        with queue_of(redis_url, run) as queue:
            older = copy_of(queue)
            for _ in range(3):
                play(groups, 2)
                train(queue, joined, 1)
            queue.commit(queue.state_dict())
        assert len(asked) == 1
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            assert stored(joined).shares == {"a": 9, "b": 9}


def test_a_requeued_group_is_one_try(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        (group_id,) = play(producer.prompts(prompts(epochs=1, retries=0), SIZE), 1)
        kill_logged(redis_url, run, joined)
        requeue(joined, group_id)
        with queue_of(redis_url, run) as queue:
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        seen = seen_of(joined)
        assert (seen.tries, seen.trained, seen.dropped) == (1, 1, 0)


def test_groups_of_an_interrupted_commit_are_one_try_each(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        options: dict[str, Any] = {"batch_groups": 40, "chain": CHAIN}
        with TrainerQueue(redis_url, run, **options) as queue:
            play(producer.prompts(sa.Prompts(range(99)), SIZE), 40)
            train(queue, joined, 1)
            state = copy_of(queue)
            call, committed = Shard.call, []

            def killed_behind_the_first_part(self: Shard, name: str, *given: Any, **keys: Any) -> Any:
                if name == "commit" and committed:
                    raise KeyboardInterrupt
                committed.extend([name] if name == "commit" else [])
                return call(self, name, *given, **keys)

            monkeypatch.setattr(Shard, "call", killed_behind_the_first_part)
            with pytest.raises(KeyboardInterrupt):
                queue.commit(state)
            monkeypatch.setattr(Shard, "call", call)
        with TrainerQueue(redis_url, run, **options) as queue:
            queue.load_state_dict(state)
        assert trained_of(stored(joined)) == 40
        seen = seen_of(joined)
        assert (seen.tries, seen.trained) == (40, 40)


@pytest.mark.parametrize("cents", [29, 57, 58])
def test_a_share_that_is_a_whole_number_is_had_whole(cents: int) -> None:
    groups = [_Of(source) for source in ("b", "a") for _ in range(100)]
    chosen = share_out(groups, 100, {"a": cents / 100, "b": (100 - cents) / 100})  # type: ignore[arg-type]
    assert sum(group.data_source == "a" for group in chosen) == cents


class _Of:
    def __init__(self, data_source: str) -> None:
        self.data_source = data_source


# Words


def test_other_prompts_of_bytes_are_refused(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        next(producer.prompts(sa.Prompts([b"one", b"two"]), SIZE))
        with pytest.raises(sa.errors.SettingError, match="fingerprint"):
            next(producer.prompts(sa.Prompts([b"three", b"four"]), SIZE))


def test_prompts_are_shown_in_their_order(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with producing(redis_url, run) as producer:
        for _ in itertools.islice(producer.prompts(sa.Prompts(range(12), shuffle=None), SIZE), 12):
            pass
        assert cli.main(["prompts", "show", "--json", "--redis", redis_url, "--run", run]) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    assert [line["index"] for line in shown] == list(range(12))
