"""Running moments and the adaptive KL coefficient: decided once per batch, in order, whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamadv.algorithms import RunningMoments
from streamadv.algorithms.chain.config import parse_config
from streamadv.algorithms.kl import adapted_coefficient
from streamadv.batch.leader import Leader
from streamadv.batch.record import BatchRecord
from streamadv.batch.selection import coefficient_of, coefficients_after
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, join, next_batch, producing, push_groups, pushed_run

RUNNING = {"estimator": "grpo", "reward": {"mean": "running", "std": "running"}}
ADAPTIVE = {"estimator": "reinforce", "kl": {"coefficient": 0.5, "target": 0.1, "horizon": 100.0}}


def records_of(monkeypatch: pytest.MonkeyPatch) -> list[BatchRecord]:
    """Every record that is named from now on."""
    named: list[BatchRecord] = []
    name = Leader._name

    def spy(self: Leader, k: int, *arguments: Any) -> bool:
        done = name(self, k, *arguments)
        if done:
            named.append(self.progress.batches[k].record)
        return done

    monkeypatch.setattr(Leader, "_name", spy)
    return named


def test_moments_grow_batch_by_batch_and_once(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = records_of(monkeypatch)
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 6, size=3, finish=True)
    queue = TrainerQueue(connection, run, batch_groups=2, chain=RUNNING, commit="manual", prefetch=0)
    assert next_batch(queue, joined) is not None
    state = queue.state_dict()
    again = TrainerQueue(connection, run, batch_groups=2, chain=RUNNING, commit="manual", prefetch=0)
    again.load_state_dict(state)  # batch 0 is delivered again
    while next_batch(again, joined) is not None:
        pass
    seen = np.array([0.0, 1.0, 2.0] * 6)
    assert [record.k for record in named] == [0, 1, 2]
    for record in named:
        rewards = seen[: 6 * (record.k + 1)]
        assert record.running is not None
        assert record.running["count"] == len(rewards)
        assert record.running["mean"] == pytest.approx(rewards.mean())
        assert record.running["squares"] == pytest.approx(((rewards - rewards.mean()) ** 2).sum())


def test_moments_of_a_source_are_its_own(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = records_of(monkeypatch)
    connection = Connection(redis_url)
    with producing(connection, run) as producer:
        push_groups(producer, 2, size=3, prefix="a", data_source="math")
        push_groups(producer, 2, size=2, prefix="b", data_source="code")
        push_groups(producer, 2, size=3, prefix="c", data_source="math")
        producer.finish()
    joined = join(connection, run)
    queue = TrainerQueue(connection, run, batch_groups=2, chain={**RUNNING, "by_source": True}, prefetch=0)
    seen: dict[str, list[float]] = {"math": [], "code": []}
    for own, rewards in (("math", [0.0, 1.0, 2.0]), ("code", [0.0, 1.0]), ("math", [0.0, 1.0, 2.0])):
        batch = delivered_batch(queue, joined)
        seen[own] += 2 * rewards
        running = named[-1].running
        assert running is not None
        for source, values in seen.items():
            if values:
                moments = RunningMoments(**running[source])  # type: ignore[arg-type]
                assert (moments.count, moments.mean) == (len(values), pytest.approx(np.mean(values)))
        assert f"{own}/critic/rewards/mean" in batch.metrics


def coefficients(start: float, kls: list[float], trajectories: int) -> list[float]:
    """What each batch should see without any prefetch: the coefficient after all batches before it."""
    values = [start]
    for kl in kls:
        values.append(adapted_coefficient(values[-1], kl, 0.1, 100.0, trajectories))
    return values


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("restart_after", [None, 2])
def test_batch_k_sees_the_coefficient_after_k_minus_1_minus_prefetch(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, prefetch: int, restart_after: int | None
) -> None:
    named = records_of(monkeypatch)
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 10, ref_log_probs=np.linspace(-1.5, -0.9, 5), finish=True)

    def open_queue() -> TrainerQueue:
        return TrainerQueue(
            connection, run, batch_groups=2, chain=ADAPTIVE, commit="manual", prefetch=prefetch
        )

    queue, kls = open_queue(), []
    while (batch := next_batch(queue, joined)) is not None:
        kls.append(batch.metrics["critic/kl"])
        queue.trained(batch)
        if len(kls) == restart_after:
            state = queue.state_dict()
            queue.commit(state)
            queue = open_queue()
            queue.load_state_dict(state)
    assert len(kls) == 5
    expected = coefficients(0.5, kls, 4)
    assert len(set(expected)) > 3
    for record in named:
        assert record.kl_coefficient == pytest.approx(expected[max(0, record.k - prefetch)])


def test_a_fixed_coefficient_is_not_stamped() -> None:
    fixed = parse_config({"estimator": "reinforce", "kl": {"coefficient": 0.5}})
    assert coefficients_after(fixed, 1, {}, 0, 3.0, 4) == {}
    assert coefficient_of(fixed, 1, {}, 5) is None
