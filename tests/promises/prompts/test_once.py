"""Every prompt of every epoch ends exactly once: trained, filtered, or given up with its reason."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.prompts.steps import lease
from streamadv.prompts.stored import Stored, read, read_sets
from streamadv.run import Run
from streamadv.store.scripts import ScriptCall, run_script
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.support import has_been_asked, holding, join, problems, working

EPOCHS, COUNT, SIZE = 2, 7, 2


def record(rollout: Any) -> dict[str, Any]:
    mask = [0, 0, 1, 1, 1]
    index = rollout.rollout_index
    return {
        "input_ids": [1, 2, 3, 4, 5],
        "response_mask": mask,
        "rollout_log_probs": [-1.0] * 5,
        "reward": float(index),
    }


def prompts(**options: Any) -> sa.Prompts:
    return sa.Prompts([f"question {number}" for number in range(COUNT)], **{"epochs": EPOCHS, **options})


def stored(run: Run, name: str | None = None) -> Stored:
    """What the run has of its first set, or of the one of this name."""
    return read(run, next(each for each in read_sets(run) if name in (None, each.name)))


def trainer(url: str, name: str, trained: list[str], **options: Any) -> Callable[[threading.Event], None]:
    given: dict[str, Any] = {
        "batch_groups": 4,
        "max_staleness": 1,
        "chain": {"estimator": "reinforce"},
        **options,
    }
    given.setdefault("drop_after", 1000)  # however slow the machine is

    def train(_: threading.Event) -> None:
        with TrainerQueue(url, name, **given) as queue:
            while (batch := queue.next_batch()) is not None:
                trained.extend({each.group_id for each in batch.references})
                queue.trained(batch)
                queue.commit(queue.state_dict())

    return train


def played(groups: list[str]) -> Counter[str]:
    """(source, epoch, index) of groups, without the try."""
    return Counter(group.rpartition(":")[0] for group in groups)


def test_each_prompt_of_each_epoch_is_trained_once(redis_url: str, run: str) -> None:
    trained: list[str] = []
    seen = []
    with (
        sa.Producer(redis_url, run) as producer,
        working(join(redis_url, run), trainer(redis_url, run, trained)),
    ):
        for prompt, group in producer.prompts(prompts(), SIZE):
            seen.append((prompt, group.tickets[0].metadata["epoch"]))
            group.run(lambda rollout: rollout.push(**record(rollout)))
    found = join(redis_url, run)
    assert sorted(seen) == sorted(
        (f"question {number}", epoch) for epoch in range(EPOCHS) for number in range(COUNT)
    )
    assert set(played(trained).values()) == {1}
    assert len(trained) == EPOCHS * COUNT
    assert stored(found).is_over
    assert stored(found).counters == {"trained 1 0": COUNT, "trained 1 1": COUNT}
    assert not problems(found)


def test_each_prompt_is_trained_once_by_tasks(redis_url: str, run: str) -> None:
    trained: list[str] = []

    async def produce() -> None:
        async def play(rollout: Any) -> None:
            await rollout.push(**record(rollout))

        async with sa.Producer(redis_url, run) as producer, asyncio.TaskGroup() as tasks:
            async for _, group in producer.prompts(prompts(), SIZE):
                tasks.create_task(group.run(play))

    with working(join(redis_url, run), trainer(redis_url, run, trained)):
        asyncio.run(produce())
    assert set(played(trained).values()) == {1}
    assert len(trained) == EPOCHS * COUNT
    assert stored(join(redis_url, run)).is_over


async def test_a_lease_whose_answer_nobody_awaits_is_given_back(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        async with sa.Producer(redis_url, run) as producer:
            first = producer.prompts(sa.Prompts(["one", "two"], shuffle=None), SIZE)
            assert (await anext(first))[0] == "one"
            with holding(client):
                task = asyncio.ensure_future(anext(first))
                await asyncio.to_thread(until, lambda: has_been_asked(client), "asked for a prompt")
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            second = producer.prompts(sa.Prompts(["one", "two"], shuffle=None), SIZE)
            async with asyncio.timeout(10.0):
                assert (await anext(second))[0] == "two"


def test_a_lease_that_is_repeated_after_it_was_given_back_is_known_by_its_nonce(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody can read whose it is: the run would not end."""
    with sa.Producer(redis_url, run) as producer:
        carry_out = producer._carry_out

        def cut_off(request: Any) -> Any:
            if isinstance(request, ScriptCall) and request.script.name == "lease_prompt" and not cut:
                cut.append(request)
                for groups in producer._logic.prompted:
                    producer._drive(groups.give_back())  # as another thread's heartbeat may
                raise redis.exceptions.ConnectionError("cut off")
            return carry_out(request)

        cut: list[ScriptCall] = []
        groups = producer.prompts(prompts(), SIZE)
        next(groups)
        monkeypatch.setattr(producer, "_carry_out", cut_off)
        next(groups)
        assert len(cut) == 1
        assert len(stored(join(redis_url, run)).entries) == 2


def test_a_prompt_that_fails_is_played_again_and_then_given_up(redis_url: str, run: str) -> None:
    trained: list[str] = []

    def play(rollout: Any, prompt: str) -> None:
        first = rollout.group_id.endswith(":0")
        if rollout.rollout_index == 1 and (prompt == "question 3" or (first and prompt == "question 5")):
            raise RuntimeError("the environment is broken")
        rollout.push(**record(rollout))

    with (
        sa.Producer(redis_url, run) as producer,
        working(join(redis_url, run), trainer(redis_url, run, trained)),
    ):
        for prompt, group in producer.prompts(prompts(), SIZE):
            group.run(play, prompt)
    found = stored(join(redis_url, run))
    assert found.is_over
    given_up = {f"given_up:incomplete 1 {epoch}": 1 for epoch in range(EPOCHS)}
    again = {f"again:incomplete 1 {epoch}": 2 for epoch in range(EPOCHS)}
    assert found.counters == {"trained 1 0": COUNT - 1, "trained 1 1": COUNT - 1} | given_up | again
    assert len(trained) == EPOCHS * (COUNT - 1)
    assert set(played(trained).values()) == {1}


def test_a_filter_ends_a_prompt_without_another_try(redis_url: str, run: str) -> None:
    trained: list[str] = []
    settings = sa.RunSettings(zero_variance_filter=True)

    def play(rollout: Any, prompt: str) -> None:
        rollout.push(**record(rollout) | ({"reward": 1.0} if prompt == "question 2" else {}))

    with (
        sa.Producer(redis_url, run, settings=settings) as producer,
        working(join(redis_url, run), trainer(redis_url, run, trained)),
    ):
        for prompt, group in producer.prompts(prompts(epochs=1), SIZE):
            group.run(play, prompt)
    assert stored(join(redis_url, run)).counters == {
        "trained 1 0": COUNT - 1,
        "filtered:zero_variance 1 0": 1,
    }


def test_other_prompts_under_the_same_name_are_refused(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        next(producer.prompts(prompts(), SIZE))
        others = sa.Prompts([f"question {number}!" for number in range(COUNT)], epochs=EPOCHS)
        with pytest.raises(
            SettingError, match=r"fingerprint is '.*', in the run '.*': give all producers the same"
        ):
            next(producer.prompts(others, SIZE))
        with pytest.raises(SettingError, match="epochs is 3, in the run 2"):
            next(producer.prompts(prompts(epochs=3), SIZE))
        with pytest.raises(SettingError, match="the number of prompts is 5, in the run 7"):
            next(producer.prompts(sa.Prompts(range(5), epochs=EPOCHS), SIZE))
        next(producer.prompts(sa.Prompts({"a": [1], "b": [2, 3]}, name="two"), SIZE))
        for other, message in (
            ({"a": [1], "b": [2]}, "the number of prompts of source 'b' is 1, in the run 2"),
            ({"a": [1], "c": [2, 3]}, "the number of prompts of source 'b' is None, in the run 2"),
        ):
            with pytest.raises(SettingError, match=message):
                next(producer.prompts(sa.Prompts(other, name="two"), SIZE))


@pytest.mark.parametrize("name", ["prompt", "epoch"])
def test_metadata_does_not_hide_which_prompt_it_is(name: str, redis_url: str, run: str) -> None:
    with (
        sa.Producer(redis_url, run) as producer,
        pytest.raises(SettingError, match=f"metadata has '{name}': .* use another name"),
    ):
        next(producer.prompts(prompts(), SIZE, metadata={name: 7, "other": 8}))


def test_prompts_are_leased_together_while_many_are_left(redis_url: str, run: str) -> None:
    many = sa.Prompts(range(1000), shuffle=None)
    with sa.Producer(redis_url, run) as producer, sa.Producer(redis_url, run) as other:
        groups = producer.prompts(many, SIZE)
        assert [prompt for prompt, _ in itertools.islice(groups, 3)] == [0, 1, 2]
        found = stored(join(redis_url, run))
        assert (found.following, len(found.entries)) == ([15], 15)
        assert next(other.prompts(many, SIZE))[0] == 15
        groups.close()  # type: ignore[attr-defined]
        assert [prompt for prompt, _ in itertools.islice(other.prompts(many, SIZE), 13)] == [
            *range(3, 15),
            16,
        ]


def test_the_same_prompts_in_the_words_of_another_release_are_played(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        next(producer.prompts(prompts(), SIZE))
        joined = join(redis_url, run)
        described = joined.keys.home.prompts
        words = json.loads(joined.connection.scripts.hget(described, "train"))
        for added_since in ("skip_solved", "best_reward", "select"):
            del words[added_since]
        joined.connection.scripts.hset(described, "train", json.dumps(words))
        _, group = next(producer.prompts(prompts(), SIZE))
        assert group.group_id != ""
        with pytest.raises(SettingError, match="retries is 5, in the run 1"):
            next(producer.prompts(prompts(retries=5), SIZE))


def test_a_lease_whose_reply_was_lost_is_had_again(redis_url: str, run: str) -> None:
    many = sa.Prompts(range(1000), shuffle=None)
    with sa.Producer(redis_url, run) as producer:
        groups = producer.prompts(many, SIZE)
        next(groups)
        joined = join(redis_url, run)

        def ask(mode: str) -> Any:
            return run_script(joined.connection.scripts, lease(joined.keys.home, many.set, mode, "n", "me 1"))

        first, again = ask("lease"), ask("repeat")
        assert sorted(first[2:]) == sorted(again[2:])
        assert first[2:] == [b"1 %d" % position for position in range(15, 30)]


def test_the_last_prompts_are_leased_one_by_one(redis_url: str, run: str) -> None:
    few = sa.Prompts(range(100), shuffle=None)
    with sa.Producer(redis_url, run) as producer, sa.Producer(redis_url, run) as other:
        groups, others = producer.prompts(few, SIZE), other.prompts(few, SIZE)
        assert [next(each)[0] for each in (groups, others, groups)] == [0, 1, 2]
