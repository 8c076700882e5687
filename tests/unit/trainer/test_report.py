"""`batch.metrics`: everything a training log needs, as flat numbers under names that loggers take."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from streamadv import metrics
from streamadv.algorithms.packed import PackedBatch
from streamadv.algorithms.registry import Estimate, estimator
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    delivered_batch,
    ended,
    group_all,
    join,
    producing,
    push_groups,
    pushed_run,
    trajectory,
)

#: What differs from rank to rank: rank 0 alone reads the ledger, and each rank measures its own time.
OF_RANK_0 = ("ledger/", "groups/", "trajectories/", "dropped/")
OF_EACH_RANK = ("timing_s/", "trainer/")


def queue_of(fake: Connection, groups: int = 1, **options: Any) -> TrainerQueue:
    options = {"commit": "each_batch", "prefetch": 0, "max_staleness": None, **options}
    return TrainerQueue(fake, "r", batch_groups=groups, **options)


def test_lengths_are_in_trainable_tokens_and_the_others(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for index, tokens in enumerate((4, 6, 9)):  # two of them are the prompt
            producer.push(
                [trajectory("g", index, 3, tokens=tokens, status=["completed", "truncated"][index % 2])]
            )
    metrics = delivered_batch(queue_of(fake), join(fake, "r")).metrics
    assert [metrics[f"response_length/{name}"] for name in ("mean", "max", "min")] == [13 / 3, 7, 2]
    assert [metrics[f"prompt_length/{name}"] for name in ("mean", "max", "min")] == [2, 2, 2]
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["perf/total_num_tokens"] == 19


def test_staleness_has_the_three_forms_of_verl(fake: Connection) -> None:
    """Of the newest and of the oldest version of a trajectory, and how many versions it spans."""
    queue = queue_of(fake)
    with producing(fake, "r") as producer:
        push_groups(producer, 3, prefix="a")
        for _ in range(3):
            queue.trained(delivered_batch(queue, join(fake, "r")))
        versions = [(1, 3), (0, 1), None, (9, 9)]
        items = [trajectory("b", i, 4, model_version=version) for i, version in enumerate(versions)]
        producer.push(items)
    batch = delivered_batch(queue, join(fake, "r"))
    figures = {
        name: [batch.metrics[f"training/off_policy/{name}/{kind}"] for kind in ("mean", "max", "min")]
        for name in ("trajectory_staleness_worst", "trajectory_staleness", "trajectory_spans")
    }
    assert figures == {
        "trajectory_staleness_worst": [5 / 3, 3, 0],
        "trajectory_staleness": [2 / 3, 2, 0],
        "trajectory_spans": [2, 3, 1],
    }
    assert batch.staleness == [2, 3, 0, 0]


def test_without_versions_there_is_no_staleness(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 1, model_version=None)
    metrics = delivered_batch(queue_of(fake), join(fake, "r")).metrics
    assert not [name for name in metrics if name.startswith("training/off_policy")]
    assert "num_turns/mean" not in metrics, "no trajectory has steps"


def test_turns_and_named_rewards(fake: Connection) -> None:
    step = {"row": 0, "start": 2, "end": 3, "reward": 0.0}
    with producing(fake, "r") as producer:
        producer.push([trajectory("g", 0, 2, steps=[step], rewards={"format": 1.0, "answer": 0.5})])
        producer.push([trajectory("g", 1, 2, steps=[step] * 3, rewards={"format": 0.0})])
    metrics = delivered_batch(queue_of(fake), join(fake, "r")).metrics
    assert [metrics[f"num_turns/{name}"] for name in ("mean", "max", "min")] == [2, 3, 1]
    assert metrics["rewards/format/mean"] == 0.5
    assert metrics["rewards/answer/mean"] == 0.5, "over those that have it"


def test_rewards_by_source_and_by_group(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for name, source, rewards in (
            ("a", "math", (0, 1)),
            ("b", "math", (1, 1)),
            ("c", "code v2!", (3, 5)),
        ):
            producer.push(
                [
                    trajectory(name, i, 2, reward=float(reward), data_source=source, tokens=5 + i)
                    for i, reward in enumerate(rewards)
                ]
            )
    metrics = delivered_batch(queue_of(fake, 3), join(fake, "r")).metrics
    assert metrics["math/critic/score/mean"] == 0.75
    assert metrics["code v2_/critic/score/mean"] == 4, "MLflow takes no `!` in a name"
    assert metrics["math/response_length/mean"] == 3.5
    assert metrics["math/trajectories"] == 4
    assert metrics["critic/score/zero_std_ratio"] == pytest.approx(1 / 3)
    assert metrics["critic/score/std_mean"] == 0.5
    assert metrics["critic/score/mean"] == pytest.approx(11 / 6)


def test_many_sources_are_bounded(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for number in range(40):
            push_groups(producer, 1, prefix=f"g{number:02d}", data_source=f"s{number:02d}")
    metrics = delivered_batch(queue_of(fake, 40), join(fake, "r")).metrics
    sources = [name for name in metrics if name.endswith("/trajectories")]
    assert len(sources) == 33
    assert metrics["other/trajectories"] == 16


def test_what_happened_to_groups_since_the_batch_before(fake: Connection) -> None:
    queue = queue_of(fake)
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        push_groups(producer, 1)
        delivered_batch(queue, join(fake, "r"))
        push_groups(producer, 2, prefix="flat", reward=1.0)
        producer.push([trajectory("short", 0), ended("short", 1, 2, "failed")])
        push_groups(producer, 1, prefix="next")
        metrics = delivered_batch(queue, join(fake, "r")).metrics
    groups = {name: value for name, value in metrics.items() if name.startswith("groups/") and value}
    assert groups == {
        "groups/kept": 1,
        "groups/filtered": 2,
        "groups/ended_short": 1,
        "groups/kept_ratio": 0.25,
        "groups/outcome/complete": 1,
        "groups/outcome/zero_variance": 2,
        "groups/outcome/incomplete": 1,
    }
    assert metrics["trajectories/pushed"] == 8
    assert metrics["trajectories/dropped/zero_variance"] == 4
    assert metrics["trajectories/dropped/failed"] == 1
    ledger = {name.removeprefix("ledger/"): value for name, value in metrics.items() if "ledger/" in name}
    assert ledger.pop("pushed") == sum(ledger.values()) == 10


def test_a_queue_counts_from_where_it_began(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 3)
        run = join(fake, "r")
        group_all(run)
        metrics = delivered_batch(queue_of(fake), run).metrics
    assert metrics["groups/kept"] == 0, "they ended before it took the run"
    assert "groups/kept_ratio" not in metrics
    assert metrics["ledger/pushed"] == 6


def test_evaluation_goes_with_the_next_batch_once(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run, queue = join(fake, "r"), queue_of(fake)

        def evaluate(*rewards: float, version: int, source: str = "math") -> None:
            with producer.group(len(rewards), role="eval", data_source=source) as group:
                for rollout, reward in zip(group, rewards, strict=True):
                    columns = {"input_ids": [1], "response_mask": [1]}
                    rollout.push(**columns, reward=reward, model_version=version)

        def next_metrics() -> dict[str, float]:
            push_groups(producer, 1, prefix=f"t{queue._progress.delivered}")
            metrics = delivered_batch(queue, run).metrics
            return {name: value for name, value in metrics.items() if name.startswith("val-")}

        assert next_metrics() == {}
        evaluate(1.0, 0.0, version=0)
        assert next_metrics() == {
            "val-core/math/reward/mean": 0.5,
            "val-core/math/reward/best/mean": 1.0,
            "val-aux/math/reward/min": 0.0,
            "val-aux/math/reward/max": 1.0,
            "val-aux/math/trajectories": 2.0,
            "val-aux/math/failed": 0.0,
            "val-aux/math/version": 0.0,
        }
        assert next_metrics() == {}
        evaluate(1.0, version=1)
        under_way = producer.begin_group(1, role="eval", data_source="math")
        evaluate(0.25, version=0, source="code")
        assert next_metrics() == {}, "more of version 1 may come, and version 0 was reported"
        under_way.cancel(1)
        metrics = next_metrics()
        assert metrics["val-core/math/reward/mean"] == 1.0
        assert metrics["val-core/code/reward/mean"] == 0.25
        assert next_metrics() == {}


def test_a_round_that_the_weights_moved_in_is_one_figure(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run, queue = join(fake, "r"), queue_of(fake)
        push_groups(producer, 1, prefix="before")
        delivered_batch(queue, run)
        for version, reward in ((34, 0.0), (34, 0.5), (35, 1.0)):
            producer.push(
                [trajectory(f"e{reward}", 0, 1, role="eval", round="s", reward=reward, model_version=version)]
            )
        push_groups(producer, 1)
        metrics = delivered_batch(queue, run).metrics
    assert metrics["val-core/unknown/reward/mean"] == 0.5
    assert metrics["val-aux/unknown/trajectories"] == 3.0
    assert (metrics["val-aux/unknown/oldest_version"], metrics["val-aux/unknown/version"]) == (34.0, 35.0)


@pytest.mark.usefixtures("standing")
def test_times_begin_with_the_second_batch(fake: Connection, forward: Any) -> None:
    queue = queue_of(fake)
    with producing(fake, "r") as producer:
        push_groups(producer, 2)
    first = delivered_batch(queue, join(fake, "r"))
    assert "timing_s/wait" in first.metrics
    assert "timing_s/step" not in first.metrics
    assert first.metrics["timing_s/in_queue/max"] < 3
    forward(3)
    metrics = delivered_batch(queue, join(fake, "r")).metrics
    assert metrics["timing_s/step"] >= 3
    assert metrics["timing_s/in_queue/mean"] >= 3
    assert metrics["trainer/idle_ratio"] == metrics["timing_s/wait"] / metrics["timing_s/step"]


@estimator("plus_old", scope="row", needs=["old_log_probs"], level="token")
def plus_old(batch: PackedBatch) -> Estimate:
    return Estimate("token", batch.column("old_log_probs").double())


def test_ranks_have_the_same_figures_but_for_what_is_documented(fake: Connection) -> None:
    run = pushed_run(fake, "r", 4, data_source="math")
    group_all(run)
    queues = [queue_of(fake, 4, rank=rank, world_size=2, job="j") for rank in range(2)]
    first, second = (delivered_batch(queue, run).metrics for queue in queues)
    assert {name for name in first if name.startswith(OF_RANK_0)}
    assert not [name for name in second if name.startswith(OF_RANK_0)]
    apart = (*OF_RANK_0, *OF_EACH_RANK)
    assert without(first, *apart) == without(second, *apart)


def test_importance_weights_after_a_late_column_are_in_the_histogram(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 1, tokens=5)  # of two trajectories with three trainable tokens each
    queue = TrainerQueue(
        fake,
        "r",
        batch_groups=1,
        chain={"estimator": "grpo", "correction": {}},
        late={"old_log_probs": lambda mb: mb.rollout_log_probs},
        commit="each_batch",
    )
    before = weights_seen()
    delivered_batch(queue, join(fake, "r"))
    assert weights_seen() - before == 6


def weights_seen() -> float:
    samples = [sample for family in metrics.REGISTRY.collect() for sample in family.samples]
    return sum(each.value for each in samples if each.name == "streamadv_is_weight_count")


def without(metrics: dict[str, float], *prefixes: str) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(prefixes)}


def test_every_figure_is_a_finite_float_under_a_name_that_loggers_take(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 2, data_source="a/b#c", model_version=0)
    metrics = delivered_batch(queue_of(fake, 2), join(fake, "r")).metrics
    assert len(metrics) > 40
    for name, value in metrics.items():
        assert type(value) is float, name
        assert math.isfinite(value), name
        assert re.fullmatch(r"[/\w.\- :]+", name), name


def test_rewards_near_the_limit_of_numbers_leave_figures_out(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([trajectory("large", index, 2, reward=(-1) ** index * 1e300) for index in range(2)])
    chain = {"estimator": "reinforce", "reward": {"clip": 1.0}}
    metrics = delivered_batch(queue_of(fake, chain=chain), join(fake, "r")).metrics
    assert "critic/score/std_mean" not in metrics
    assert metrics["critic/score/zero_std_ratio"] == 0


def test_a_batch_whose_groups_are_all_dead_has_figures_of_the_run_only(fake: Connection) -> None:
    with producing(fake, "r") as producer:  # advantages of such rewards are no float32
        producer.push([trajectory("large", index, 2, reward=(-1) ** index * 1e300) for index in range(2)])
    batch = delivered_batch(queue_of(fake, chain={"estimator": "reinforce"}), join(fake, "r"))
    assert batch.num_trajectories == 0
    assert "response_length/mean" not in batch.metrics
    assert batch.metrics["ledger/dead"] == 2
