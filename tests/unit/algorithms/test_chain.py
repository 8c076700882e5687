"""Estimators and chains over packed batches: against loops, by law, cut in two, in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms import (
    ChainConfig,
    ChainResult,
    Estimate,
    PackedBatch,
    build_chain,
    estimator,
    expand,
    merge_metrics,
    run_chain,
)
from streamadv.algorithms.packed import span_sum
from streamadv.errors import SettingError, TrajectoryError
from streamadv.trajectory.schema import Step

from .reference import (
    Pair,
    batch_of,
    discounts,
    gae_loop,
    member,
    normalise_loop,
    random_pairs,
    rows_of,
    scan_loop,
)

CHAINS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"norm_by_std": False},
    "grpo_kl": {"kl": {"penalty": "k3", "coefficient": 0.3}},
    "reinforce": {"estimator": "reinforce", "gamma": 0.9, "kl": {"penalty": "abs", "coefficient": 0.1}},
    "reinforce_steps": {"estimator": "reinforce", "token_rewards": "steps"},
    "reinforce_column": {"estimator": "reinforce", "token_rewards": "column", "gamma": 0.9},
    "gae": {"estimator": "gae", "gamma": 0.99, "reward": {"mean": "group", "std": "group", "clip": 1.0}},
    "gigpo": {"estimator": "gigpo", "reward": {"mean": "group"}},
    "gigpo_clip": {"estimator": "gigpo", "advantage_clip": 0.7, "kl": {}},
    "step_reinforce": {"estimator": "step_reinforce", "baseline": True, "norm_by_std": True},
    "agentic_reinforce": {"estimator": "agentic_reinforce", "gamma": 0.9},
    "grpo_passk": {"estimator": "grpo_passk"},
    "maxrl": {"estimator": "maxrl"},
    "opo": {"estimator": "opo", "masks": {"difficulty_low": -1.0, "max_length": 40}},
    "optimal_token_baseline": {"estimator": "optimal_token_baseline"},
    "remax": {"estimator": "remax"},
    "rloo": {"estimator": "rloo", "singleton": "raw"},
    "vtrace": {"estimator": "vtrace", "gamma": 0.9, "lam": 0.95},
    "corrected": {
        "estimator": "gae",
        "distill": {"coefficient": 0.1},
        "correction": {
            "level": "segment",
            "mode": "clip",
            "rejections": [{"kind": "seq_mean_k3", "upper": 1.0}, {"kind": "token_k1", "upper": 4.0}],
            "veto": 1e-3,
            "before_estimator": True,
        },
    },
}


def run(config: dict[str, Any], batch: PackedBatch) -> ChainResult:
    return run_chain(build_chain(config), batch)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), by_std=st.booleans(), epsilon=st.sampled_from([1e-6, 0.1]))
def test_grpo_matches_a_loop(seed: int, by_std: bool, epsilon: float) -> None:
    batch = batch_of(random_pairs(seed, 3, longest=5))
    result = run({"norm_by_std": by_std, "epsilon": epsilon}, batch)
    want = normalise_loop(
        batch.rewards.numpy(), batch.trajectory_group.tolist(), (~batch.baseline).numpy(), by_std, epsilon
    )
    assert result.level == "row"
    assert result.advantages is not None
    got = result.advantages.numpy()
    trained = (~batch.baseline)[batch.row_trajectory].numpy()
    np.testing.assert_allclose(
        got[trained], want[batch.row_trajectory.numpy()][trained], rtol=1e-5, atol=1e-6
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=discounts, lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_and_returns_match_loops(seed: int, gamma: float, lam: float) -> None:
    batch = batch_of(random_pairs(seed, 2))
    mask, values = (batch.column(name).numpy() for name in ("response_mask", "values"))
    rewards = np.zeros(len(mask))
    for row, (start, end) in enumerate(rows_of(batch)):
        spots = start + np.flatnonzero(mask[start:end])
        if len(spots):
            rewards[spots[-1]] = batch.rewards[batch.row_trajectory[row]]
    result = run({"estimator": "gae", "gamma": gamma, "lam": lam}, batch)
    np.testing.assert_allclose(result.columns["token_level_rewards"], rewards, rtol=1e-6)
    want = gae_loop(rewards, values, mask, rows_of(batch), gamma, lam)
    assert result.advantages is not None
    np.testing.assert_allclose(result.advantages, want, rtol=1e-5, atol=1e-5)
    assert result.returns is not None
    np.testing.assert_allclose(result.returns, (want + values) * mask, rtol=1e-5, atol=1e-5)

    discount = np.where(mask, gamma, 1.0)
    result = run({"estimator": "reinforce", "gamma": gamma}, batch)
    assert result.advantages is not None
    want = scan_loop(rewards, discount, rows_of(batch)) * mask
    np.testing.assert_allclose(result.advantages, want, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=discounts, by_std=st.booleans())
def test_gigpo_matches_a_loop(seed: int, gamma: float, by_std: bool) -> None:
    batch = batch_of(random_pairs(seed, 3, longest=6))
    steps = batch.steps
    owner = steps.trajectory.tolist()
    trained = (~batch.baseline).numpy()
    groups = batch.trajectory_group.numpy()
    returns = np.zeros(len(steps))
    for k in range(len(steps) - 1, -1, -1):
        same = k + 1 < len(steps) and owner[k + 1] == owner[k]
        returns[k] = steps.rewards[k] + (gamma * returns[k + 1] if same else 0.0)
    episode = normalise_loop(batch.rewards.numpy(), groups.tolist(), trained, by_std, 1e-6)
    labels = [
        (groups[m], s) if s >= 0 else (k,)
        for k, (m, s) in enumerate(zip(owner, steps.state.tolist(), strict=True))
    ]
    step = normalise_loop(returns, labels, trained[owner], by_std, 1e-6)
    result = run({"estimator": "gigpo", "gamma": gamma, "norm_by_std": by_std, "step_weight": 2.0}, batch)
    assert result.level == "step"
    assert result.advantages is not None
    counted = trained[owner]
    np.testing.assert_allclose(
        result.advantages.numpy()[counted], (episode[owner] + 2 * step)[counted], rtol=1e-5, atol=1e-5
    )


def test_state_groups_stay_inside_their_prompt_group() -> None:
    steps = [Step(start=1, end=3, reward=reward, state_key="s") for reward in (1.0, 2.0, 3.0, 4.0)]
    pairs = [member(group, i, 0.0, steps=[steps[2 * (group == "b") + i]]) for group in "ab" for i in (0, 1)]
    result = run({"estimator": "gigpo"}, batch_of(pairs))
    assert result.advantages is not None
    np.testing.assert_allclose(result.advantages, [-0.7071058, 0.7071058] * 2, rtol=1e-5)


def test_a_group_of_one_and_a_group_of_equals_are_exactly_zero() -> None:
    pairs = [member("a", 0, 5.0), *(member("b", i, 0.1) for i in range(7))]
    for config in ({}, {"norm_by_std": False}, {"reward": {"mean": "group", "std": "group"}}):
        result = run(config, batch_of(pairs))
        assert result.advantages is not None
        assert result.advantages.tolist() == [0.0] * 8


def test_baseline_members_stay_outside_statistics_and_metrics() -> None:
    pairs = [member("a", 0, 1.0), member("a", 1, 3.0), member("a", 2, 100.0, is_baseline=True)]
    result = run({"norm_by_std": False}, batch_of(pairs))
    assert result.advantages is not None
    assert result.advantages[:2].tolist() == [-1.0, 1.0]
    assert result.metrics["critic/score/max"] == 3.0
    assert result.metrics["critic/advantages/max"] == 1.0


def test_a_reward_after_trailing_observations_is_credited_to_the_last_action() -> None:
    pairs = [member("a", 0, 2.0, masks=[[0, 1, 1, 0, 0]])]
    result = run({"estimator": "reinforce", "gamma": 0.5}, batch_of(pairs))
    assert result.advantages is not None
    assert result.advantages.tolist() == [0, 1, 2, 0, 0]
    pairs = [member("a", 0, 0.0, masks=[[0, 1, 0, 1, 0]], token_level_rewards=[9, 0, 1, 0, 4])]
    result = run({"estimator": "reinforce", "token_rewards": "column"}, batch_of(pairs))
    assert result.columns["token_level_rewards"].tolist() == [0, 1, 0, 4, 0]
    steps = [
        Step(start=1, end=3, reward=1.0),
        Step(start=3, end=5, reward=4.0),
        Step(start=0, end=1, reward=9.0),
    ]
    pairs = [member("a", 0, 0.0, masks=[[0, 1, 0, 1, 0]], steps=steps)]
    result = run({"estimator": "reinforce", "token_rewards": "steps"}, batch_of(pairs))
    assert result.columns["token_level_rewards"].tolist() == [0, 1, 0, 4, 0]


def test_rows_without_trainable_tokens_are_harmless() -> None:
    columns = {"values": [7.0] * 3, "ref_log_probs": [0.0] * 3, "rollout_log_probs": [1.0] * 3}
    pairs = [member("a", 0, 2.0, masks=[[0, 0, 0]], **columns), member("a", 1, 1.0, **columns)]
    config = {"estimator": "gae", "lam": 1.0, "kl": {"coefficient": 0.5}, "whiten_advantages": True}
    result = run(config, batch_of(pairs))
    assert result.advantages is not None
    assert torch.isfinite(result.advantages).all()
    assert result.advantages[:3].tolist() == [0, 0, 0]
    assert result.metrics["critic/kl"] == 1.0
    only_empty = run(config, batch_of(pairs[:1]))
    assert "critic/kl" not in only_empty.metrics


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(CHAINS)), split=st.integers(1, 4))
def test_a_group_does_not_feel_its_company(seed: int, name: str, split: int) -> None:
    pairs = random_pairs(seed, 5)
    everything = run(CHAINS[name], batch_of(pairs))
    cut = next((i for i, (info, _) in enumerate(pairs) if info.group_id >= f"g{split:03d}"), len(pairs))
    parts = [run(CHAINS[name], batch_of(part)) for part in (pairs[:cut], pairs[cut:]) if part]
    joined = {
        "advantages": torch.cat([part.advantages for part in parts if part.advantages is not None]),
        "rewards": torch.cat([part.rewards for part in parts]),
        **{key: torch.cat([part.columns[key] for part in parts]) for key in everything.columns},
    }
    assert everything.advantages is not None
    assert torch.equal(joined["advantages"], everything.advantages)
    assert torch.equal(joined["rewards"], everything.rewards)
    for key, value in everything.columns.items():
        assert torch.equal(joined[key], value)
    metrics, weights = merge_metrics((part.metrics, part.weights) for part in parts)
    assert weights == everything.weights
    for key, value in everything.metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-7, abs=1e-7), key


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), late=st.sampled_from(["values", "rollout_log_probs", "response_mask"]))
def test_a_cut_chain_gives_what_the_whole_one_gives(seed: int, late: str) -> None:
    config = {
        "estimator": "gae",
        "reward": {"mean": "group", "std": "batch", "clip": 2.0},
        "kl": {"penalty": "k2", "coefficient": 0.2},
        "whiten_rewards": True,
        "whiten_advantages": True,
        "advantage_clip": 1.5,
    }
    chain = build_chain(config)
    batch = batch_of(random_pairs(seed, 3))
    whole = run_chain(chain, batch)
    first, second = chain.cut({late})
    assert late not in first.needs
    assert late in second.needs
    early = run_chain(first, batch)
    assert early.advantages is None
    carried = PackedBatch(
        batch.cu_seqlens, batch.row_trajectory, batch.row_trainable, batch.trajectory_group, early.rewards,
        batch.baseline, batch.steps, batch.num_tokens, batch.num_groups, batch.columns,
    ).with_step_rewards(early.step_rewards).with_columns(**early.columns)  # fmt: skip
    rest = run_chain(second, carried)
    assert whole.advantages is not None
    assert rest.advantages is not None
    assert torch.equal(rest.advantages, whole.advantages)
    assert {**early.metrics, **rest.metrics} == whole.metrics


def test_steps_that_change_advantages_stay_with_the_estimator() -> None:
    def parts(config: dict[str, Any]) -> list[list[str]]:
        return [[step.name for step in part.steps] for part in build_chain(config).cut({"old_log_probs"})]

    assert parts({"distill": {"log_probs": "old_log_probs"}, "advantage_clip": 1.0}) == [
        ["rewards"],
        ["estimator", "distill", "advantages"],
    ]
    assert parts({"advantage_clip": 1.0, "correction": {}}) == [
        ["rewards", "estimator", "advantages"],
        ["correction"],
    ]
    columns = {"rollout_log_probs": [0.0, 0.0, 1.0], "old_log_probs": [0.0, 0.0, 0.0]}
    batch = batch_of([member("a", i, float(i), **columns) for i in (0, 1)])
    second = build_chain({"correction": {}}).cut({"old_log_probs"})[1]
    result = run_chain(second, batch)
    assert result.advantages is None
    assert list(result.columns) == ["rollout_is_weights"]


def test_an_estimator_reads_the_weights_of_the_correction_before_it() -> None:
    batch = batch_of(random_pairs(0, 3, longest=9))
    result = run({"estimator": "optimal_token_baseline", "correction": {"before_estimator": True}}, batch)
    weighted = batch.with_columns(rollout_is_weights=result.columns["rollout_is_weights"])
    want = run({"estimator": "optimal_token_baseline"}, weighted)
    assert torch.equal(result.advantages, want.advantages)


def test_a_narrowed_mask_packs_again() -> None:
    info, columns = member("a", 0, 1.0)
    narrowed = batch_of([(info, {**columns, "response_mask": np.array([0, 1, 0], np.uint8)})])
    result = run({"whiten_advantages": True}, narrowed)
    assert result.weights["critic/advantages/mean"] == 1


@pytest.mark.parametrize("distill", [None, {"coefficient": 0.5}, {"coefficient": 0.5, "only": True}])
@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_metrics_describe_the_advantages_that_the_chain_gives(
    distill: dict[str, Any] | None, whitened: bool, limit: float | None
) -> None:
    config = {"estimator": "gae", "whiten_advantages": whitened, "advantage_clip": limit, "distill": distill}
    batch = batch_of(random_pairs(3, 4))
    teacher = batch.column("rollout_log_probs") * 0.9
    result = run(config, batch.with_columns(teacher_log_probs=teacher))
    assert result.advantages is not None
    counted = result.advantages[batch.trainable_tokens.mask]
    name = "critic/advantages"
    assert result.metrics[f"{name}/max"] == counted.max().item()
    assert result.metrics[f"{name}/min"] == counted.min().item()
    assert result.metrics[f"{name}/mean"] == pytest.approx(counted.double().mean().item(), abs=1e-7)
    assert result.weights[f"{name}/mean"] == len(counted)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-1e4, 1e4), scale=st.floats(0.1, 100))
def test_normalised_rewards_ignore_shift_and_scale(seed: int, shift: float, scale: float) -> None:
    pairs = random_pairs(seed, 3, longest=5)
    moved: list[Pair] = [
        (type(info)(**{**vars(info), "reward": shift + scale * (info.reward or 0.0)}), columns)
        for info, columns in pairs
    ]
    before, after = (run({"epsilon": 0.0}, batch_of(some)).advantages for some in (pairs, moved))
    assert before is not None
    assert after is not None
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def test_kl_lowers_rewards_by_coefficient_times_its_sum() -> None:
    pairs = [member("a", i, 1.0, rollout_log_probs=[9, 1, 2], ref_log_probs=[0, 0, i]) for i in (0, 1)]
    batch = batch_of(pairs)
    chain = build_chain({"kl": {"penalty": "k1", "coefficient": 0.1}})
    assert run_chain(chain, batch).rewards.tolist() == pytest.approx([0.7, 0.8])
    assert run_chain(chain, batch, kl_coefficient=1.0).rewards.tolist() == [-2.0, -1.0]
    assert run_chain(chain, batch).metrics["critic/kl"] == pytest.approx(1.25)
    steps = [Step(start=0, end=2, reward=5.0)]
    pairs = [member("a", 0, 1.0, steps=steps, rollout_log_probs=[9, 1, 2], ref_log_probs=[0, 0, 0])]
    chain = build_chain({"estimator": "step_reinforce", "kl": {"coefficient": 1.0}})
    assert run_chain(chain, batch_of(pairs)).step_rewards.tolist() == [4.0]


def test_whitening_counts_tokens_and_clipping_reports_masked_fractions() -> None:
    pairs = [member("a", 0, 1.0, masks=[[1, 1, 1, 0]]), member("a", 1, 0.0, masks=[[1, 0, 0, 0]])]
    config = {"norm_by_std": False, "whiten_advantages": True, "advantage_clip": 1.0, "raw_advantages": True}
    result = run(config, batch_of(pairs))
    tokens = np.array([0.5, 0.5, 0.5, -0.5])
    want = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    assert result.advantages is not None
    np.testing.assert_allclose(result.advantages, np.clip(want[[0, 3]], -1, 1), rtol=1e-6)
    assert result.metrics["critic/advantage_clip_frac"] == 0.25
    assert result.columns["raw_advantages"].tolist() == [0.5, 0.5, 0.5, 0, -0.5, 0, 0, 0]


def test_token_rewards_are_clipped_after_the_kl_penalty_and_before_whitening() -> None:
    columns = {"rollout_log_probs": [0.0, 3.0, 1.0, 9.0], "ref_log_probs": [0.0, 0.0, 0.0, 0.0]}
    batch = batch_of([member("a", 0, 5.0, masks=[[0, 1, 1, 0]], **columns)])
    config = {"estimator": "reinforce", "kl": {"coefficient": 1.0}, "token_reward_clip": 2.0}
    result = run(config, batch)
    assert result.columns["token_level_rewards"].tolist() == [0, -2, 2, 0]
    assert result.metrics["critic/token_reward_clip_frac"] == 1.0
    assert result.weights["critic/token_reward_clip_frac"] == 2
    assert result.rewards.tolist() == [1.0]  # 5 - (3 + 1): the clip is of token rewards
    chain = build_chain({**config, "whiten_rewards": True})
    assert [step.name for step in chain.steps] == [
        "rewards", "token_rewards", "kl", "token_reward_clip", "whiten_rewards", "estimator",
    ]  # fmt: skip
    assert "token_reward_clip: clip to 2.0" in "\n".join(chain.describe())
    whitened = run_chain(chain, batch).columns["token_level_rewards"]
    np.testing.assert_allclose(whitened, [0, -(0.5**0.5), 0.5**0.5, 0], rtol=1e-6)
    exact = run({"estimator": "reinforce", "token_reward_clip": 5.0}, batch)
    assert exact.metrics["critic/token_reward_clip_frac"] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("rows", "counted"), [("with_tokens", 2), ("all", 3)])
def test_weights_are_normalised_over_rows_with_tokens_or_over_all(
    level: str, rows: str, counted: int
) -> None:
    """Rows of the greedy baseline are nobody's; a token's mean has no rows to count."""
    old = [[0.0, 0.0, 0.5], [0.0, 0.0, -0.5], [9.0, 9.0, 9.0], [9.0, 9.0, 9.0]]
    masks = [[0, 1, 1], [0, 0, 1], [0, 0, 0], [0, 1, 1]]
    pairs = [
        member("a", i, 1.0, [masks[i]], (), i == 3, old_log_probs=old[i], rollout_log_probs=[0.0] * 3)
        for i in range(4)
    ]
    correction = {"level": level, "batch_normalize": True, "batch_normalize_rows": rows}
    weights = run({"correction": correction}, batch_of(pairs)).columns["rollout_is_weights"][:6]
    first, second = {
        "token": ([1, np.exp(0.5)], np.exp(-0.5)),
        "sequence": ([np.exp(0.5)] * 2, np.exp(-0.5)),
        "geometric": ([np.exp(0.25)] * 2, np.exp(-0.5)),
    }[level]
    mean = np.mean([*first, second]) if level == "token" else (first[0] + second) / counted
    np.testing.assert_allclose(weights, np.array([0, *first, 0, 0, second]) / mean, rtol=1e-6)


def test_expand_places_values_on_trainable_tokens() -> None:
    steps = [Step(start=0, end=3), Step(start=2, end=4)]
    batch = batch_of([member("a", 0, 0.0, masks=[[0, 1, 1, 1, 1]], steps=steps)])
    assert expand(batch, "row", torch.tensor([2.0])).tolist() == [0, 2, 2, 2, 2]
    assert expand(batch, "step", torch.tensor([1.0, 2.0])).tolist() == [0, 1, 2, 2, 0]
    assert expand(batch, "token", torch.arange(5.0)).tolist() == [0, 1, 2, 3, 4]
    assert span_sum(batch, torch.arange(5.0)).tolist() == [3.0, 5.0]


@pytest.mark.parametrize("level", ["row", "step", "token"])
@pytest.mark.parametrize("apart", [-1, 1])
def test_expand_takes_one_value_for_each(level: Any, apart: int) -> None:
    batch = batch_of([member("a", 0, 0.0, masks=[[0, 1, 1], [1, 1]], steps=[Step(start=0, end=3)])])
    size = {"row": 2, "step": 1, "token": 5}[level]
    with pytest.raises(TrajectoryError, match=rf"\({size + apart},\).*\({size},\)"):
        expand(batch, level, torch.zeros(size + apart))
    with pytest.raises(TrajectoryError, match=rf"\({size}, 1\)"):
        expand(batch, level, torch.zeros(size, 1))
    with pytest.raises(SettingError, match="tokens"):
        expand(batch, "tokens", torch.zeros(size))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["response_mask", "values", "token_level_rewards"])
@pytest.mark.parametrize("shape", [(3,), (9000,), (5, 1), ()])
def test_a_column_of_another_length_is_refused(name: str, shape: tuple[int, ...]) -> None:
    batch = batch_of([member("a", i, 1.0, [[0, 1, 1, 0, 1]], values=[0.0] * 5) for i in (0, 1)])
    dtype = torch.uint8 if name == "response_mask" else torch.float32
    with pytest.raises(TrajectoryError, match=rf"{name}.*needs.*"):
        batch.with_columns(**{name: torch.ones(shape, dtype=dtype)})


def test_configuration_travels_as_json() -> None:
    for config in CHAINS.values():
        chain = build_chain(config)
        again = ChainConfig.model_validate_json(chain.config.model_dump_json())
        assert again == chain.config
        assert build_chain(again).describe() == chain.describe()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"estimator": "grop"}, "grop"),
        ({"lam": 0.9}, "lam"),
        ({"estimator": "gae", "options": {"lamda": 1.0}}, "options.lamda"),
        ({"estimator": "gae", "gamma": "high"}, "options.gamma"),
        ({"estimator": "gae", "gamma": 1.0, "options": {"gamma": 1.0}}, "gamma is given twice"),
        ({"reward": {"mean": "prompt"}}, "reward.mean"),
        ({"reward": {"cilp": 1}}, "cilp"),
        ({"kl": {"penalty": "k4"}}, "kl.penalty"),
        ({"whiten_rewards": True}, "whiten_rewards"),
        ({"token_rewards": "steps"}, "token_rewards"),
        ({"token_reward_clip": 1.0}, "token_reward_clip"),
        ({"estimator": "gae", "token_reward_clip": 0.0}, "token_reward_clip"),
        ({"correction": {"batch_normalize_rows": "all"}}, "batch_normalize_rows"),
        ({"raw_advantages": True}, "raw_advantages"),
        ({"advantage_clip": -1}, "advantage_clip"),
        ("gropo", "gropo"),
    ],
)
def test_a_wrong_option_is_one_line_naming_it(config: Any, named: str) -> None:
    with pytest.raises(SettingError) as caught:
        build_chain(config)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_users_register_estimators() -> None:
    @estimator("test_length", scope="row")
    def by_length(batch: PackedBatch, *, factor: float = 1.0) -> Estimate:
        return Estimate("row", batch.row_trainable * factor)

    result = run({"estimator": "test_length", "factor": 2.0}, batch_of([member("a", 0, 0.0)]))
    assert result.advantages is not None
    assert result.advantages.tolist() == [4.0]

    @estimator("test_everywhere", scope="row", level="token", needs=["token_level_rewards"])
    def everywhere(batch: PackedBatch) -> Estimate:
        return Estimate("token", batch.column("token_level_rewards") + 1)

    chain = build_chain("test_everywhere")
    assert chain.needs == ("response_mask",)
    result = run_chain(chain, batch_of([member("a", 0, 3.0, masks=[[0, 1, 1, 0]])]))
    assert result.advantages is not None
    assert result.advantages.tolist() == [0, 1, 4, 0]

    @estimator("test_undeclared", scope="row")
    def undeclared(batch: PackedBatch) -> Estimate:
        return Estimate("token", batch.column("values"))

    with pytest.raises(SettingError, match="level='token'"):
        run({"estimator": "test_undeclared"}, batch_of([member("a", 0, 0.0, values=[1, 2, 3])]))
    with pytest.raises(SettingError, match="wide"):
        estimator("test_wide", scope="wide")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ([member("b", 0, 1.0), member("a", 0, 1.0)], "sort"),
        ([member("a", 1, 1.0), member("a", 1, 1.0)], "sort"),
        ([member("a", 0, None)], "unscorable"),
        ([member("a", 0, 1.0, values=[1.0, 2.0])], "values"),
    ],
)
def test_packing_refuses_what_does_not_fit(pairs: list[Pair], named: str) -> None:
    with pytest.raises(TrajectoryError, match=named):
        batch_of(pairs)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TrajectoryError, match="values"):
        run({"estimator": "gae"}, batch_of([member("a", 0, 1.0)]))
