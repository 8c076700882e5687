"""Reward components, overlong penalty, running moments, masks, distillation and the rest of the chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv import padded
from streamadv.algorithms import build_chain, run_chain
from streamadv.algorithms.kl import adapted_coefficient, approx_kl, column_kl
from streamadv.algorithms.rewards import overlong_penalty
from streamadv.algorithms.segments import RunningMoments, Trainable
from streamadv.errors import SettingError, TrajectoryError
from streamadv.padded.sample_masks import difficulty_mask, sample_weights

from .reference import Member, batch_of, member, pack


class Scored:
    """A member with named rewards."""

    def __init__(self, info: Member, rewards: dict[str, float]) -> None:
        self.rewards = rewards
        for name, value in vars(info).items():
            setattr(self, name, value)


def scored(rewards: list[dict[str, float]]) -> Any:
    return pack([Scored(member("a", i, 0.0)[0], given) for i, given in enumerate(rewards)])


def test_named_rewards_are_summed_by_weight() -> None:
    batch = scored([{"right": 1.0, "short": 0.5}, {"short": 1.0}])
    config = {"reward": {"components": {"right": 2.0, "short": -1.0}}}
    assert run_chain(build_chain(config), batch).rewards.tolist() == [1.5, -1.0]
    with pytest.raises(TrajectoryError, match="'wrong', the trajectories have right, short: give it to each"):
        run_chain(build_chain({"reward": {"components": {"wrong": 1.0}}}), batch)


def all_of(size: int) -> Trainable:
    return Trainable(torch.ones(size, dtype=torch.bool), torch.tensor([0, size]))


def test_k3_of_a_column_is_right_to_the_last_bit_or_two() -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.logspace(-5, 0, 200), -torch.logspace(-5, 0, 200)])
    held = x.double().clamp(-20, 20)
    want = (torch.expm1(held) - held).clamp(-10, 10)
    got, sums = column_kl(torch.zeros_like(x), x, "k3", all_of(len(x)))
    torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=1e-12)
    torch.testing.assert_close(got, approx_kl(torch.zeros_like(x), x, "k3"), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, got.double().sum(0, keepdim=True), rtol=1e-7, atol=0)
    unheld, _ = column_kl(torch.zeros(3), torch.tensor([torch.nan, torch.inf, -torch.inf]), "k3", all_of(3))
    assert unheld.isnan().tolist() == [True, False, False]


def test_gdpo_gives_each_reward_its_own_scale() -> None:
    batch = scored([{"a": 1000.0, "b": 0.0}, {"a": 0.0, "b": 1e-2}, {"a": 0.0, "b": 0.0}])
    result = run_chain(build_chain({"estimator": "gdpo", "epsilon": 0.0}), batch)
    z = np.array([[1000.0, 0, 0], [0, 1e-2, 0]])
    z = ((z - z.mean(1, keepdims=True)) / z.std(1, ddof=1, keepdims=True)).sum(0)
    assert result.advantages is not None
    np.testing.assert_allclose(result.advantages, (z - z.mean()) / z.std(ddof=1), rtol=1e-5)


def test_overlong_rewards_fall_towards_the_limit() -> None:
    lengths = torch.tensor([5.0, 7.0, 10.0, 14.0])
    got = overlong_penalty(torch.ones(4), lengths, max_length=10, buffer=4, factor=2.0)
    assert got.tolist() == [1, 0.5, -1, -1]
    assert (
        overlong_penalty(torch.ones(4), lengths, max_length=10, buffer=4, factor=2.0, capped=False)[3] == -3
    )
    config = {"reward": {"overlong": {"max_length": 3, "buffer": 2}}}
    batch = batch_of([member("a", 0, 1.0, masks=[[1, 1, 1, 0]]), member("a", 1, 1.0, masks=[[1, 0, 0, 0]])])
    assert run_chain(build_chain(config), batch).rewards.tolist() == [0, 1]


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.lists(st.floats(-100, 100, width=32), max_size=5), min_size=1, max_size=5))
def test_running_moments_equal_those_of_everything(batches: list[list[float]]) -> None:
    running = RunningMoments()
    for values in batches:
        running = running.updated(torch.tensor(values, dtype=torch.float64))
    flat = [value for values in batches for value in values]
    assert running.count == len(flat)
    if len(flat) > 1:
        np.testing.assert_allclose(running.mean, np.mean(flat), atol=1e-9)
        np.testing.assert_allclose(running.std, np.std(flat, ddof=1), atol=1e-6)


def test_running_scope_takes_the_given_snapshot() -> None:
    batch = batch_of([member("a", i, float(i)) for i in (0, 4)])
    chain = build_chain({"reward": {"mean": "running", "std": "running", "epsilon": 0.0}})
    assert chain.steps[0].scope == "row"
    running = RunningMoments.of(torch.tensor([0.0, 2.0]))
    got = run_chain(chain, batch, running=running).rewards
    np.testing.assert_allclose(got, [-1 / 2**0.5, 3 / 2**0.5])
    with pytest.raises(SettingError, match="running"):
        run_chain(chain, batch)


def test_masks_drop_trajectories_but_not_their_statistics() -> None:
    pairs = [member("a", 0, 1.0), member("a", 1, 1.0), member("b", 0, 1.0), member("b", 1, 0.0)]
    config = {"masks": {"difficulty_low": 0.0, "difficulty_high": 1.0}, "norm_by_std": False}
    result = run_chain(build_chain(config), batch_of(pairs))
    assert result.columns["response_mask"].tolist() == [0] * 6 + [0, 1, 1] * 2
    assert result.metrics["actor/final_mask_ratio"] == 0.5
    assert result.metrics["critic/advantages/max"] == 0.5
    pairs = [member("a", 0, 1.0, masks=[[1, 1, 1]]), member("a", 1, 0.0, masks=[[1, 1, 0]])]
    for bounds, kept in (({"max_length": 3}, [False, True]), ({"wrong_max_length": 2}, [True, False])):
        result = run_chain(build_chain({"masks": bounds}), batch_of(pairs))
        assert [row.any() for row in result.columns["response_mask"].view(2, 3)] == kept
    with pytest.raises(SettingError, match="masks"):
        build_chain({"masks": {}})


def test_distillation_is_taken_off_the_advantages() -> None:
    columns = {"rollout_log_probs": [0.0, 1.0, 2.0], "teacher_log_probs": [0.0, 0.0, 0.0]}
    batch = batch_of([member("a", 0, 1.0, **columns), member("a", 1, 0.0, **columns)])
    chain = build_chain({"norm_by_std": False, "distill": {"coefficient": 0.5}, "raw_advantages": True})
    result = run_chain(chain, batch)
    assert result.level == chain.level == "token"
    assert result.advantages is not None
    assert result.advantages.tolist() == [0, 0, -0.5, 0, -1, -1.5]
    assert result.columns["raw_advantages"].tolist() == [0, 0.5, 0.5, 0, -0.5, -0.5]
    only = run_chain(build_chain({"distill": {"only": True}}), batch)
    assert only.advantages is not None
    assert only.advantages.tolist() == [0, -1, -2] * 2


def test_remax_needs_a_baseline_to_judge() -> None:
    pairs = [member("a", 0, 3.0), member("a", 1, 1.0, is_baseline=True), member("b", 0, 9.0)]
    result = run_chain(build_chain("remax"), batch_of(pairs))
    assert result.advantages is not None
    assert result.advantages[[0, 2]].tolist() == [2.0, 0.0]


def test_adaptive_coefficient_moves_towards_its_target() -> None:
    assert adapted_coefficient(1.0, 0.2, 0.1, 100, 10) == pytest.approx(1.02)
    assert adapted_coefficient(1.0, 0.0, 0.1, 100, 10) == pytest.approx(0.98)
    assert adapted_coefficient(1.0, 0.0, 0.1, 1, 100) == 0.0
    assert adapted_coefficient(1.0, float("nan"), 0.1, 1, 100) == 1.0


def test_weights_and_difficulty() -> None:
    scores = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    assert difficulty_mask(scores, index=["a", "a", "b", "b", "c"]).tolist() == [0, 0, 1, 1, 1]
    weights = sample_weights(torch.tensor([[1, 1], [1, 0]]), torch.tensor([0.0, 1.0]), by_length=True)
    np.testing.assert_allclose(weights, np.array([0.25, 3.0]) * 2 / 3.25)
    with pytest.raises(SettingError, match="n_sample"):
        padded.reward_norm(scores, norm_mean_type="group", norm_std_type=None, n_sample=2)


def test_rewards_are_held_in_two_bounds() -> None:
    """As TRL's `reward_clip_range`, whose bounds need not lie around 0."""
    rewards, lower, upper = (-3.0, -0.25, 1.0, 4.0), -0.5, 2.0

    def advantages(given: tuple[float, ...], **reward: Any) -> torch.Tensor:
        members = [member("g", index, value, [[1]]) for index, value in enumerate(given)]
        result = run_chain(build_chain({"estimator": "rloo", "reward": reward}), batch_of(members))
        assert result.advantages is not None
        return result.advantages

    clamped = tuple(min(max(value, lower), upper) for value in rewards)
    torch.testing.assert_close(advantages(rewards, clip=[lower, upper]), advantages(clamped))
