"""Each estimator at its defaults on numbers small enough to write the formula down: epsilons, ddof, who counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from streamadv.algorithms import PackedBatch, build_chain, run_chain
from streamadv.trajectory.columns import Array
from streamadv.trajectory.schema import Step

from .reference import Member, Pair, batch_of, member, pack

TINY = 1e-6  # rewards of the size of the usual epsilon, so that it shows


def advantages(config: dict[str, Any] | str, batch: PackedBatch) -> Array:
    found = run_chain(build_chain(config), batch).advantages
    assert found is not None
    return found.numpy()


def close(got: Array, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


def group(name: str, rewards: Sequence[float], baseline: float | None = None, length: int = 1) -> list[Pair]:
    """Trajectories of one row; row i has (i + 1) * length trainable tokens. The last one may be a baseline."""
    pairs = [member(name, i, r, [[0] + [1] * (i + 1) * length]) for i, r in enumerate(rewards)]
    if baseline is not None:
        pairs.append(member(name, len(rewards), baseline, [[0, 1]], (), True))
    return pairs


#: A group with a baseline member, one alone, one alone but for a baseline member.
MIXED = batch_of([*group("a", [1.0, 3.0, 8.0], baseline=100.0), *group("b", [7.0]), *group("c", [5.0], 50.0)])
TRAINED = [0, 1, 2, 4, 5]  # its rows without the baseline members

SD = float(np.std([1, 3, 8], ddof=1))


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"estimator": "grpo"}, [-3 / SD, -1 / SD, 4 / SD, 0, 0]),
        ({"estimator": "grpo", "epsilon": 0.5}, [-3 / (SD + 0.5), -1 / (SD + 0.5), 4 / (SD + 0.5), 0, 0]),
        ({"estimator": "grpo", "epsilon": 0.5, "singleton": "raw"},
         [-3 / (SD + 0.5), -1 / (SD + 0.5), 4 / (SD + 0.5), 7 / 1.5, 5 / 1.5]),
        ({"estimator": "grpo", "epsilon": 0.5, "singleton": "raw", "norm_by_std": False}, [-3, -1, 4, 7, 5]),
        ({"estimator": "grpo", "least_std": 10.0}, [-0.3, -0.1, 0.4, 0, 0]),
        ({"estimator": "grpo_passk", "norm_by_std": False}, [0, 0, 5, 0, 0]),
        ({"estimator": "grpo_passk"}, [0, 0, 5 / SD, 0, 0]),
        ({"estimator": "rloo"}, [-4.5, -1.5, 6, 0, 0]),
        ({"estimator": "rloo", "singleton": "raw"}, [-4.5, -1.5, 6, 7, 5]),
        ({"estimator": "opo"}, [1 - 31 / 6, 3 - 31 / 6, 8 - 31 / 6, 0, 0]),
        ({"estimator": "opo", "singleton": "raw"}, [1 - 31 / 6, 3 - 31 / 6, 8 - 31 / 6, 7, 5]),
        ({"estimator": "gpg"}, [-3 * 5 / 3, -5 / 3, 4 * 5 / 3, 0, 0]),
        ({"estimator": "gpg", "counted": "rewards", "f_norm": 2.0}, [-1.5, -0.5, 2, 0, 0]),
        ({"estimator": "maxrl"}, [-3 / 4, -1 / 4, 1, 0, 0]),
        ({"estimator": "maxrl", "epsilon": 1.0, "singleton": "raw"}, [-3 / 5, -1 / 5, 4 / 5, 7, 5]),
        ({"estimator": "remax"}, [-99, -97, -92, 0, -45]),
    ],
)  # fmt: skip
def test_outcomes(config: dict[str, Any], want: list[float]) -> None:
    close(advantages(config, MIXED)[TRAINED], want)


@pytest.mark.parametrize(("name", "options"), [("grpo", {}), ("grpo_passk", {})])
def test_epsilon_stands_beside_the_std(name: str, options: dict[str, Any]) -> None:
    batch = batch_of(group("a", [0.0, TINY]))
    scale = TINY * math.sqrt(0.5) + 1e-6
    want = {"grpo": [-TINY / 2 / scale, TINY / 2 / scale], "grpo_passk": [0, TINY / scale]}[name]
    close(advantages({"estimator": name, **options}, batch), want)
    shaped = run_chain(build_chain({"reward": {"mean": "group", "std": "group"}}), batch).rewards
    close(shaped.numpy(), [-TINY / 2 / scale, TINY / 2 / scale])


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gdpo", "gigpo", "step_grpo", "step_reinforce"])
def test_equals_are_zero_without_an_epsilon(name: str) -> None:
    pairs = [turns("a", i, [2.0, 2.0], ["s", "t"]) for i in range(3)]
    config: dict[str, Any] = {"estimator": name, "epsilon": 0.0}
    if name == "step_reinforce":
        config |= {"gamma": 0.0, "norm_by_std": True, "baseline": True}
    close(advantages(config, batch_of(pairs)), 0.0)


def test_maxrl_needs_a_positive_mean() -> None:
    batch = batch_of([*group("a", [-1.0, 1.0]), *group("b", [-3.0, -1.0]), *group("c", [0.0, 1.0])])
    close(advantages("maxrl", batch), [0, 0, 0, 0, -1, 1])
    turned = {"estimator": "maxrl", "negative_means": True}
    close(advantages(turned, batch), [0, 0, 0.5, -0.5, -1, 1])
    close(advantages({**turned, "epsilon": 2.0}, batch_of(group("b", [-3.0, -1.0]))), [0, 0])


def test_opo_without_tokens_has_nothing_to_weigh() -> None:
    pairs = [member("a", i, 5.0 + i, [[0]]) for i in (0, 1)] + [
        member("b", 0, 1.0),
        member("b", 1, 9.0, [[0]]),
    ]
    close(advantages("opo", batch_of(pairs)), [0, 0, 0, 0])


def test_reinforce_plus_plus_baseline_counts_tokens_and_no_baselines() -> None:
    centred = np.array([-3, -1, 4, 0, 0.0])
    tokens = np.repeat(centred, [1, 2, 3, 1, 1])
    scale = math.sqrt(tokens.var(ddof=1) + 1e-8)
    close(advantages("reinforce_plus_plus_baseline", MIXED)[TRAINED], (centred - tokens.mean()) / scale)


@dataclass(frozen=True)
class Named(Member):
    rewards: dict[str, float] = field(default_factory=dict)


def named(group_id: str, index: int, rewards: dict[str, float], is_baseline: bool = False) -> Named:
    return Named(group_id, index, 0.0, [2], [1], (), is_baseline, rewards)


def z(values: Sequence[float], epsilon: float = 1e-4) -> Array:
    array = np.asarray(values, np.float64)
    return (array - array.mean()) / (array.std(ddof=1) + epsilon)


@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize("weights", [None, {"right": 2.0, "short": 0.5}, {"short": 1.0}])
def test_gdpo_normalises_each_reward_then_their_sum(size: float, weights: dict[str, float] | None) -> None:
    right, short = np.array([[0, 1, 1], [0, 0, 1.0]]) * size, np.array([[3, 1, 2], [5, 9, 4.0]]) * size
    members = [
        named("ab"[g], i, {"right": right[g, i], "short": short[g, i]}) for g in (0, 1) for i in range(3)
    ]
    members.insert(3, named("a", 3, {"right": 50.0, "short": -7.0}, is_baseline=True))
    chosen = weights or {"right": 1.0, "short": 1.0}
    given = {"right": right, "short": short}
    total = sum(weight * np.concatenate([z(row) for row in given[name]]) for name, weight in chosen.items())
    got = advantages({"estimator": "gdpo", "weights": weights}, pack(members))
    close(got[[0, 1, 2, 4, 5, 6]], z(total))  # type: ignore[arg-type]


def turns(
    group_id: str, index: int, rewards: Sequence[float], states: Sequence[str | None], **more: Any
) -> Pair:
    steps = [
        Step(start=k, end=k + 1, reward=reward, state_key=state)
        for k, (reward, state) in enumerate(zip(rewards, states, strict=True))
    ]
    return member(group_id, index, float(sum(rewards)), [[1] * len(rewards)], steps, **more)


def episodes(size: float = 1.0) -> PackedBatch:
    """One prompt: two trajectories of two and one steps, a baseline, and another prompt's alone."""
    given = [("a", 0, [1, 2]), ("a", 1, [5]), ("a", 2, [90, 80]), ("b", 0, [4, 6])]
    return batch_of(
        [
            turns(name, i, [size * r for r in rewards], ["s", None][: len(rewards)], is_baseline=i == 2)
            for name, i, rewards in given
        ]
    )


OWN = [0, 1, 2, 5, 6]  # steps of the trajectories that are trained on


@pytest.mark.parametrize("size", [1.0, TINY])
def test_gigpo(size: float) -> None:
    batch = episodes(size)
    total, returns = np.array([3, 5.0]) * size, np.array([1 + 0.95 * 2, 5.0]) * size
    episode, step = z(total, 1e-6), z(returns, 1e-6)
    want = [episode[0] + step[0], episode[0], episode[1] + step[1], 0, 0]
    close(advantages("gigpo", batch)[OWN], want)
    close(advantages({"estimator": "gigpo", "episode_weight": 3.0, "step_weight": 0.5}, batch)[OWN],
          [3 * episode[0] + step[0] / 2, 3 * episode[0], 3 * episode[1] + step[1] / 2, 0, 0])  # fmt: skip
    by_step = z(np.array([3, 3, 5.0]) * size, 1e-6)
    got = advantages({"estimator": "gigpo", "statistics": "step"}, batch)[OWN]
    close(got, [by_step[0] + step[0], by_step[0], by_step[2] + step[1], 0, 0])
    close(advantages("roll/gigpo", batch)[OWN], got)


@pytest.mark.parametrize("size", [1.0, TINY])
def test_step_grpo(size: float) -> None:
    batch = episodes(size)
    first = np.array([3, 5.0]) * size
    close(advantages("step_grpo", batch)[OWN], [z(first, 1e-6)[0], 0, z(first, 1e-6)[1], 0, 0])
    others = advantages({"estimator": "step_grpo", "baseline": "others", "norm_by_std": False}, batch)[OWN]
    close(others, [-2 * size, 0, 2 * size, 0, 0])
    alone = advantages({"estimator": "step_grpo", "gamma": 0.0, "norm_by_std": False}, batch)[OWN]
    close(alone, [-2 * size, 0, 2 * size, 0, 0])


def test_step_reinforce() -> None:
    returns = np.array([1 + 0.95 * 2, 2, 5, 4 + 0.95 * 6, 6])
    batch = episodes()
    close(advantages("step_reinforce", batch)[OWN], returns)
    close(advantages("roll/step_reinforce", batch)[OWN], returns)
    centred = [*(returns[:3] - returns[:3].mean()), *(returns[3:] - returns[3:].mean())]
    close(advantages({"estimator": "step_reinforce", "baseline": True}, batch)[OWN], centred)
    scaled = {"estimator": "step_reinforce", "baseline": True, "norm_by_std": True}
    small = np.array([1 + 0.95 * 2, 2, 5]) * TINY
    close(advantages(scaled, episodes(TINY))[OWN][:3], z(small, 1e-6))


def test_returns_are_what_the_advantages_were_made_of() -> None:
    def returns(config: dict[str, Any] | str, batch: PackedBatch) -> Array:
        found = run_chain(build_chain(config), batch).returns
        assert found is not None
        return found.numpy()

    close(returns("remax", MIXED)[TRAINED], [1, 3, 8, 7, 5])
    scaled = {"baseline": True, "norm_by_std": True}
    for config in ({"estimator": "step_reinforce", **scaled}, {"estimator": "step_grpo", "gamma": 0.95}):
        close(returns(config, episodes())[OWN], [1 + 0.95 * 2, 2, 5, 4 + 0.95 * 6, 6])
    pairs = [member("a", i, 4.0 * i, [[1, 0, 1]]) for i in (1, 2)]
    close(returns("reinforce_plus_plus", batch_of(pairs)), [4, 0, 4, 8, 0, 8])
    whitened = {
        "norm_by_std": False,
        "whiten_advantages": True,
    }  # without returns of their own: before whitening
    close(returns(whitened, batch_of(group("a", [1.0, 3.0]))), [-1, 1])


def test_defaults_over_tokens() -> None:
    """One row of two actions with an observation between: values 1, 9, 2, reward 4."""
    columns = {
        "values": [1.0, 9.0, 2.0],
        "old_log_probs": [math.log(3.0), 0.0, math.log(0.5)],
        "rollout_log_probs": [0.0] * 3,
    }
    batch = batch_of([member("a", 0, 4.0, [[1, 0, 1]], **columns)])
    close(advantages("gae", batch), [2 - 1 + 0.95 * (4 - 2), 0, 2])
    close(advantages("reinforce", batch), [4, 0, 4])
    close(advantages("agentic_reinforce", batch), [4, 0, 4])
    close(advantages({"estimator": "agentic_reinforce", "gamma": 0.5}, batch), [2, 0, 4])
    error = 0.5 * (4 - 2)
    first = (2 + error) - 1  # clipped ratio 1; the value there is the target of the next action
    close(advantages("vtrace", batch), [first, 0, error])
    result = run_chain(build_chain({"estimator": "vtrace", "rho_clip": 2.0, "pg_rho_clip": 2.5}), batch)
    assert result.advantages is not None
    assert result.returns is not None
    close(result.advantages.numpy(), [2.5 * first, 0, error])
    close(result.returns.numpy(), [1 + 2 * (2 - 1) + error, 0, 2 + error])


def baselines(
    mask: Sequence[Sequence[int]], rewards: Sequence[float], weight: float = 1.0, **more: Any
) -> PackedBatch:
    """Rows of one group whose tokens all weigh `weight`."""
    return batch_of(
        [
            member(
                "a",
                i,
                reward,
                [row],
                (),
                more.get("is_baseline") == i,
                old_log_probs=[-100.0] * len(row),
                sum_pi_squared=[0.0] * len(row),
                rollout_is_weights=[weight**0.5] * len(row),
            )
            for i, (row, reward) in enumerate(zip(mask, rewards, strict=True))
        ]
    )


def test_token_baselines() -> None:
    both = baselines([[1, 1, 1], [1, 1, 0]], [3.0, 6.0])
    # nothing left at the tail
    close(advantages("optimal_token_baseline", both), [-1.5, -1.5, 3, 1.5, 1.5, 0])
    kept = {"estimator": "optimal_token_baseline", "handle_zero_tail": False}
    close(advantages(kept, both), [-1.5, -1.5, 0, 1.5, 1.5, 0])
    tie = baselines([[1, 1], [1, 1]], [3.0, 6.0])
    close(advantages("optimal_token_baseline", tie), [-1.5, -1.5, 1.5, 1.5])
    alone = baselines([[1, 1], [0, 0]], [3.0, 6.0])
    close(advantages("optimal_token_baseline", alone), [3, 3, 0, 0])
    close(advantages("verl/optimal_token_baseline", alone), [3, 3, 0, 0])  # a tail of the longest row
    january = advantages("verl-2026-01/optimal_token_baseline", alone)
    close(january, [0, 0, 0, 0])  # a row without tokens is company, and the tail has a baseline
    greedy = baselines([[1, 1], [1, 1]], [3.0, 6.0], is_baseline=1)
    close(advantages("optimal_token_baseline", greedy)[:2], [3, 3])
    close(advantages("verl/optimal_token_baseline", greedy)[:2], [3, 3])
    light = baselines([[1], [1]], [3.0, 6.0], weight=1e-8)
    close(advantages("optimal_token_baseline", light), [3 - 9 / 3, 6 - 9 / 3])  # (9e-8) / (2e-8 + 1e-8)


def test_token_baseline_weighs_by_the_score_function() -> None:
    """w = 1 - 2 pi + sum pi^2: 1 - 1 + 0.5 and 1 - 0.5 + 0.25."""
    pairs = [
        member("a", 0, 3.0, [[1]], old_log_probs=[math.log(0.5)], sum_pi_squared=[0.5]),
        member("a", 1, 6.0, [[1]], old_log_probs=[math.log(0.25)], sum_pi_squared=[0.25]),
    ]
    baseline = (3 * 0.5 + 6 * 0.75) / 1.25
    got = advantages("optimal_token_baseline", batch_of(pairs))
    np.testing.assert_allclose(got, [3 - baseline, 6 - baseline], rtol=1e-5)


def test_states_unknown_are_alone() -> None:
    pairs = [turns("a", i, [reward], [None]) for i, reward in enumerate((1.0, 3.0))]
    close(advantages({"estimator": "gigpo", "episode_weight": 0.0}, batch_of(pairs)), [0, 0])
