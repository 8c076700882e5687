"""The trainer queue: what is named, delivered, trained and committed, also across restarts and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from streamadv import metrics
from streamadv.algorithms import build_chain, expand, run_chain
from streamadv.batch.progress import Progress
from streamadv.errors import EpochFencedError, NoBatchError, SettingError
from streamadv.metrics import instruments
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.store.connection import Connection
from streamadv.trainer.collect import Collector
from streamadv.trainer.loop import Loop
from streamadv.trainer.microbatch import Batch, MicroBatch
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.columns import EXTRA_DTYPES
from tests.support import (
    delivered_batch,
    group_all,
    identities,
    join,
    ledger,
    next_batch,
    problems,
    push_groups,
    pushed_run,
    trajectory,
)
from tests.unit.algorithms.reference import pack


def queue_of(run: Run, **options: Any) -> TrainerQueue:
    options = {"commit": "each_batch", "batch_groups": 2, "prefetch": 0, "max_staleness": None, **options}
    return TrainerQueue(run.connection, run.name, **options)


def members(batch: Batch | None) -> list[tuple[str, int]]:
    assert batch is not None
    return identities(batch.references)


def values_of(mb: MicroBatch) -> torch.Tensor:
    return torch.sin(mb.input_ids.double()).float()


def log_probs_of(mb: MicroBatch) -> torch.Tensor:
    return -torch.cos(mb.input_ids.double()).float().abs()


def test_every_group_is_trained_once(producer: Producer, joined: Run) -> None:
    """Also those that one script logs within a millisecond."""
    wanted = push_groups(producer, 25, 1)
    producer.finish()
    queue = queue_of(joined, batch_groups=10)
    found: list[str] = []
    sizes = []
    while (batch := next_batch(queue, joined)) is not None:
        found += [reference.group_id for reference in batch.references]
        sizes.append(batch.num_trajectories)
    assert sorted(found) == wanted
    assert sizes == [10, 10, 5], "the rest as a short batch"
    assert ledger(joined)["trained"] == 25
    assert problems(joined) == []


def test_a_run_that_has_ended_is_opened_again_by_a_push(producer: Producer, joined: Run) -> None:
    queue = queue_of(joined)
    push_groups(producer, 1, prefix="a")
    producer.finish()
    assert members(next_batch(queue, joined)) == [("a0000", 0), ("a0000", 1)]
    assert next_batch(queue, joined) is None
    assert next_batch(queue, joined) is None
    push_groups(producer, 1, prefix="b")
    with pytest.raises(NoBatchError, match="no new group for 0 s"):
        next_batch(queue, joined)
    producer.finish()
    assert members(next_batch(queue, joined)) == [("b0000", 0), ("b0000", 1)]
    assert next_batch(queue, joined) is None


def test_a_batch_reads_ahead_while_another_is_trained(producer: Producer, joined: Run) -> None:
    push_groups(producer, 6)
    queue = queue_of(joined, prefetch=1)
    first = delivered_batch(queue, joined)
    assert ledger(joined)["in_flight"] == 8
    second = queue.next_batch(timeout=0)
    assert second is not None
    assert (first.version, second.version) == (0, 1)
    assert not set(members(first)) & set(members(second))


def test_stale_groups_are_dropped_when_the_batch_is_named(producer: Producer, joined: Run) -> None:
    queue = queue_of(joined, batch_groups=1, drop_after=1)
    push_groups(producer, 3, prefix="a", model_version=0)
    versions = []
    for _ in range(2):
        batch = delivered_batch(queue, joined)
        versions.append((batch.version, batch.staleness))
    assert versions == [(0, [0, 0]), (1, [1, 1])]
    push_groups(producer, 1, prefix="b", model_version=[1, 5])
    push_groups(producer, 1, prefix="c", model_version=9)
    batch = next_batch(queue, joined)
    assert members(batch) == [("b0000", 0), ("b0000", 1)]
    assert batch is not None
    assert batch.staleness == [1, 1]
    assert ledger(joined)["dropped"] == {"stale": 2}
    batch = delivered_batch(queue, joined)
    assert batch.staleness == [0, 0], "above k: never stale"
    assert problems(joined) == []


def test_the_numbers_of_a_batch(producer: Producer, joined: Run) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1]},
        {"input_ids": [4, 5], "response_mask": [0, 1]},
    ]
    producer.push([trajectory("g", 0, 3, rows=rows, reward=1.0), trajectory("g", 1, 3, reward=0.0)])
    producer.push([trajectory("g", 2, 3, reward=0.5, role="baseline")])
    batch = delivered_batch(queue_of(joined, batch_groups=1), joined)
    assert (batch.num_trajectories, batch.num_rows, batch.num_tokens) == (2, 3, 6)
    (mb,) = batch
    assert mb.row_lengths == [3, 2, 5]
    assert mb.input_ids.tolist()[:5] == [1, 2, 3, 4, 5]
    assert mb.advantages.shape == mb.input_ids.shape
    assert mb.advantages[mb.response_mask == 0].abs().sum() == 0
    assert len(set(mb.advantages[:5][mb.response_mask[:5] == 1].tolist())) == 1
    assert torch.equal(mb.returns, mb.advantages)
    assert "critic/score/mean" in batch.metrics
    lines = list(batch.trajectories())
    assert identities(lines) == [("g", 0), ("g", 1)]
    assert (lines[0].batch, len(lines[0].rows)) == (0, 2)
    queue = queue_of(joined, batch_groups=1)
    batch = delivered_batch(queue, joined)
    queue.trained(batch)
    queue.commit(queue.state_dict())
    assert ledger(joined) == {
        **{"pushed": 3, "trained": 2, "dropped": {"baseline": 1}, "dead": {}},
        **{"queued": 0, "in_flight": 0},
    }
    assert problems(joined) == []


def test_of_a_baseline_above_the_budget_nothing_is_told(
    producer: Producer, joined: Run, caplog: pytest.LogCaptureFixture
) -> None:
    producer.push([trajectory(), trajectory(index=1, tokens=30, role="baseline")])
    queue = queue_of(joined, batch_groups=1, tokens_per_micro_batch=16)
    assert members(delivered_batch(queue, joined)) == [("g", 0)]
    assert "oversize" not in caplog.text


def test_a_trajectory_with_a_row_above_the_budget_is_counted_told_and_not_delivered(
    producer: Producer, joined: Run, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = (0.0, 0.25, 1.0)
    for group_id, tokens in (("g", (5, 30, 8)), ("h", (30, 30, 30))):
        producer.push(
            [trajectory(group_id, i, 3, tokens[i], reward=reward) for i, reward in enumerate(rewards)]
        )
    queue = queue_of(joined, batch_groups=1, tokens_per_micro_batch=16)
    batch = delivered_batch(queue, joined)
    assert members(batch) == [("g", 0), ("g", 2)]
    (mb,) = batch
    want = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    assert mb.advantages[[4, -1]].tolist() == pytest.approx([want[0], want[2]], rel=1e-5)
    batch = delivered_batch(queue, joined)
    assert (len(batch), batch.num_trajectories) == (0, 0)
    with pytest.raises(NoBatchError):
        next_batch(queue, joined)
    assert (ledger(joined)["trained"], ledger(joined)["dropped"]) == (2, {"oversize": 4})
    told = [text.split(": they ")[0] for text in caplog.messages if "oversize" in text]
    assert told == [
        "batch 0: trajectories not trained on: 1 of 3, oversize",
        "batch 1: trajectories not trained on: 3 of 3, oversize",
    ]
    assert problems(joined) == []


def test_extra_columns_reach_the_trainer(producer: Producer, joined: Run) -> None:
    """Whatever their dtype; those not per token stay arrays, one for each row."""
    rng = np.random.default_rng(1)
    extras = {f"x_{dtype[1:]}": rng.integers(0, 99, (5, 2)).astype(dtype) for dtype in EXTRA_DTYPES}
    pixels = rng.normal(size=(3, 2, 2)).astype(np.float16)
    producer.push([trajectory("g", 0, 1, pixels={"data": pixels, "per_token": False}, **extras)])
    batch = delivered_batch(queue_of(joined, batch_groups=1), joined)
    (mb,) = batch
    for name, array in extras.items():
        np.testing.assert_array_equal(getattr(mb, name).numpy(), array, strict=True)
    np.testing.assert_array_equal(mb.extras["pixels"][0], pixels, strict=True)
    padded = mb.padded()
    assert padded.x_u2.shape == (1, 5, 2)
    (line,) = batch.trajectories()
    np.testing.assert_array_equal(line.rows[0].extras["pixels"].data, pixels, strict=True)


def test_what_an_earlier_run_computed_is_not_mistaken_for_the_result(producer: Producer, joined: Run) -> None:
    producer.push([trajectory("g", index, advantages=[9.0] * 5, returns=[9.0] * 5) for index in range(2)])
    batch = delivered_batch(queue_of(joined, batch_groups=1), joined)
    (mb,) = batch
    assert mb.advantages.abs().max() < 2


@pytest.mark.parametrize("budget", [None, 7])
def test_late_columns_give_what_the_chain_gives(producer: Producer, joined: Run, budget: int | None) -> None:
    config = {
        "estimator": "gae",
        "gamma": 0.9,
        "lam": 0.8,
        "reward": {"mean": "group"},
        "kl": {"log_probs": "old_log_probs", "coefficient": 0.5},
        "whiten_advantages": True,
    }
    rng = np.random.default_rng(0)
    items = [
        trajectory(f"g{group}", index, reward=float(rng.normal()), ref_log_probs=-rng.random(5))
        for group in range(2)
        for index in range(2)
    ]
    producer.push(items[:2])
    producer.push(items[2:])
    late = {"values": values_of, "old_log_probs": log_probs_of}
    batch = delivered_batch(queue_of(joined, chain=config, late=late, tokens_per_micro_batch=budget), joined)
    ids = torch.tensor(np.concatenate([item.rows[0].input_ids for item in items]))
    columns = [
        {
            "response_mask": item.rows[0].response_mask,
            "ref_log_probs": item.rows[0].ref_log_probs,
            "values": torch.sin(torch.tensor(item.rows[0].input_ids).double()).float().numpy(),
            "old_log_probs": -torch.cos(torch.tensor(item.rows[0].input_ids).double()).float().abs().numpy(),
        }
        for item in items
    ]
    chain = build_chain(config)
    packed = pack(batch.references, columns)
    result = run_chain(chain, packed)
    assert result.advantages is not None
    want = dict(zip(ids.tolist(), expand(packed, result.level, result.advantages).tolist(), strict=False))
    assert len(batch) == (1 if budget is None else 4)
    lines = {(line.group_id, line.rollout_index): line for line in batch.trajectories()}
    got = np.concatenate([lines[item.group_id, item.rollout_index].rows[0].advantages for item in items])
    assert got.tobytes() == expand(packed, result.level, result.advantages).numpy().tobytes()
    assert want
    for mb in batch:
        assert torch.equal(mb.values, values_of(mb))
        assert torch.equal(mb.old_log_probs, log_probs_of(mb))


@pytest.mark.parametrize(("estimator", "wanted"), [("remax", [-0.5, 0.5]), ("rloo", [-3.0, -1.5])])
def test_who_is_not_trained_on_counts_in_his_group_after_a_late_column(
    estimator: str, wanted: list[float], producer: Producer, joined: Run
) -> None:
    """A baseline, and a trajectory above the token budget."""
    for index, reward in enumerate([0.0, 1.0, 5.0, 0.5]):
        tokens, role = 9 if index == 2 else 5, "baseline" if index == 3 else "train"
        fields = {"reward": reward, "role": role, "ref_log_probs": tokens * [-1.0]}
        producer.push([trajectory("g", index, 4, tokens, **fields)])
    chain = {"estimator": estimator, "kl": {"log_probs": "old_log_probs", "coefficient": 0.0}}
    late = {"old_log_probs": log_probs_of}
    queue = queue_of(joined, batch_groups=1, chain=chain, late=late, tokens_per_micro_batch=7)
    batch = delivered_batch(queue, joined)
    assert [mb.advantages[mb.response_mask].tolist() for mb in batch] == [3 * [value] for value in wanted]


def test_a_late_column_is_there_although_the_chain_does_not_need_it(producer: Producer, joined: Run) -> None:
    push_groups(producer, 2)
    batch = delivered_batch(queue_of(joined, late={"old_log_probs": log_probs_of}), joined)
    (mb,) = batch
    assert torch.equal(mb.old_log_probs, log_probs_of(mb))


def test_a_column_nobody_supplies_is_a_start_up_error(producer: Producer, joined: Run) -> None:
    with pytest.raises(
        SettingError, match=r"step estimator needs column values, nobody supplies it: pass late="
    ):
        queue_of(joined, chain={"estimator": "gae"})
    queue_of(joined, chain={"estimator": "gae"}, pushed=["values"])
    late = {"values": lambda mb: mb.input_ids[:1].float()}
    push_groups(producer, 2)
    with pytest.raises(SettingError, match=r"late column values has shape \(1,\)"):
        next_batch(queue_of(joined, chain={"estimator": "gae"}, late=late), joined)


def test_a_group_without_a_column_producers_should_push_is_a_dead_letter(
    producer: Producer, joined: Run
) -> None:
    push_groups(producer, 2, prefix="without")
    push_groups(producer, 2, prefix="with", values=np.zeros(5))
    queue = queue_of(joined, chain={"estimator": "gae"}, pushed=["values"])
    assert {group for group, _ in members(next_batch(queue, joined))} == {"with0000", "with0001"}
    assert ledger(joined)["dead"] == {"missing_column": 4}


def test_what_was_not_committed_comes_again_as_it_was(producer: Producer, joined: Run) -> None:
    push_groups(producer, 6)
    first = queue_of(joined, commit="manual", prefetch=1)
    batches = [next_batch(first, joined) for _ in range(3)]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["version"] == 2, "the last one is not trained yet"
    again = queue_of(joined, commit="manual", prefetch=1, batch_groups=1)
    again.load_state_dict({**state, "version": 1, "groups": state["groups"][:2]})
    for want in batches[1:]:
        got = delivered_batch(again, joined)
        assert want is not None
        assert (got.version, got.id, members(got)) == (want.version, want.id, members(want))
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine.advantages, theirs.advantages)
    assert ledger(joined)["trained"] == 4
    assert problems(joined) == []


def test_without_a_state_the_queue_goes_on_after_the_last_commit(producer: Producer, joined: Run) -> None:
    push_groups(producer, 6)
    first = queue_of(joined, commit="manual")
    one, two = next_batch(first, joined), next_batch(first, joined)
    assert one is not None
    first.commit({**first.state_dict(), "version": 1})
    again = next_batch(queue_of(joined), joined)
    assert two is not None
    assert again is not None
    assert (again.id, again.version) == (two.id, 1)
    assert problems(joined) == []


def test_a_commit_that_was_lost_is_repeated_from_the_checkpoint(producer: Producer, joined: Run) -> None:
    push_groups(producer, 4)
    first = queue_of(joined, commit="manual")
    for _ in range(2):
        batch = delivered_batch(first, joined)
        first.trained(batch)
    state = first.state_dict()  # saved with the weights; the job dies before the commit
    again = queue_of(joined, commit="manual", max_staleness=0)
    again.load_state_dict(state)
    assert ledger(joined)["trained"] == 8
    assert problems(joined) == []
    producer.begin_group(2, timeout=0)  # what was committed does not count as held any more
    with pytest.raises(NoBatchError):
        next_batch(again, joined)


def test_an_older_checkpoint_does_not_commit_what_comes_after_it(producer: Producer, joined: Run) -> None:
    push_groups(producer, 8)
    first = queue_of(joined, commit="manual", prefetch=1)
    states = []
    for _ in range(2):
        batch = delivered_batch(first, joined)
        first.trained(batch)
        states.append(first.state_dict())
        first.commit(states[-1])
    assert ledger(joined)["trained"] == 8
    again = queue_of(joined, commit="manual", prefetch=1)
    again.load_state_dict(states[0])
    assert ledger(joined)["trained"] == 8
    batch = delivered_batch(again, joined)
    assert batch.version == 1
    again.trained(batch)
    again.commit(again.state_dict())
    assert ledger(joined)["trained"] == 12
    third = queue_of(joined)
    assert ledger(joined)["trained"] == 12
    batch = delivered_batch(third, joined)
    assert batch.version == 2
    assert problems(joined) == []


def test_groups_of_a_future_that_was_rolled_back_are_dropped(
    producer: Producer, joined: Run, caplog: pytest.LogCaptureFixture
) -> None:
    push_groups(producer, 1)
    first = queue_of(joined, batch_groups=1, commit="manual", max_staleness=10)
    batch = delivered_batch(first, joined)
    state = {**first.state_dict(), "version": 0, "groups": []}
    first.trained(batch)
    for name in ("future", "far-future"):
        with producer.group(1, group_id=name) as group:
            next(iter(group)).push(input_ids=[1], response_mask=[1], reward=1.0)
    again = queue_of(joined, batch_groups=2, commit="manual", max_staleness=10)
    again.load_state_dict(state)
    assert members(next_batch(again, joined)) == [("g0000", 0), ("g0000", 1)]
    push_groups(producer, 2, prefix="new")
    got = next_batch(again, joined)
    assert {group for group, _ in members(got)} == {"new0000", "new0001"}
    assert ledger(joined)["dropped"] == {"rolled_back": 2}
    assert problems(joined) == []
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (line,) = [text for text in warnings if "not trained on" in text]  # one for both
    assert line.startswith("batch 1: 2 groups are not trained on: rolled_back, played with versions ")


def test_groups_of_a_future_that_was_rolled_back_are_trained_on_if_they_are_kept(
    producer: Producer, joined: Run
) -> None:
    push_groups(producer, 1)
    first = queue_of(joined, batch_groups=1, commit="manual", max_staleness=10)
    batch = delivered_batch(first, joined)
    state = {**first.state_dict(), "version": 0, "groups": []}
    first.trained(batch)
    push_groups(producer, 1, prefix="future", model_version=1)
    again = queue_of(joined, commit="manual", max_staleness=10, keep_rolled_back=True)
    again.load_state_dict(state)
    push_groups(producer, 1, prefix="new", model_version=0)
    seen = {group for _ in range(2) for group, _ in members(next_batch(again, joined))}
    assert seen == {"g0000", "future0000", "new0000"}
    assert ledger(joined)["dropped"] == {}


def test_with_each_batch_a_batch_comes_no_more_once_the_next_one_was_asked_for(
    producer: Producer, joined: Run
) -> None:
    """Nothing was saved, and the job dies."""
    push_groups(producer, 6)
    first = queue_of(joined)
    one, two = delivered_batch(first, joined), delivered_batch(first, joined)
    assert ledger(joined)["trained"] == 4
    again = delivered_batch(queue_of(joined), joined)
    assert members(again) == members(two)
    assert not set(members(again)) & set(members(one))


def test_an_older_trainer_is_fenced(
    producer: Producer, joined: Run, caplog: pytest.LogCaptureFixture
) -> None:
    push_groups(producer, 4)
    old = queue_of(joined, commit="manual")
    batch = delivered_batch(old, joined)
    new = queue_of(joined, commit="manual")
    again = delivered_batch(new, joined)
    assert members(again) == members(batch)
    for attempt in (lambda: old.trained(batch), old.next_batch, lambda: old.commit(old.state_dict())):
        with pytest.raises(EpochFencedError):
            attempt()
    assert "the server is not the one it was" not in caplog.text
    assert old.state_dict()["version"] == batch.version + 1  # still says what it has trained
    new.trained(again)
    new.commit(new.state_dict())
    assert ledger(joined)["trained"] == 4
    assert problems(joined) == []


def test_commit_is_idempotent_and_never_ahead(producer: Producer, joined: Run) -> None:
    push_groups(producer, 4)
    queue = queue_of(joined, commit="manual")
    batch = delivered_batch(queue, joined)
    with pytest.raises(SettingError, match="state has version 1, this queue is at 0"):
        queue.commit({**queue.state_dict(), "version": 1})
    queue.trained(batch)
    for _ in range(3):
        queue.commit(queue.state_dict())
    assert ledger(joined)["trained"] == 4
    with pytest.raises(SettingError, match="state is of run 'other'"):
        queue.load_state_dict({**queue.state_dict(), "run": "other"})


def test_pacing_counts_what_is_trained_but_not_committed_as_done(producer: Producer, joined: Run) -> None:
    queue = queue_of(joined, batch_groups=1, max_staleness=0, commit="manual")
    assert queue.epoch == 1
    for number in range(3):
        push_groups(producer, 1, prefix=f"step{number}-")
        batch = delivered_batch(queue, joined)
        queue.trained(batch)
    assert ledger(joined)["in_flight"] == 6


def test_two_ranks_see_disjoint_parts_that_make_the_whole(producer: Producer, joined: Run) -> None:
    push_groups(producer, 5, 3)
    producer.finish()
    leader = queue_of(joined, rank=0, world_size=2, tokens_per_micro_batch=10, job="first")
    follower = queue_of(joined, rank=1, world_size=2, tokens_per_micro_batch=10, job="first")
    seen: list[tuple[str, int]] = []
    while (mine := next_batch(leader, joined)) is not None:
        theirs = delivered_batch(follower, joined)
        assert (mine.id, mine.num_tokens, len(mine)) == (theirs.id, theirs.num_tokens, len(theirs))
        parts = [identities(list(batch.trajectories())) for batch in (mine, theirs)]
        assert not set(parts[0]) & set(parts[1])
        assert sorted(parts[0] + parts[1]) == members(mine)
        trained = [mb.response_mask.sum().item() for batch in (mine, theirs) for mb in batch]
        assert sum(trained) == mine.num_tokens
        seen += members(mine)
    assert len(seen) == len(set(seen)) == 15
    assert next_batch(follower, joined) is None
    assert ledger(joined)["trained"] == 15
    assert problems(joined) == []


def test_a_rank_gets_the_batch_that_rank_0_commits_while_it_computes_late_columns(
    producer: Producer, joined: Run
) -> None:
    push_groups(producer, 2)
    committed: list[Batch] = []

    def slow_values(mb: MicroBatch) -> torch.Tensor:
        if not committed:
            committed.append(mine)
            with pytest.raises(NoBatchError):
                leader.next_batch(timeout=0)  # mark="auto", commit="each_batch"
        return values_of(mb)

    leader = queue_of(joined, world_size=2, late={"values": values_of}, job="first")
    late: Mapping[str, Any] = {"values": slow_values}
    follower = queue_of(joined, rank=1, world_size=2, late=late, job="first")
    mine = delivered_batch(leader, joined)
    theirs = delivered_batch(follower, joined)
    assert committed
    assert (theirs.version, theirs.id) == (mine.version, mine.id)
    assert ledger(joined)["trained"] == 4


@pytest.mark.parametrize("chain", ["grpo", {"estimator": "gae"}])
def test_a_rank_without_a_trajectory_runs_the_same_loop(producer: Producer, joined: Run, chain: Any) -> None:
    producer.push([trajectory("g", 0, 1, x=np.zeros((5, 2), np.uint16))])
    late: Mapping[str, Any] = {"values": values_of}
    leader = queue_of(joined, batch_groups=1, world_size=2, chain=chain, late=late, job="first")
    full = next_batch(leader, joined)
    empty = next_batch(queue_of(joined, rank=1, world_size=2, chain=chain, late=late, job="first"), joined)
    assert full is not None
    assert empty is not None
    for (mine,), (theirs,) in [(full, empty)]:
        assert mine.columns.keys() == theirs.columns.keys()
        assert {n: (c.dtype, c.shape[1:]) for n, c in mine.columns.items()} == {
            n: (c.dtype, c.shape[1:]) for n, c in theirs.columns.items()
        }
        assert (theirs.num_rows, theirs.padded().input_ids.shape) == (0, (0, 0))


def test_a_new_job_of_two_ranks_does_not_end_where_the_last_one_did(producer: Producer, joined: Run) -> None:
    push_groups(producer, 1)
    producer.finish()
    queue = queue_of(joined, batch_groups=1)
    while next_batch(queue, joined) is not None:
        pass
    push_groups(producer, 1, prefix="more")
    queue_of(joined, batch_groups=2, world_size=2, job="second").open()
    follower = queue_of(joined, rank=1, world_size=2, job="second")
    with pytest.raises(NoBatchError):
        follower.next_batch(timeout=0)


def test_other_ranks_look_at_the_run_after_rank_0_has_taken_it_over(producer: Producer, joined: Run) -> None:
    """The version is set back by a checkpoint; whoever reads it earlier would go on from another batch."""
    push_groups(producer, 6)
    job = queue_of(joined, commit="manual")
    states = []
    for _ in range(2):
        batch = delivered_batch(job, joined)
        job.trained(batch)
        states.append(job.state_dict())
        job.commit(states[-1])
    leader, follower = (queue_of(joined, rank=rank, world_size=2, job="second") for rank in range(2))
    with pytest.raises(NoBatchError, match="waiting for rank 0 of job second"):
        follower.next_batch(timeout=0)
    leader.load_state_dict(states[0])
    assert follower.epoch == leader.epoch == 2
    mine, theirs = next_batch(leader, joined), next_batch(follower, joined)
    assert mine is not None
    assert theirs is not None
    assert (mine.version, mine.id) == (theirs.version, theirs.id) == (1, mine.id)


def test_other_ranks_need_a_job(producer: Producer, joined: Run) -> None:
    with pytest.raises(
        SettingError, match=r"job is not given on rank 1 of 2: pass the same job= on every rank"
    ):
        _ = queue_of(joined, rank=1, world_size=2).epoch
    with pytest.raises(SettingError, match="rank is 2"):
        queue_of(joined, rank=2, world_size=2)


def test_fake_servers_do_too(fake: Connection) -> None:
    """The demo's first look, without any server."""
    with Producer(fake, "r") as producer:
        push_groups(producer, 2)
        run = join(fake, "r")
        batch = delivered_batch(queue_of(run), run)
        assert batch.num_trajectories == 4
        assert group_all(run) == []


def delivered_tokens() -> float:
    """As this process counts them."""
    (family,) = instruments.DELIVERED_TOKENS.collect()
    return family.samples[0].value


class Timer(Exception):
    pass


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Timer])
@pytest.mark.parametrize("place", ["deliver", "read_ahead", "next_batch", "wait"])
def test_a_batch_that_an_interrupt_keeps_from_the_loop_is_given_again(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, place: str, interrupt: type[BaseException]
) -> None:
    """A notebook's Ctrl-C, a timer: the loop goes on by the next call, and nothing is counted twice."""
    run = pushed_run(fake, "r", 2, finish=True)
    queue = queue_of(run, commit="manual", batch_groups=1)
    interrupts = [interrupt]

    def strike() -> None:
        if interrupts and queue._progress.delivered:
            raise interrupts.pop()

    owners = {"next_batch": Loop, "wait": metrics, "deliver": Progress}
    owner: Any = owners.get(place, Collector)
    genuine: Any = getattr(owner, place)

    def interrupted(*args: Any) -> Any:
        result = genuine(*args)
        strike()
        return result

    @contextmanager
    def left(stage: str) -> Iterator[None]:
        with genuine(stage):
            yield
        strike()

    monkeypatch.setattr(owner, place, left if place == "wait" else interrupted)
    before = delivered_tokens()
    with pytest.raises(interrupt):
        next_batch(queue, run)
    assert queue.state_dict()["version"] == 0
    given = [queue.next_batch(timeout=0), next_batch(queue, run)]
    assert [batch.metrics["ledger/pushed"] for batch in given if batch is not None] == [4, 4]
    assert delivered_tokens() == before + sum(batch.num_tokens for batch in given if batch is not None)
    assert [batch.version for batch in given if batch is not None] == [0, 1]
    assert next_batch(queue, run) is None
    queue.commit(queue.state_dict())
    assert ledger(run)["trained"] == 4
    assert problems(run) == []
