"""Faults that a reader of prompts has found: each test says what should hold, and fails until it does."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from redis.client import Pipeline

import streamadv as sa
import streamadv.producer.logic
from streamadv import cli
from streamadv.batch.prompts import RunPrompts
from streamadv.batch.selection import share_out
from streamadv.errors import NoBatchError
from streamadv.grouping.housekeeping import Housekeeping
from streamadv.prompts.figures import TriesSeen, by_source
from streamadv.prompts.steps import lease
from streamadv.prompts.stored import carry_ends, check_requeue, give_back_of_lost, read_sets
from streamadv.run import Run
from streamadv.run.dead_letters import requeue
from streamadv.run.heartbeats import PRODUCER_TIMEOUT_S
from streamadv.run.run import Shard
from streamadv.status.prompts import read_ends, read_lines, read_progress
from streamadv.store.calls import run_script
from streamadv.trainer.queue import TrainerQueue
from tests.support import Forward, group_all, heartbeat, join, make_overdue, producing, working

from .test_back import CHAIN, play, queue_of, train, trained_of
from .test_once import SIZE, prompts, record, stored
from .test_requeued import NEEDS, kill_logged
from .test_sets import play as play_group
from .test_sets import trainer_that_ends


def fault(reason: str, *errors: type[BaseException]) -> Any:
    return pytest.mark.xfail(strict=True, raises=(AssertionError, *errors), reason=reason)


def copy_of(queue: TrainerQueue) -> Any:
    """A checkpoint, as one that was saved and read."""
    return json.loads(json.dumps(queue.state_dict()))


def seen_of(run: Run, source: str = "") -> TriesSeen:
    return by_source(read_sets(run)[0], read_ends(run))[source]


# Prompts that are not played, or played although they are left out


@fault("end_prompts counts an epoch that an older checkpoint plays again as another one")
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


@fault("an epoch in which a prompt was given up leaves the count of epochs running as it was")
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


@fault("a prompt that is leased as 'again' is not looked up among those that were solved")
def test_a_solved_prompt_whose_producer_was_killed_is_left_out(redis_url: str, run: str) -> None:
    """It was killed between the lease and the look at what was solved: no group of the prompt is begun."""
    with sa.Producer(redis_url, run) as producer, queue_of(redis_url, run) as queue:
        joined = join(redis_url, run)
        groups = producer.prompts(sa.Prompts(["one", "two"], epochs=2, skip_solved=1), SIZE)
        play(groups, 2, reward=1.0)
        train(queue, joined, 1)
        queue.commit(queue.state_dict())
        asked = lease(joined.keys.home, read_sets(joined)[0], "lease", "n" * 28, "killed 1")
        assert run_script(joined.connection.scripts, asked)[0] == b"leased"
        assert give_back_of_lost(joined, {b"killed": 2}) == 1
        assert next(groups, None) is None


@fault("a shard keeps 4,096 ends, and nobody carries those of groups that expire")
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


# The end, and what holds all others up


@fault("two tries of a prompt fill the room of a batch: neither trainer nor producers go on", NoBatchError)
def test_two_tries_of_a_prompt_leave_room_for_another_group(redis_url: str, run: str) -> None:
    paces: dict[str, Any] = {"batch_groups": 2, "max_staleness": 0}
    with sa.Producer(redis_url, run, settings=sa.RunSettings(**paces)) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE, timeout=2)
        (first,) = play(groups, 1)
        group_all(joined)
        with TrainerQueue(redis_url, run, **paces, **NEEDS) as queue, suppress(NoBatchError):
            queue.next_batch(timeout=0)
        carry_ends(joined)
        check_requeue(joined, first)  # the operator's first request
        _, again = next(groups)  # a producer leases the next try
        requeue(joined, first)  # the operator's second request
        again.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
        group_all(joined)
        with TrainerQueue(redis_url, run, **paces, chain=CHAIN) as queue, working(joined):
            with suppress(sa.errors.Busy):
                play(groups, 1)
            assert queue.next_batch(timeout=5) is not None


@fault("a producer that waits for the end of its first set counts as finished: the trainer ends the run")
def test_a_set_that_follows_another_one_is_trained(redis_url: str, run: str) -> None:
    trained: list[str] = []
    train_all, _ = trainer_that_ends(redis_url, run, trained)
    with sa.Producer(redis_url, run) as producer, working(join(redis_url, run), train_all):
        for _, group in producer.prompts(sa.Prompts(range(3), name="first"), SIZE):
            play_group(group)
        second = producer.prompts(sa.Prompts(range(4), name="second"), SIZE)
        for _, group in itertools.islice(second, 4):
            play_group(group)
        until = time.monotonic() + 15
        while len(trained) < 7 and time.monotonic() < until:
            time.sleep(0.1)
    assert len(trained) == 7


class Bad(list[int]):
    """A list of which a prompt cannot be read."""

    is_bad = False

    def __getitem__(self, index: Any) -> Any:
        if self.is_bad and index == 0:
            raise OSError("the image is broken")
        return super().__getitem__(index)


@fault("what is given back is leased first: all producers get the same prompt, again and again")
def test_a_prompt_that_nobody_can_read_does_not_hold_up_the_others(redis_url: str, run: str) -> None:
    source = Bad(range(9))
    with producing(redis_url, run) as producer:
        given = sa.Prompts(source, shuffle=None)
        source.is_bad = True
        begun = 0
        for _ in range(5):  # as a producer that is started again
            with suppress(OSError):
                for _ in producer.prompts(given, SIZE):
                    begun += 1
                    if begun == 8:
                        break
        assert begun == 8


@fault("a group that is open with another size is begun again and again", sa.errors.TrajectoryError)
def test_groups_may_have_another_size_after_a_restart(redis_url: str, run: str) -> None:
    """Else no producer begins anything, until the deadline of the old groups: an hour."""
    with sa.Producer(redis_url, run, name="engine") as producer:
        next(producer.prompts(prompts(epochs=1), SIZE))
    with sa.Producer(redis_url, run, name="engine") as producer:
        assert give_back_of_lost(join(redis_url, run), {b"engine": 10**15}) == 1  # as groupers do
        assert next(producer.prompts(prompts(epochs=1), SIZE + 1))


@fault("leases of a producer that has gone stay, since it is on no list: those of a killed one do not")
def test_what_a_producer_had_begun_that_has_gone_is_there_for_others(
    redis_url: str, run: str, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the loop ends it in good order. Its group would hold up the run until its deadline: an hour."""
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 3600.0)
    with sa.Producer(redis_url, run) as other:
        with suppress(ZeroDivisionError), sa.Producer(redis_url, run) as producer:
            for _ in producer.prompts(prompts(epochs=1), SIZE):
                raise ZeroDivisionError
        joined = join(redis_url, run)
        rounds = Housekeeping(joined)
        for _ in range(12):
            rounds.round()
            forward(PRODUCER_TIMEOUT_S / 5)
            heartbeat(other)
        assert len(stored(joined).of("-")) == 1


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


@fault("set_back_prompts forgets all that was given up, and keeps the count", sa.errors.StreamadvError)
def test_what_was_given_up_before_an_older_checkpoint_is_shown_and_requeued(
    given_up_before: tuple[Run, str, Any],
) -> None:
    joined, dead, _ = given_up_before
    check_requeue(joined, dead)
    assert [line.group_id for line in read_lines(joined, stored(joined)) if line.state == "dead"] == [dead]


@fault("set_back_prompts forgets all that was given up: what is requeued is trained on and not counted")
def test_what_is_requeued_after_an_older_checkpoint_counts_as_trained(
    given_up_before: tuple[Run, str, Any],
) -> None:
    joined, dead, queue = given_up_before
    requeue(joined, dead)
    assert train(queue, joined, 1) == [dead]
    queue.commit(queue.state_dict())
    assert stored(joined).counters == {"trained 1 0": 3}


@pytest.fixture
def many_given_up(redis_url: str, run: str) -> tuple[Run, str]:
    """A run that has given up 1,001 prompts because their groups are dead, and the first group."""
    count = 1001
    with producing(redis_url, run, {"max_trajectory_bytes": 4096}) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(sa.Prompts(range(count), shuffle=None, retries=0), 1)
        first, *_ = play(groups, count)
        group_all(joined)
        with TrainerQueue(redis_url, run, batch_groups=500, **NEEDS) as queue, suppress(NoBatchError):
            queue.next_batch(timeout=0)
        carry_ends(joined)
        assert stored(joined).counters == {"given_up:dead 1 0": count}
    return joined, first


@fault("of prompts that were given up only the last 1,000 are known to be dead", sa.errors.StreamadvError)
@pytest.mark.slow
def test_any_dead_group_of_many_is_requeued(many_given_up: tuple[Run, str]) -> None:
    check_requeue(*many_given_up)


@fault("of prompts that were given up only the last 1,000 are known to be dead")
@pytest.mark.slow
def test_any_dead_group_of_many_that_is_requeued_counts_as_trained(
    redis_url: str, run: str, many_given_up: tuple[Run, str]
) -> None:
    joined, first = many_given_up
    requeue(joined, first)
    with queue_of(redis_url, run) as queue:
        assert train(queue, joined, 1) == [first]
        queue.commit(queue.state_dict())
    assert stored(joined).counters == {"given_up:dead 1 0": 1000, "trained 1 0": 1}


@fault("counters are read before the entries: what ends between them is in neither")
def test_an_end_while_a_checkpoint_is_saved_is_in_its_figures(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer carries the end of a filtered group between the two halves of `stored.read`."""
    settings = sa.RunSettings(zero_variance_filter=True)
    with sa.Producer(redis_url, run, settings=settings) as producer:
        joined, other = join(redis_url, run), join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        carry, hgetall = RunPrompts.carry, Pipeline.hgetall

        def carried_then_one_ends(self: Any, **options: Any) -> Any:
            found = carry(self, **options)
            play(groups, 1, reward=1.0)
            group_all(other)
            monkeypatch.setattr(Pipeline, "hgetall", first_half_at_once)
            return found

        def first_half_at_once(self: Any, key: Any) -> Any:
            monkeypatch.setattr(Pipeline, "hgetall", hgetall)
            if self.explicit_transaction or self.transaction:  # nobody comes between
                return hgetall(self, key)
            execute = self.execute
            first = hgetall(self, key).execute()
            carry_ends(other)
            self.execute = lambda: first + execute()
            return self

        with queue_of(redis_url, run) as queue:
            monkeypatch.setattr(RunPrompts, "carry", carried_then_one_ends)
            older = copy_of(queue)
            monkeypatch.setattr(RunPrompts, "carry", carry)
            queue.commit(older)
            play(groups, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            play(groups, 6)
            train(queue, joined, 3)
            queue.commit(queue.state_dict())
        assert stored(joined).is_over
        [line] = read_progress(joined, joined.now_ms())
        assert (line.trained, line.filtered, line.left) == (6, {"zero_variance": 1}, 0)


@fault("what was selected in a past that an older checkpoint has taken back stays")
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


@fault("a group that was dead, put back and trained on counts as two tries")
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


@fault("a commit that goes on after an interrupt notes the ends of its first groups once more")
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


@fault("a share that is a whole number may be a little less as a float")
@pytest.mark.parametrize("cents", [29, 57, 58])
def test_a_share_that_is_a_whole_number_is_had_whole(cents: int) -> None:
    groups = [_Of(source) for source in ("b", "a") for _ in range(100)]
    chosen = share_out(groups, 100, {"a": cents / 100, "b": (100 - cents) / 100})  # type: ignore[arg-type]
    assert sum(group.data_source == "a" for group in chosen) == cents


class _Of:
    def __init__(self, data_source: str) -> None:
        self.data_source = data_source


@fault("the estimate takes what is left out as solved for groups to be played")
def test_the_time_to_the_end_knows_of_what_is_left_out(redis_url: str, run: str) -> None:
    """One prompt in 50 is not solved: an epoch has one group, and 8 of them are to come."""
    given = sa.Prompts(range(50), epochs=10, skip_solved=1, shuffle=None)
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(given, 1)
        with TrainerQueue(redis_url, run, batch_groups=50, min_groups=1, chain=CHAIN) as queue:
            for reward, count in ((0.0, 1), (1.0, 49)):
                play(groups, count, reward=reward)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
            play(groups, 1, reward=0.0)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        [line] = read_progress(joined, joined.now_ms() + 100_000)
        assert line.seconds_left is not None
        assert line.seconds_left < 50  # 51 groups took 100 s


@fault("each epoch of each source has counters of its own, for ever: in the server, and in every checkpoint")
@pytest.mark.slow
def test_many_epochs_take_less_than_a_megabyte(redis_url: str, run: str) -> None:
    epochs = 20_000
    with sa.Producer(redis_url, run) as producer:
        next(producer.prompts(sa.Prompts(["one"], epochs=epochs), SIZE))
        joined = join(redis_url, run)
        server, home = joined.connection.scripts, joined.keys.home
        server.delete(home.prompt_entries("train"))
        for start in range(0, epochs, 1000):
            pipe = server.pipeline(transaction=False)
            for epoch in range(start, start + 1000):
                for end in ("0 incomplete -", "1 trained 2,1,0,1,9"):
                    pipe.xadd(home.prompt_ends, {"end": f"prompt:train::{epoch}:0:{end}"})
                pipe.hset(home.prompt_entries("train"), f"1 {epoch}", "0 0 nonce owner 1")
            pipe.hset(home.prompt_state("train"), "next:1", start + 1000)
            pipe.xtrim(home.prompt_ends, 4096)
            pipe.execute()
            carry_ends(joined)
        assert trained_of(stored(joined)) == epochs
        assert server.memory_usage(home.prompt_state("train"), samples=0) < 1_000_000


# Words


@fault("`dead requeue` takes back a count that the checkpoint has taken back")
def test_no_prompt_was_played_again_less_than_never(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        with queue_of(redis_url, run) as queue:
            older = None
            play(groups, 2)
            train(queue, joined, 1)
            _, group = next(groups)
            older = copy_of(queue)
            queue.commit(older)
            play(groups, 2)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        group.run(lambda rollout: rollout.push(**record(rollout)), threads=1)
        kill_logged(redis_url, run, joined)
        carry_ends(joined)
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            check_requeue(joined, group.group_id)
            requeue(joined, group.group_id)
            carry_ends(joined)
            [line] = read_progress(joined, joined.now_ms())
            assert line.failures == {}


@fault("metadata= of a loop over prompts loses its keys `prompt` and `epoch`")
def test_metadata_of_the_user_is_kept_or_refused(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer, suppress(sa.errors.SettingError):
        _, group = next(producer.prompts(prompts(), SIZE, metadata={"prompt": "mine"}))
        assert group.tickets[0].metadata["prompt"] == "mine"


@fault("64 prompts of each source are compared, and of those that JSON cannot say the type")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (list(range(1000)), [-5 if each == 5 else each for each in range(1000)]),
        ([b"one", b"two"], [b"three", b"four"]),
    ],
)
def test_other_prompts_are_refused(redis_url: str, run: str, before: list[Any], after: list[Any]) -> None:
    with producing(redis_url, run) as producer:
        next(producer.prompts(sa.Prompts(before), SIZE))
        refused = False
        try:
            next(producer.prompts(sa.Prompts(after), SIZE))
        except sa.errors.SettingError:
            refused = True
        assert refused


@fault("prompts in play are sorted as texts")
def test_prompts_are_shown_in_their_order(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with producing(redis_url, run) as producer:
        for _ in itertools.islice(producer.prompts(sa.Prompts(range(12), shuffle=None), SIZE), 12):
            pass
        assert cli.main(["prompts", "show", "--json", "--redis", redis_url, "--run", run]) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    assert [line["index"] for line in shown] == list(range(12))
