"""Prompts that are solved are left out; a function chooses shares from what the last groups have shown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.prompts import TriesSeen
from streamadv.prompts.stored import carry_ends
from tests.support import group_all, join, problems, working

from .test_back import queue_of, train
from .test_once import EPOCHS, SIZE, prompts, record, stored, trainer

#: Of it 13 groups lie between the second and the third epoch, so that the second one has ended by then.
EASY = 1


def source_of(group: Any) -> str:
    return str(group.tickets[0].data_source)


def play(group: Any, reward: float | None) -> None:
    """reward: of both rollouts; None = 0 and 1."""
    for rollout in group:
        rollout.push(**record(rollout) | ({} if reward is None else {"reward": reward}))


@pytest.mark.parametrize("has_filter", [False, True])
def test_what_was_solved_is_left_out_of_later_epochs(redis_url: str, run: str, has_filter: bool) -> None:
    """Whether its group was trained on, or a filter has dropped it."""
    trained: list[str] = []
    seen = Counter[str]()
    settings = sa.RunSettings(zero_variance_filter=has_filter)
    given = prompts(epochs=5, skip_solved=2, best_reward=0.5)
    with (
        sa.Producer(redis_url, run, settings=settings) as producer,
        working(join(redis_url, run), trainer(redis_url, run, trained)),
    ):
        for prompt, group in producer.prompts(given, SIZE):
            seen[prompt] += 1
            play(group, 0.5 if prompt == f"question {EASY}" else None)
    assert seen.pop(f"question {EASY}") == 2
    assert set(seen.values()) == {5}
    found = stored(join(redis_url, run))
    assert found.is_over
    assert {name: count for name, count in found.counters.items() if name.startswith("skipped")} == {
        "skipped 1 2": 1,
        "skipped 1 3": 1,
        "skipped 1 4": 1,
    }
    assert not problems(join(redis_url, run))


def test_an_epoch_between_that_was_not_solved_counts(redis_url: str, run: str) -> None:
    seen: list[int] = []
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(sa.Prompts(["one"], epochs=5, skip_solved=2), SIZE)
        with queue_of(redis_url, run) as queue:
            for reward in (1.0, 0.5, 1.0, 1.0):
                _, group = next(groups)
                seen.append(group.tickets[0].metadata["epoch"])
                play(group, reward)
                train(queue, joined, 1)
                queue.commit(queue.state_dict())
            assert next(groups, None) is None
    assert seen == [0, 1, 2, 3]


def test_a_checkpoint_from_before_prompts_were_left_out_leaves_them_out_again(
    redis_url: str, run: str
) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(sa.Prompts(["one", "two"], epochs=3, shuffle=None, skip_solved=1), SIZE)
        with queue_of(redis_url, run) as queue:
            for _ in range(2):
                play(next(groups)[1], 1.0)
            trained = train(queue, joined, 1)
            older = queue.state_dict()
            queue.commit(older)
            assert next(groups, None) is None  # all of the second and third epoch is left out
            assert stored(joined).counters["skipped 1 1"] == 2
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            assert queue.next_batch(timeout=0, max_groups=1) is None
        found = stored(joined)
        assert found.is_over
        assert found.counters == {"trained 1 0": 2, "skipped 1 1": 2, "skipped 1 2": 2}
        assert len(trained) == 2


def test_shares_are_selected_once_an_epoch(redis_url: str, run: str) -> None:
    """By what the groups of the epoch before have shown; all producers go by the first answer."""
    asked: list[Mapping[str, TriesSeen]] = []

    def select(seen: Mapping[str, TriesSeen]) -> Mapping[str, float]:
        asked.append(seen)
        return {"easy": 0, "hard": 1}

    given = sa.Prompts({"easy": range(4), "hard": range(8)}, epochs=3, retries=0, select=select)
    with sa.Producer(redis_url, run) as producer, sa.Producer(redis_url, run) as other:
        joined = join(redis_url, run)
        groups, others = producer.prompts(given, SIZE), other.prompts(given, SIZE)
        before = [next(each)[1] for each in itertools.islice(itertools.cycle((groups, others)), 12)]
        assert Counter(source_of(group) for group in before) == {"easy": 4, "hard": 8}
        for group in before:
            play(group, 1.0 if source_of(group) == "easy" else None)
        with queue_of(redis_url, run, max_staleness=8) as queue:
            train(queue, joined, 6)
            queue.commit(queue.state_dict())
            after = [next(each)[1] for each in itertools.islice(itertools.cycle((groups, others)), 12)]
            assert Counter(source_of(group) for group in after) == {"hard": 12}
        assert len(asked) == 1
        easy, hard = asked[0]["easy"], asked[0]["hard"]
        assert (easy.tries, easy.trained, easy.solved, easy.reward_mean, easy.reward_deviation) == (
            4,
            4,
            4,
            1,
            0,
        )
        assert (hard.tries, hard.trained, hard.solved, hard.reward_mean, hard.reward_deviation) == (
            8,
            8,
            0,
            0.5,
            0.5,
        )
        assert hard.tokens == 8 * SIZE * 5


def test_shares_are_selected_every_n_batches(redis_url: str, run: str) -> None:
    asked: list[int] = []

    def select(seen: Mapping[str, TriesSeen]) -> Mapping[str, float]:
        asked.append(seen["a"].tries)
        return {"a": 1, "b": 0} if len(asked) == 1 else {"a": 0, "b": 1}

    given = sa.Prompts({"a": range(9), "b": range(9)}, epochs=3, select=select, select_every=2)
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(given, SIZE)
        with queue_of(redis_url, run) as queue:
            sources = []
            for _ in range(6):
                for _ in range(2):
                    _, group = next(groups)
                    sources.append(source_of(group))
                    play(group, None)
                train(queue, joined, 1)
                queue.commit(queue.state_dict())
    assert sources == ["a", "b", "a", "b", *"aaaa", *"bbbb"]
    assert asked == [2, 6]


def test_a_source_of_weight_0_comes_after_the_others(redis_url: str, run: str) -> None:
    given = sa.Prompts({"a": range(2), "b": range(4)}, epochs=2, select=lambda _: {"a": 0, "b": 1})
    with sa.Producer(redis_url, run) as producer:
        groups = producer.prompts(given, SIZE)
        sources = [source_of(next(groups)[1]) for _ in range(12)]
    assert Counter(sources) == {"a": 4, "b": 8}
    assert sources[6:] == [*"bbbb", *"aa"]


def test_numbers_of_numpy_are_weights(redis_url: str, run: str) -> None:
    given = sa.Prompts(
        {"a": range(2), "b": range(8)},
        epochs=2,
        weights={"a": np.float32(0.5), "b": np.int64(1)},
        best_reward=np.float32(1),  # type: ignore[arg-type]
        select=lambda _: {"a": np.float32(0), "b": np.float64(1)},
    )
    with sa.Producer(redis_url, run) as producer:
        groups = producer.prompts(given, SIZE)
        sources = [source_of(next(groups)[1]) for _ in range(16)]
    assert sources[:6] == ["b", "a", "b", "b", "a", "b"]
    assert sources[10:] == ["b"] * 6
    with sa.TrainerQueue(redis_url, run, batch_groups=2, max_staleness=8, quotas={"a": np.float32(1)}):
        pass


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"a": 1}, r"weights are for \['a'\], the sources are \['a', 'b'\]"),
        ({"a": 0, "b": 0}, "all weights are 0"),
        ({"a": -1, "b": 1}, "weight of 'a' is -1, needs a number from 0 on"),
        (None, "select returned None"),
    ],
)
def test_wrong_shares_are_refused(redis_url: str, run: str, answer: Any, problem: str) -> None:
    given = sa.Prompts({"a": range(1), "b": range(1)}, epochs=2, select=lambda _: answer)
    with sa.Producer(redis_url, run) as producer:
        groups = producer.prompts(given, SIZE)
        next(groups), next(groups)
        with pytest.raises(SettingError, match=problem):
            next(groups)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"skip_solved": 10}, "skip_solved is 10, needs a whole number from 0 to 9"),
        ({"skip_solved": True}, "skip_solved is True"),
        ({"best_reward": float("nan")}, "best_reward is nan, needs a number"),
        ({"select": 1}, "select is 1, needs a function"),
        ({"select": len, "select_every": 0}, "select_every is 0, needs a whole number, 1 or more"),
    ],
)
def test_wrong_settings_are_refused(options: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        prompts(**options)


def test_another_setting_is_refused(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        next(producer.prompts(prompts(), SIZE))
        with pytest.raises(SettingError, match="skip_solved is 1, in the run 0"):
            next(producer.prompts(prompts(skip_solved=1), SIZE))


def test_ends_that_are_carried_again_count_once(redis_url: str, run: str) -> None:
    settings = sa.RunSettings(zero_variance_filter=True)
    given = sa.Prompts(["one", "two"], epochs=EPOCHS, shuffle=None, skip_solved=2)
    with sa.Producer(redis_url, run, settings=settings) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(given, SIZE)
        for _ in range(2):
            play(next(groups)[1], 1.0)
        group_all(joined)
        carry_ends(joined)
        joined.connection.scripts.hdel(joined.keys.home.prompt_state("train"), "cursor:0")
        carry_ends(joined)
        counts = joined.connection.scripts.getrange(joined.keys.home.prompt_solved("train"), 0, 9)
    assert counts == bytes([1 | 1 << 2])  # two bits a prompt: each was solved in one epoch


def test_batches_follow_quotas(redis_url: str, run: str) -> None:
    """The groups of one source came first; each batch has its share of both nevertheless."""
    given = sa.Prompts({"code": range(4), "math": range(4)}, weights={"code": 1, "math": 1e8})
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        sources = []
        for _, group in itertools.islice(producer.prompts(given, SIZE), 8):
            sources.append(source_of(group))
            play(group, None)
        assert sources[:4] == ["math"] * 4
        with queue_of(redis_url, run, quotas={"math": 1, "code": 1}) as queue:
            for _ in range(4):
                batch = train(queue, joined, 1)
                assert sorted(group_id.split(":")[2] for group_id in batch) == ["code", "math"]
            queue.commit(queue.state_dict())
        assert not problems(joined)
