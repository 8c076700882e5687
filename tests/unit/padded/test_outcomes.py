"""Outcome estimators of other peers against plain loops in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv import padded
from streamadv.errors import TrajectoryError
from tests.shares import examples

rows = st.lists(
    st.tuples(st.integers(-2, 2), st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


def centred(values: Sequence[float], keys: Sequence[Hashable]) -> list[float]:
    groups = defaultdict(list)
    for value, key in zip(values, keys, strict=True):
        groups[key].append(value)
    return [value - float(np.mean(groups[key])) for value, key in zip(values, keys, strict=True)]


@settings(max_examples=examples(60), deadline=None)
@given(found=rows, others=st.booleans(), by_std=st.booleans())
def test_steps_of_one_number(found: list[tuple[int, str, str, int]], others: bool, by_std: bool) -> None:
    rewards, groups, _, steps = (list(column) for column in zip(*found, strict=True))
    got = padded.compute_step_grpo_advantage(
        torch.tensor(rewards, dtype=torch.float32), groups, steps, "others" if others else "mean", by_std
    )
    for i, reward in enumerate(rewards):
        same = [r for r, g, s in zip(rewards, groups, steps, strict=True) if (g, s) == (groups[i], steps[i])]
        expected = 0.0
        if len(same) > 1 and len(set(same)) > 1:
            mean = (sum(same) - reward) / (len(same) - 1) if others else np.mean(same)
            expected = (reward - mean) / (np.std(same, ddof=1) + 1e-6 if by_std else 1.0)
        assert got[i].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(max_examples=examples(60), deadline=None)
@given(found=rows)
def test_comparison_by_role(found: list[tuple[int, str, str, int]]) -> None:
    rewards, groups, agents, episodes = (list(column) for column in zip(*found, strict=True))
    keys = [(g, a, e if a in ("x", "y") else None) for g, a, e in zip(groups, agents, episodes, strict=True)]
    got = padded.compute_hierarchical_grpo_advantage(
        torch.tensor(rewards, dtype=torch.float32), groups, agents, torch.tensor(episodes), {"x", "y"}
    )
    np.testing.assert_allclose(got, centred(rewards, keys), atol=1e-6)


@settings(max_examples=examples(40), deadline=None)
@given(found=rows, split=st.integers(0, 12), decay=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_running_baselines_go_on_from_call_to_call(
    found: list[tuple[int, str, str, int]], split: int, decay: float
) -> None:
    rewards = torch.tensor([row[0] for row in found], dtype=torch.float32)
    agents = [row[2] for row in found]
    baselines = dict.fromkeys("xyz", 0.0)
    expected = []
    for reward, agent in zip(rewards.tolist(), agents, strict=True):
        expected.append(reward - baselines[agent])
        baselines[agent] = decay * baselines[agent] + (1 - decay) * reward
    first, known = padded.compute_rae_advantage(rewards[:split], agents[:split], decay=decay)
    second, known = padded.compute_rae_advantage(rewards[split:], agents[split:], known, decay)
    np.testing.assert_allclose(torch.cat([first, second]), expected, atol=1e-6)
    assert known == {agent: baselines[agent] for agent in agents}


verdicts = st.one_of(st.integers(-3, 3).map(float), st.just(math.nan))


@settings(max_examples=examples(80), deadline=None)
@given(found=st.lists(st.tuples(st.sampled_from("abc"), verdicts, verdicts), min_size=1, max_size=10))
def test_named_rewards_one_by_one(found: list[tuple[str, float, float]]) -> None:
    index, weights = [row[0] for row in found], [1.0, -0.5]
    rewards = np.array([row[1:] for row in found])
    got = padded.compute_normalize_then_sum_advantage(
        torch.tensor(rewards, dtype=torch.float32), index, torch.tensor(weights)
    )

    def z(value: float, values: list[float]) -> float:
        known = [each for each in values if not math.isnan(each)]
        if math.isnan(value) or len(known) < 2 or len(set(known)) == 1:
            return 0.0
        return float((value - np.mean(known)) / (np.std(known, ddof=1) + 1e-4))

    total = [
        sum(
            weight * z(row[k], [r for r, g in zip(rewards[:, k], index, strict=True) if g == group])
            for k, weight in enumerate(weights)
        )
        for row, group in zip(rewards, index, strict=True)
    ]
    scorable = ~np.isnan(rewards).all(1)
    known = [value for value, is_known in zip(total, scorable, strict=True) if is_known]
    spread = np.std(known, ddof=1) if len(known) > 1 else 0.0
    for value, is_known, result in zip(total, scorable, got.tolist(), strict=True):
        if is_known and spread > 1e-9:
            assert result == pytest.approx((value - np.mean(known)) / (spread + 1e-4), rel=1e-4, abs=1e-5)
        elif not is_known or len(known) < 2:
            assert result == 0


def test_cheap_answers_of_able_groups_gain() -> None:
    rewards, index = torch.tensor([1.0, 1.0, 0.0, 0.0]), ["a", "a", "b", "b"]
    tokens, turns = torch.tensor([10, 20, 5, 10]), torch.zeros(4)
    got = padded.cost_penalty(rewards, index, [tokens, turns], [0.25, 0.5])
    np.testing.assert_allclose(got, [0.875, 0.75, 0, 0])


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TrajectoryError, match=r"index has shape \[1\], needs \[B = 2\] beside rewards"):
        padded.compute_normalize_then_sum_advantage(torch.zeros(2, 1), ["a"])


def test_everything_listed_is_there() -> None:
    assert all(callable(getattr(padded, name)) for name in padded.__all__)
