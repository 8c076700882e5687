"""Step baselines and a policy that decides how many turns it takes: exact expectations of the policy gradient.

A task of three turns. At each turn the policy stops (action 0) or goes on (action 1, with PROBABILITY[k]); the last
turn is a plain choice. All groups of three rollouts are enumerated with their probabilities, so nothing here is left
to chance. One parameter per turn: its gradient is the sum of A * d log pi over the steps of that turn.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamadv.algorithms import registry
from streamadv.algorithms.packed import PackedBatch

from .reference import pack

PROBABILITY = (0.6, 0.3, 0.7)
STOP = (0.2, -0.4)
GO_ON = (1.0, 0.5)
LAST = (0.1, 2.0)
#: Every rollout: its steps as (turn, action, reward).
ROLLOUTS = (
    [(0, 0, STOP[0])],
    [(0, 1, GO_ON[0]), (1, 0, STOP[1])],
    [(0, 1, GO_ON[0]), (1, 1, GO_ON[1]), (2, 0, LAST[0])],
    [(0, 1, GO_ON[0]), (1, 1, GO_ON[1]), (2, 1, LAST[1])],
)
SIZE = 3
GROUPS = list(itertools.product(range(len(ROLLOUTS)), repeat=SIZE))


def chance(rollout: int) -> float:
    return float(
        np.prod([PROBABILITY[k] if action else 1 - PROBABILITY[k] for k, action, _ in ROLLOUTS[rollout]])
    )


def score(turn: int, action: int) -> float:
    """d log pi / d logit."""
    return action - PROBABILITY[turn]


def batch(states: tuple[str, str, str]) -> PackedBatch:
    """All groups. states: the state_key of each turn."""
    return pack(
        [
            SimpleNamespace(
                **{"group_id": f"{number:03d}", "rollout_index": index, "is_baseline": False},
                **{"row_lengths": [3], "row_trainable": [3], "reward": sum(r for *_, r in ROLLOUTS[rollout])},
                steps=[
                    SimpleNamespace(row=0, start=k, end=k + 1, reward=reward, state_key=states[k])
                    for k, _, reward in ROLLOUTS[rollout]
                ],
            )
            for number, group in enumerate(GROUPS)
            for index, rollout in enumerate(group)
        ]
    )


def expected_gradient(advantages: Any) -> np.ndarray[Any, Any]:
    """Of a rollout, by turn. advantages [S] in the order of `batch`."""
    gradient, step = np.zeros(3), iter(np.asarray(advantages).tolist())
    for group in GROUPS:
        probability = np.prod([chance(rollout) for rollout in group])
        for rollout in group:
            for turn, action, _ in ROLLOUTS[rollout]:
                gradient[turn] += probability * next(step) * score(turn, action) / SIZE
    return gradient


def true_gradient() -> np.ndarray[Any, Any]:
    gradient = np.zeros(3)
    for rollout, steps in enumerate(ROLLOUTS):
        for turn, action, _ in steps:
            gradient[turn] += chance(rollout) * sum(r for *_, r in steps) * score(turn, action)
    return gradient


def ratios(name: str, states: tuple[str, str, str] = ("a", "b", "c"), **options: Any) -> np.ndarray[Any, Any]:
    """Expected gradient over the true one, by turn."""
    estimate = registry.get_estimator(name).function(batch(states), **options)
    return expected_gradient(estimate.advantages) / true_gradient()


UNBIASED = [
    ("step_reinforce", {"gamma": 1.0}, ("a", "b", "c")),
    *(("step_rloo", {"compare": compare}, ("a", "b", "c")) for compare in ("number", "state", "group")),
    ("step_rloo", {"compare": "state"}, ("a", "a", "a")),  # a rollout comes back to its state
    ("step_rloo", {"compare": "state"}, ("a", "b", "a")),
]


@pytest.mark.parametrize(("name", "options", "states"), UNBIASED)
def test_unbiased(name: str, options: dict[str, Any], states: tuple[str, str, str]) -> None:
    assert ratios(name, states, **options) == pytest.approx([1, 1, 1])


def test_the_episode_part_of_gigpo_shrinks_all_turns_alike() -> None:
    """A rollout's own reward is in the mean: a factor (n - 1) / n, the same for every turn."""
    assert ratios("gigpo", step_weight=0.0, norm_by_std=False) == pytest.approx([2 / 3] * 3)


def reached(turn: int) -> float:
    """How probable it is that a rollout has this turn."""
    return sum(chance(rollout) for rollout, steps in enumerate(ROLLOUTS) if len(steps) > turn)


def test_step_grpo_weighs_a_turn_by_how_often_another_rollout_reaches_it() -> None:
    """A step without company counts 0. So later turns, which few reach, learn more slowly than earlier ones."""
    in_company = [1 - (1 - reached(turn)) ** (SIZE - 1) for turn in range(3)]
    assert ratios("step_grpo", baseline="others", norm_by_std=False) == pytest.approx(in_company)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step_grpo", {"norm_by_std": False}),
        ("gigpo", {"norm_by_std": False, "gamma": 1.0, "episode_weight": 0.0}),
        ("step_reinforce", {"baseline": True, "gamma": 1.0}),
    ],
)
def test_a_baseline_with_the_own_steps_is_biased_between_turns(name: str, options: dict[str, Any]) -> None:
    found = ratios(name, **options)
    assert found.max() > 1.2 * found.min()


def test_centring_every_turn_and_summing_is_biased() -> None:
    """The construction to avoid: a rollout's own number of turns decides how many means are subtracted."""
    packed = batch(("a", "b", "c"))
    rewards, trajectory = packed.steps.rewards.numpy(), packed.steps.trajectory.numpy()
    group = packed.trajectory_group.numpy()[trajectory]
    number = np.arange(len(rewards)) - np.searchsorted(trajectory, trajectory)
    key = 3 * group + number
    centred = rewards - (np.bincount(key, rewards) / np.maximum(np.bincount(key), 1))[key]
    to_go = np.array([centred[i:][trajectory[i:] == trajectory[i]].sum() for i in range(len(centred))])
    found = expected_gradient(to_go) / true_gradient()
    assert found.max() > 2 * found.min()


@pytest.mark.parametrize("compare", ["number", "state", "group"])
def test_step_rloo_by_hand(compare: str) -> None:
    """Against plain loops: lengths and states at random, a baseline trajectory that never counts, a step alone."""
    chance_of = np.random.default_rng(3)
    members = []
    for group in "abcdef":
        for index in range(int(chance_of.integers(1, 5))):
            steps = [
                SimpleNamespace(
                    row=0, start=n, end=n + 1, reward=float(chance_of.integers(-3, 4)), state_key=key
                )
                for n, key in enumerate(chance_of.choice(["s", "t", None], chance_of.integers(0, 5)))
            ]
            member = {"group_id": group, "rollout_index": index, "is_baseline": index == 1, "steps": steps}
            members.append(SimpleNamespace(**member, row_lengths=[9], row_trainable=[9], reward=0.0))
    want = []
    returns = [np.cumsum([s.reward for s in m.steps][::-1])[::-1].tolist() for m in members]
    for own, member in enumerate(members):
        for n, step in enumerate(member.steps):
            others = [
                returns[m][k]
                for m, other in enumerate(members)
                if m != own and other.group_id == member.group_id and not other.is_baseline
                for k, compared in enumerate(other.steps)
                if compare == "group"
                or (compare == "number" and k == n)
                or (
                    compare == "state" and step.state_key is not None and compared.state_key == step.state_key
                )
            ]
            want.append(returns[own][n] - (sum(others) / len(others) if others else 0))
    estimate = registry.get_estimator("step_rloo").function(pack(members), compare=compare)
    assert estimate.advantages.tolist() == pytest.approx(want)
    assert estimate.returns is not None
    assert estimate.returns.tolist() == [value for values in returns for value in values]


def test_steps_with_equal_returns_have_exactly_0() -> None:
    steps = [SimpleNamespace(row=0, start=0, end=1, reward=0.1, state_key=None)]
    members = [
        SimpleNamespace(
            **{"group_id": "g", "rollout_index": index, "is_baseline": False, "steps": steps},
            **{"row_lengths": [1], "row_trainable": [1], "reward": 0.1},
        )
        for index in range(3)
    ]
    assert registry.get_estimator("step_rloo").function(pack(members)).advantages.tolist() == [
        0,
        0,
        0,
    ]
