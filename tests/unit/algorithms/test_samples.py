"""Whole trajectories: who is left out of the loss, who weighs more, who is compared with whom."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms import PackedBatch, build_chain, run_chain
from streamadv.errors import SettingError
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Status
from tests.support import delivered_batch, group_all, join, producing, trajectory

from .reference import Member, batch_of, member, pack, random_pairs


class Ended:
    """A member with a status."""

    def __init__(self, info: Member, status: Status) -> None:
        self.status = status
        for name, value in vars(info).items():
            setattr(self, name, value)


def ended(*found: tuple[float, Status]) -> PackedBatch:
    pairs = [member("a", index, reward) for index, (reward, _) in enumerate(found)]
    members: list[Any] = [Ended(info, status) for (info, _), (_, status) in zip(pairs, found, strict=True)]
    return pack(members, [columns for _, columns in pairs])


def test_truncated_trajectories_are_left_out_or_penalised() -> None:
    batch = ended((1.0, Status.COMPLETED), (1.0, Status.TRUNCATED), (0.0, Status.COMPLETED))
    result = run_chain(build_chain({"masks": {"truncated": True}}), batch)
    assert result.columns["response_mask"].view(3, 3).any(1).tolist() == [True, False, True]
    assert result.advantages is not None
    assert result.advantages[1] > 0  # it counted in the statistics
    for coefficient, wanted in ((0.25, 0.25), (-0.5, -0.5), (0.0, 0.0)):
        result = run_chain(build_chain({"reward": {"truncation": coefficient}}), batch)
        assert result.rewards.tolist() == [1.0, wanted, 0.0]


def test_masks_judge_rewards_as_they_came() -> None:
    """After centring every group's mean is 0, and half of the right answers look wrong."""
    rewards = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.0]}
    pairs = [member(group, i, reward) for group, both in rewards.items() for i, reward in enumerate(both)]
    shaping = {"mean": "group", "std": "group"}
    for masks, kept in (
        ({"difficulty_low": 0.0, "difficulty_high": 1.0}, [1, 1, 0, 0, 0, 0]),
        ({"wrong_max_length": 2}, [1, 0, 1, 1, 0, 0]),
    ):
        result = run_chain(build_chain({"reward": shaping, "masks": masks}), batch_of(pairs))
        assert result.columns["response_mask"].view(6, 3).any(1).tolist() == kept


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), difficulty=st.booleans())
def test_sample_weights_match_a_loop(seed: int, difficulty: bool) -> None:
    pairs = random_pairs(seed, groups=4)
    batch = batch_of(pairs)
    chosen = {"difficulty": difficulty, "length": True}
    result = run_chain(build_chain({"sample_weights": chosen, "reward": {"mean": "group"}}), batch)
    lengths = [sum(info.row_trainable) * (not info.is_baseline) for info, _ in pairs]
    rewards = defaultdict(list)
    for info, _ in pairs:
        if not info.is_baseline:
            rewards[info.group_id].append(info.reward)
    known = [length for length in lengths if length]
    weights = []
    for (info, _), length in zip(pairs, lengths, strict=True):
        weight = 1.5 - (length - min(known)) / max(max(known) - min(known), 1e-8)
        if difficulty:
            mean = np.mean(rewards[info.group_id]) if rewards[info.group_id] else 0.0
            weight *= 0.5 + 1.5 * min(max(1 - mean, 0), 1)
        weights.append(weight if length else 0.0)
    scale = len(known) / sum(weights)
    column = result.columns["sample_weights"]
    for row, (start, end) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        wanted = weights[int(batch.row_trajectory[row])] * scale
        mask = batch.column("response_mask")[start:end]
        np.testing.assert_allclose(column[start:end], wanted * mask.numpy(), rtol=1e-5)
    with pytest.raises(SettingError, match="sample_weights does nothing"):
        build_chain({"sample_weights": {}})


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), others=st.booleans(), by_std=st.booleans())
def test_steps_of_one_number_are_compared(seed: int, others: bool, by_std: bool) -> None:
    pairs = random_pairs(seed, groups=3)
    batch = batch_of(pairs)
    options = {"gamma": 0.9, "baseline": "others" if others else "mean", "norm_by_std": by_std}
    result = run_chain(build_chain({"estimator": "step_grpo", **options}), batch)
    returns, compared = [], defaultdict(list)
    for info, _ in pairs:
        own = [0.0] * (len(info.steps) + 1)
        for k in reversed(range(len(info.steps))):
            own[k] = info.steps[k].reward + 0.9 * own[k + 1]
            if not info.is_baseline:
                compared[info.group_id, k].append(own[k])
        returns += own[:-1]
    expected = []
    keys = [(info.group_id, k) for info, _ in pairs for k in range(len(info.steps))]
    owners = [info for info, _ in pairs for _ in info.steps]
    for value, key, info in zip(returns, keys, owners, strict=True):
        values = compared[key]
        if info.is_baseline or len(values) < 2:
            expected.append(None if info.is_baseline else 0.0)
            continue
        mean = (sum(values) - value) / (len(values) - 1) if others else np.mean(values)
        expected.append((value - mean) / (np.std(values, ddof=1) + 1e-6 if by_std else 1.0))
    assert result.advantages is not None
    for got, wanted in zip(result.advantages.tolist(), expected, strict=True):
        if wanted is not None:
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_sample_weights_reach_the_trainer(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([trajectory("g", 0, 2, tokens=4), trajectory("g", 1, 2, tokens=6)])
    run = join(fake, "r")
    group_all(run)
    chain = {"sample_weights": {"length": True}}
    batch = delivered_batch(TrainerQueue(fake, "r", batch_groups=1, prefetch=0, chain=chain), run)
    (mb,) = batch
    torch.testing.assert_close(mb.sample_weights, torch.tensor([0, 0, 1.5, 1.5, 0, 0, *[0.5] * 4]))
    written = [row.sample_weights for item in batch.trajectories() for row in item.rows]
    assert next(array.tolist() for array in written if array is not None) == [0, 0, 1.5, 1.5]
