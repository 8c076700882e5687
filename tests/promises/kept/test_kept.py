"""Kept: groups that have ended can be looked at, within a budget, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.run.kept import is_kept
from streamadv.status.seen import read_groups_at
from streamadv.store.connection import Connection
from tests.support import (
    Run,
    TrainerQueue,
    delivered_batch,
    group_all,
    housekeep,
    join,
    ledger,
    make_overdue,
    payload_keys,
    problems,
    producing,
    push_groups,
    trajectory,
)

ALL = {"trained": 1.0, "dropped": 1.0, "eval": 1.0, "dead": 1.0}
STEPS = [{"start": 2, "end": 4, "state_key": "a"}, {"start": 4, "end": 5, "state_key": "b"}]


def kept_run(connection: Connection | str, run: str, **settings: Any) -> Run:
    """A run that keeps all, whose grouper has said so."""
    with producing(connection, run, {"keep": ALL, **settings}):
        pass
    joined = join(connection, run)
    housekeep(joined)
    return joined


def train(run: Run, groups: int, chain: Any = "grpo", **options: Any) -> dict[tuple[str, int], Any]:
    """Train on a batch of so many groups and commit it; its trajectories by identity."""
    queue = TrainerQueue(
        run.connection, run.name, batch_groups=groups, chain=chain, commit="manual", **options
    )
    batch = delivered_batch(queue, run)
    delivered = {(each.group_id, each.rollout_index): each for each in batch.trajectories()}
    queue.trained(batch)
    queue.commit(queue.state_dict())
    queue.close()
    return delivered


def looked_at(run: Run, **options: Any) -> dict[tuple[str, int], sa.Trajectory]:
    found = [*sa.kept(run.connection, run=run.name, **options)]
    assert len({(each.group_id, each.rollout_index) for each in found}) == len(found)
    return {(each.group_id, each.rollout_index): each for each in found}


@pytest.mark.parametrize(
    ("chain", "options"),
    [("grpo", {}), ({"estimator": "gae"}, {"pushed": ["values"]}), ({"estimator": "gigpo"}, {})],
)
def test_what_was_trained_on_is_kept_as_it_was_delivered(
    redis_url: str, run: str, chain: Any, options: Any
) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push_groups(producer, 3, values=np.linspace(0, 1, 5), steps=STEPS, metadata={"prompt": 7})
        delivered = train(joined, 3, chain, **options)
        assert payload_keys(joined)
        found = looked_at(joined)
    assert found.keys() == delivered.keys()
    for place, each in found.items():
        (row,), (other,) = each.rows, delivered[place].rows
        for name in ("input_ids", "response_mask", "rollout_log_probs", "values", "advantages", "returns"):
            assert np.array_equal(row.columns[name], other.columns[name]), (name, place)
        for name in ("reward", "status", "metadata", "batch", "staleness", "steps", "model_version"):
            assert getattr(each, name) == getattr(delivered[place], name), name
        assert (each.outcome, each.reason) == ("trained", "trained on in batch 0")
    assert ledger(joined)["trained"] == 6
    assert problems(joined) == []


def test_what_was_not_trained_on_says_why(redis_url: str, run: str) -> None:
    joined = kept_run(redis_url, run, zero_variance_filter=True, difficulty_high=1.5)
    with producing(redis_url, run) as producer:
        producer.push([trajectory("flat", index, 8, reward=0.0) for index in range(8)])
        producer.push([trajectory("easy", index, 2, reward=2.0 + index) for index in range(2)])
        producer.push([trajectory("short", 0, 3)])
        producer.push([trajectory("eval", 0, 1, role="eval", round="step-1")])
        group_all(joined)
        make_overdue(joined, "short")
        housekeep(joined)
    found = {each.group_id: (each.outcome, each.reason) for each in looked_at(joined).values()}
    assert found == {
        "flat": ("zero_variance", "all eight rewards are 0"),
        "easy": ("difficulty", "mean reward 2.5, difficulty_high 1.5"),
        "short": ("expired", "one of three rollouts were there when its deadline came"),
        "eval": ("eval", "evaluation, round step-1"),
    }
    assert problems(joined) == []


def test_a_stale_group_says_which_version_was_too_old(redis_url: str, run: str) -> None:
    joined = kept_run(redis_url, run)
    queue = TrainerQueue(
        joined.connection, run, batch_groups=1, drop_after=0, max_staleness=None, chain="grpo", prefetch=0
    )
    with producing(redis_url, run) as producer:
        producer.push([trajectory("first", index, 2, model_version=0) for index in range(2)])
        queue.trained(delivered_batch(queue, joined))
        producer.push([trajectory("old", index, 2, model_version=0) for index in range(2)])
        producer.push([trajectory("new", index, 2, model_version=1) for index in range(2)])
        queue.trained(delivered_batch(queue, joined))
    queue.close()
    (reason,) = {each.reason for each in looked_at(joined, outcome="stale").values()}
    assert reason == "oldest version 0, batch 1, drop_after 0"
    assert problems(joined) == []


def test_open_and_waiting_groups_are_read_and_stay(redis_url: str, run: str) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        producer.push([trajectory("open", 0, 2)])
        push_groups(producer, 1)
        group_all(joined)
        before = joined.counters()
        assert list(looked_at(joined, where="open")) == [("open", 0)]
        waiting = looked_at(joined, where="waiting")
        assert [each.reason for each in waiting.values()] == 2 * ["waits for a batch"]
        assert looked_at(joined) == {}
        assert joined.counters() == before
        producer.push([trajectory("open", 1, 2)])
        assert len(train(joined, 2)) == 4
    assert {each.batch for each in looked_at(joined, batch=0).values()} == {0}
    assert looked_at(joined, batch=1) == {}
    with pytest.raises(SettingError, match="where is 'gone', needs one of open, waiting, kept, dead"):
        next(sa.kept(redis_url, run=run, where="gone"))  # type: ignore[arg-type]


def test_a_group_with_columns_of_its_own_is_read(redis_url: str, run: str) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        with producer.group(2, group_id="page", columns={"images": np.zeros((2, 3), np.uint8)}) as group:
            for rollout in group:
                rollout.push(input_ids=[1, 2], response_mask=[0, 1], reward=1.0)
        group_all(joined)
        assert list(looked_at(joined, where="waiting")) == [("page", 0), ("page", 1)]
        train(joined, 1)
    assert list(looked_at(joined)) == [("page", 0), ("page", 1)]


def test_the_oldest_go_first_and_the_budget_holds(redis_url: str, run: str) -> None:
    joined = kept_run(redis_url, run, keep_bytes=12_000, zero_variance_filter=True)
    most = 0
    with producing(redis_url, run) as producer:
        for number in range(40):
            producer.push([trajectory(f"g{number}", index, 2, reward=1.0, tokens=50) for index in range(2)])
            group_all(joined)
            most = max(most, joined.counters()["kept_bytes"])
            housekeep(joined)
    ids = list(dict.fromkeys(group_id for group_id, _ in looked_at(joined)))
    assert 3 < len(ids) < 20
    assert ids == [f"g{number}" for number in range(40 - len(ids), 40)]
    assert 8_000 < most <= 12_000
    assert len(payload_keys(joined)) == len(ids)
    assert joined.counters()["live_bytes"] == 0
    assert problems(joined) == []


def test_without_a_budget_nothing_is_kept(redis_url: str, run: str) -> None:
    joined = kept_run(redis_url, run, keep_bytes=0)
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        train(joined, 2)
    assert looked_at(joined) == {}
    assert payload_keys(joined) == []


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("name", ["train:code:0:{}:0", "g{}", "prompt-{:05}"])
def test_the_share_is_spread_over_neighbours(name: str, share: float) -> None:
    """As coins would be: of 200 hundreds the counts deviate as binomial ones do, and blocks of neighbours are short."""
    chosen = np.array([is_kept(name.format(number), share) for number in range(20_000)])
    deviation = chosen.reshape(200, 100).sum(1).std() / np.sqrt(100 * share * (1 - share))
    assert abs(chosen.mean() - share) < 0.01
    assert 0.8 < deviation < 1.2
    assert not np.lib.stride_tricks.sliding_window_view(chosen, 10).all(1).any()


def test_the_share_is_chosen_by_the_id_alike_on_the_server_and_here(redis_url: str, run: str) -> None:
    shares = {"dropped": 0.3, "trained": 0.3}
    joined = kept_run(redis_url, run, zero_variance_filter=True, keep=shares)
    with producing(redis_url, run) as producer:
        same = push_groups(producer, 200, prefix="é-", reward=1.0)
        push_groups(producer, 200, reward=1.0)
        group_all(joined)
        dropped = {group_id for group_id, _ in looked_at(joined)}
        assert 0.2 < len(dropped) / 400 < 0.4
        with producing(redis_url, f"{run}b", {"keep": shares}) as other:
            again = join(redis_url, f"{run}b")
            housekeep(again)
            push_groups(other, 200, prefix="é-")
            train(again, 200)
    assert {group_id for group_id, _ in looked_at(again)} == dropped & set(same)
    assert problems(again) == []


def test_above_maxmemory_nothing_new_is_kept_and_the_oldest_go(
    redis_url: str, run: str, limited: redis.Redis
) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        train(joined, 2)
        assert len(looked_at(joined)) == 4
        push_groups(producer, 2, prefix="later")
        limited.config_set("maxmemory", 1_000_000)
        train(joined, 2)
        assert {group_id for group_id, _ in looked_at(joined)} <= {"g0000", "g0001"}
        housekeep(joined)
        assert looked_at(joined) == {}
        assert payload_keys(joined) == []
        limited.config_set("maxmemory", 0)
    assert ledger(joined)["trained"] == 8
    assert problems(joined) == []


def test_a_kept_group_has_the_divergence_of_its_batch(redis_url: str, run: str) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        producer.push(
            [
                trajectory("g", index, 2, reward=float(index), rollout_log_probs=-np.ones(5))
                for index in range(2)
            ]
        )
        chain = {"estimator": "grpo", "correction": {}}
        train(joined, 1, chain, late={"old_log_probs": lambda micro_batch: micro_batch.input_ids * 0.0 - 1.5})
    (group,) = read_groups_at(joined, "kept")
    assert group.record["metrics"]["rollout_corr/kl"] == pytest.approx(0.5)
