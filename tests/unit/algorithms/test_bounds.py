"""What lies exactly on a bound, and just beyond: which side counts is part of the definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from streamadv import padded
from streamadv.algorithms import PackedBatch, RunningMoments, build_chain, merge_metrics, run_chain
from streamadv.algorithms.segments import moments, normalise, tokens_where, whiten, whiten_weighted
from streamadv.trajectory.schema import Step

from .reference import Pair, batch_of, member, pack

MASK = torch.ones(1, 3)


def weights(log_ratio: list[float], **options: Any) -> tuple[list[float], dict[str, float]]:
    found, metrics = padded.compute_rollout_correction_weights(torch.tensor([log_ratio]), MASK, **options)
    return found[0].tolist(), metrics


@pytest.mark.parametrize(("lower", "upper"), [(1.0, 2.0), (0.5, 1.0), (1.0, 1.0)])
def test_icepop_keeps_a_ratio_on_its_bounds(lower: float, upper: float) -> None:
    options: dict[str, Any] = {"mode": "mask", "rollout_is_threshold": upper, "rollout_is_lower": lower}
    assert weights([0.0, 1.0, -1.0], **options)[0] == [1.0, 0.0, 0.0]
    config = {"level": "token", "mode": "mask", "upper": upper, "lower": lower}
    columns = {"old_log_probs": [0.0, 1.0, -1.0], "rollout_log_probs": [0.0] * 3}
    result = run_chain(
        build_chain({"correction": config}), batch_of([member("a", 0, 0.0, [[1, 1, 1]], **columns)])
    )
    assert result.columns["rollout_is_weights"].tolist() == [1.0, 0.0, 0.0]


def test_lower_bound_is_the_inverse_of_the_upper_one() -> None:
    ratios = [math.log(0.4), math.log(0.6), math.log(3.0)]
    assert weights(ratios, mode="mask")[0] == pytest.approx([0, 0.6, 0])
    assert weights(ratios, mode="clip")[0] == pytest.approx([0.5, 0.6, 2])
    assert weights(ratios, mode="truncate")[0] == pytest.approx([0.4, 0.6, 2])


def test_ratios_are_held_at_e_to_the_twenty() -> None:
    found, _ = weights([25.0, -25.0, 0.0], rollout_is_threshold=1e30)
    assert found == pytest.approx([math.exp(20), math.exp(-20), 1.0])


def test_weights_that_are_all_rejected_are_not_normalised() -> None:
    found, metrics = weights([5.0] * 3, mode="mask", rollout_is_batch_normalize=True)
    assert found == [0.0] * 3
    assert metrics["rollout_is_batch_norm_factor"] == 1.0


def test_shares_above_and_below_leave_out_the_bounds() -> None:
    _, metrics = weights([0.0] * 3, rollout_is_threshold=1.0)
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_ratio_fraction_low"] == 0.0
    _, metrics = rejected([0.0] * 3, "token_k1", "1.0_1.0")
    assert metrics["rollout_rs_token_k1_fraction_high"] == metrics["rollout_rs_token_k1_fraction_low"] == 0.0


def test_the_metrics_of_weights_are_those_of_bounded_ones() -> None:
    """Ratios 1, 1/8 and 4, of which verl 0.9.1 reports min(w, 2), and the shares of ratios out of 1/2 .. 2."""
    _, metrics = weights([0.0, math.log(0.125), math.log(4.0)])
    held = np.array([1, 0.125, 2])
    assert metrics["rollout_is_mean"] == pytest.approx(held.mean())
    assert (
        metrics["rollout_is_ratio_fraction_high"]
        == metrics["rollout_is_ratio_fraction_low"]
        == pytest.approx(1 / 3)
    )
    assert metrics["rollout_is_std"] == pytest.approx(held.std())
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(held.mean() ** 2 / np.mean(held**2))


def rejected(
    log_ratio: list[float], kind: str, bounds: str, mask: Any = MASK
) -> tuple[list[float], dict[str, float]]:
    kept, metrics = padded.compute_rollout_rejection_mask(torch.tensor([log_ratio]), mask, kind, bounds)
    return kept[0].tolist(), metrics


@pytest.mark.parametrize(
    ("kind", "bounds", "log_ratio", "kept"),
    [
        ("token_k1", "1.0_2.0", [0.0, 0.1, -0.1], [1, 0, 1]),
        ("token_k1", "0.5_1.0", [0.0, 0.1, -0.1], [1, 1, 0]),
        ("token_k2", "2.0", [2.0, -2.0, 2.01], [1, 1, 0]),
        ("seq_sum_k1", "1.0_2.0", [0.25, -0.25, 0.0], [1, 1, 1]),
        ("seq_sum_k1", "1.0_2.0", [0.25, 0.25, 0.0], [0, 0, 0]),
        ("seq_mean_k2", "2.0", [2.0, -2.0, 2.0], [1, 1, 1]),
        ("seq_max_k2", "2.0", [2.0, 0.0, 0.0], [1, 1, 1]),
        ("seq_max_k2", "2.0", [2.01, 0.0, 0.0], [0, 0, 0]),
        ("seq_sum_k3", "1e8", [19.0, 0.0, 0.0], [0, 0, 0]),
        ("token_k2", "201", [30.0, -30.0, 0.0], [1, 1, 1]),
    ],
)
def test_rejections_keep_what_is_on_their_bounds(
    kind: str, bounds: str, log_ratio: list[float], kept: list[float]
) -> None:
    """The bounds of k1 are on rollout / train; log-ratios are held in -20 .. 20."""
    assert rejected(log_ratio, kind, bounds)[0] == kept


def test_what_is_masked_rejects_no_row() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    for kind in ("seq_max_k2", "seq_sum_k2", "seq_mean_k3", "seq_max_k3"):
        assert rejected([0.1, 0.1, 9.0], kind, "0.1", mask)[0] == [1, 1, 0]


@pytest.mark.parametrize(
    ("veto", "kept"), [({"veto": 1.0}, [1, 1, 0, 0, 1, 1]), ({"veto_upper": 1.0}, [1, 1, 1, 1, 0, 0])]
)
def test_a_veto_is_strict(veto: dict[str, float], kept: list[int]) -> None:
    ratios = [[0.0, 0.0], [0.0, -0.1], [0.0, 0.1]]
    pairs = [
        member("a", i, 0.0, [[1, 1]], old_log_probs=row, rollout_log_probs=[0.0, 0.0])
        for i, row in enumerate(ratios)
    ]
    result = run_chain(build_chain({"correction": {"level": None, **veto}}), batch_of(pairs))
    assert result.columns["response_mask"].tolist() == kept


def test_late_rejection_takes_advantages_away() -> None:
    columns = {"old_log_probs": [0.0, 9.0], "rollout_log_probs": [0.0, 0.0]}
    pairs = [member("a", 0, 2.0, [[1, 1]], **columns)]
    config = {"level": None, "rejections": [{"kind": "token_k1", "upper": 2.0}]}
    result = run_chain(build_chain({"estimator": "reinforce", "correction": config}), batch_of(pairs))
    assert result.advantages is not None
    assert result.advantages.tolist() == [2.0, 0.0]


def test_m2po_keeps_what_stays_below_its_threshold() -> None:
    mask = torch.ones(1, 4)
    ratio = torch.tensor([[0.0, 2.0, 2.0, 9.0]])  # means of squares 0, 2, 8 / 3, ..
    for threshold, kept in ((2.0, [1, 0, 0, 0]), (2.1, [1, 1, 0, 0]), (1e-9, [1, 0, 0, 0])):
        assert padded.m2po_mask(ratio, mask, threshold)[0].tolist() == kept
    assert padded.m2po_mask(torch.tensor([[2.0, 1.0]]), torch.ones(1, 2), 0.5)[0].tolist() == [
        0,
        1,
    ]  # one stays


def test_nan_where_nothing_counts_is_no_reward() -> None:
    column = [math.nan, 1.0, math.nan, 2.0, 4.0, math.nan]
    pairs = [member("a", 0, 0.0, [[0, 1, 0, 1, 0, 0]], token_level_rewards=column)]
    result = run_chain(build_chain({"estimator": "reinforce", "token_rewards": "column"}), batch_of(pairs))
    assert result.columns["token_level_rewards"].tolist() == [0, 1, 0, 6, 0, 0]


def test_the_off_policy_sequence_mask_drops_what_is_beyond() -> None:
    old, new, mask = torch.ones(4, 2), torch.zeros(4, 2), torch.ones(4, 2)
    old[1] = 1.5
    old[3] = 1.5
    advantages = torch.tensor([[-1.0], [-1.0], [1.0], [0.0]])
    kept = padded.off_policy_sequence_mask(advantages, new, old, mask, 1.0)
    assert kept[:, 0].tolist() == [True, False, True, True]


def test_proximal_log_probs_between_two_versions() -> None:
    versions = torch.tensor([[-1, 0, 3, 4, 5]])
    found = padded.proximal_log_probs(torch.full((1, 5), -2.0), torch.full((1, 5), -1.0), versions, 4)
    assert found[0].tolist() == pytest.approx([-2, -2 + 3 / 4, -2, -2, -2])
    tiny = torch.full((1, 1), -30.0)
    (linear,) = padded.proximal_log_probs(tiny, tiny, torch.tensor([[0]]), 4, "linear")[0].tolist()
    assert linear == pytest.approx(math.log(math.exp(-30) + 1e-10), rel=1e-6)


# Whole trajectories -------------------------------------------------------------------------------------------


def rows(rewards: list[float], lengths: list[int], baseline: float | None = None) -> list[Pair]:
    pairs = [member("a", i, r, [[1] * n]) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    if baseline is not None:
        pairs.append(member("a", len(rewards), baseline, [[1]], (), True))
    return pairs


def kept_rows(batch: PackedBatch, **masks: Any) -> list[bool]:
    mask = run_chain(build_chain({"masks": masks}), batch).columns["response_mask"]
    bounds = batch.cu_seqlens.tolist()
    return [bool(mask[start:end].any()) for start, end in itertools.pairwise(bounds)]


def test_masks_of_whole_trajectories() -> None:
    batch = batch_of([*rows([0.0, 1.0], [2, 3]), member("b", 0, 9.0, [[1]])])
    assert kept_rows(batch, max_length=3) == [True, False, True]
    assert kept_rows(batch, max_length=4) == [True, True, True]
    assert kept_rows(batch, wrong_max_length=2) == [False, True, True]
    assert kept_rows(batch, wrong_max_length=3) == [True, True, True]
    assert kept_rows(batch, difficulty_low=0.5) == [False, False, True]  # alone: says nothing of difficulty
    assert kept_rows(batch, difficulty_low=0.49, difficulty_high=0.5) == [False, False, True]
    assert kept_rows(batch, difficulty_low=0.49, difficulty_high=0.51) == [True, True, True]
    greedy = batch_of(rows([0.0, 1.0], [1, 1], baseline=5.0))
    assert kept_rows(greedy, difficulty_high=0.6) == [True, True, False]
    result = run_chain(build_chain({"masks": {"difficulty_high": 0.5, "max_length": 9}}), greedy)
    assert (result.metrics["actor/final_mask_ratio"], result.weights["actor/final_mask_ratio"]) == (0.0, 2.0)
    alone = batch_of(rows([9.0], [1], baseline=5.0))
    assert kept_rows(alone, difficulty_high=0.6) == [True, False]


def test_sample_weights_are_of_those_with_tokens() -> None:
    pairs = [
        *rows([0.0, 1.0], [1, 3], baseline=9.0),
        member("b", 0, 1.0, [[1, 1]]),
        member("b", 1, 1.0, [[0]]),
    ]
    batch = batch_of(pairs)
    first = batch.cu_seqlens[:-1]

    def found(**chosen: bool) -> list[float]:
        column = run_chain(build_chain({"sample_weights": chosen}), batch).columns["sample_weights"]
        return column[first][[0, 1, 3, 4]].tolist()

    difficulty, length = np.array([1.25, 1.25, 0.5]), np.array([1.5, 0.5, 1.0])
    for weight, chosen in (
        (difficulty, {"difficulty": True}),
        (length, {"length": True}),
        (difficulty * length, {"difficulty": True, "length": True}),
    ):
        assert found(**chosen) == pytest.approx([*(weight / weight.mean()), 0.0])


def test_padded_masks_and_penalties() -> None:
    scores = torch.tensor([0.0, 0.2, 0.1, 0.1, 0.95, 0.95])
    assert padded.difficulty_mask(scores, n_sample=2).tolist() == [0, 0, 0, 0, 0, 0]
    assert padded.difficulty_mask(scores + 1e-3, n_sample=2).tolist() == [1, 1, 1, 1, 0, 0]
    assert padded.difficulty_mask(scores - 1e-3, n_sample=2).tolist() == [0, 0, 0, 0, 1, 1]
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 0]])
    wrong = torch.zeros(3)
    kept, _ = padded.sample_level_mask(
        mask, wrong, max_response_length=9, error_max_len_clip=True, error_max_len_threshold=2
    )
    assert kept.any(1).tolist() == [False, False, True]
    lengths = torch.tensor([0, 5, 6, 8, 10, 12])
    penalty = {"max_length": 10, "buffer": 4, "factor": 2.0}
    capped = padded.overlong_penalty(torch.zeros(6), lengths, **penalty)
    assert capped.tolist() == [0, 0, 0, -1, -2, -2]
    grown = padded.overlong_penalty(torch.zeros(6), lengths, **penalty, capped=False)
    assert grown.tolist() == [0, 0, 0, -1, -2, -3]
    truncated = torch.tensor([True, False])
    for coefficient, want in ((0.0, [0, 4]), (0.5, [2, 4]), (-1.0, [-1, 4])):
        assert padded.truncation_penalty(torch.full((2,), 4.0), truncated, coefficient).tolist() == want


# Statistics ---------------------------------------------------------------------------------------------------


def test_rolls_agentic_norm_takes_a_std_of_a_millionth_as_none() -> None:
    """Two scores apart by d have the std d / sqrt(2)."""
    for apart, gives in (
        (1e-7, 0.0),
        (2e-6, 1e-6 / (2e-6 * 0.5**0.5 + 1e-6)),
        (1e-3, 5e-4 / (1e-3 * 0.5**0.5 + 1e-6)),
    ):
        scores = torch.tensor([0.0, apart], dtype=torch.float64)
        found = padded.agentic_reward_norm(scores, ["a", "a"], norm_mean_type="group", norm_std_type="group")
        assert found.tolist() == pytest.approx([-gives, gives], rel=1e-5)


def test_a_clip_counts_what_is_beyond() -> None:
    pairs = rows([1.0, -1.0, 1.5], [1, 1, 1])
    result = run_chain(build_chain({"reward": {"clip": 1.0}, "norm_by_std": False}), batch_of(pairs))
    assert result.rewards.tolist() == [1.0, -1.0, 1.0]
    assert result.metrics["critic/reward_clip_frac"] == pytest.approx(1 / 3)


def test_running_moments() -> None:
    nothing = RunningMoments()
    assert (nothing.var, nothing.std) == (1.0, 1.0)
    assert nothing.updated(torch.tensor([4.0])).std == math.inf
    values = np.array([1.0, 4.0, 10.0, 11.0, 3.0])
    merged = nothing.updated(torch.tensor(values[:2])).updated(torch.tensor(values[2:]))
    assert (merged.count, merged.mean) == (5, pytest.approx(values.mean()))
    assert merged.var == pytest.approx(values.var())
    assert merged.std == pytest.approx(values.std(ddof=1))
    shaped = normalise(
        torch.tensor(values[2:]), torch.tensor([0, 3]), mean="running", std="running", running=merged
    )
    np.testing.assert_allclose(shaped, (values[2:] - values.mean()) / (values.std(ddof=1) + 1e-6))


def test_moments_report_the_mean_itself() -> None:
    found = moments(torch.tensor([5.0, 7.0, 9.0, 100.0]), torch.tensor([0, 4]), torch.tensor([1.0, 1, 2, 0]))
    assert (found.size.tolist(), found.mean.tolist()) == ([4] * 4, [7.5] * 4)
    assert found.std.tolist() == pytest.approx([math.sqrt((6.25 + 0.25 + 2 * 2.25) / 3)] * 4)
    assert found.centred.tolist() == [-2.5, -0.5, 1.5, 92.5]


def test_whitening_of_small_and_of_few_values() -> None:
    apart = torch.tensor([0.0, 2e-4, 7.0], dtype=torch.float64)
    batch = batch_of([member("a", 0, 0.0, [[1, 1, 0]])])
    tokens = batch.column("response_mask")
    want = 1e-4 / math.sqrt(2e-8 + 1e-8)
    assert whiten(apart, batch.trainable_tokens).tolist() == pytest.approx([-want, want, 0.0])
    assert whiten_weighted(apart, tokens).tolist()[:2] == pytest.approx([-want, want])
    one = tokens_where(torch.tensor([0, 1, 0]), torch.tensor([0, 3]))
    for shift in (True, False):
        assert whiten(torch.tensor([3.0, 5.0, 6.0]), one, shift).tolist() == [0.0, 5.0, 0.0]
    assert whiten_weighted(torch.tensor([3.0, 5.0]), torch.tensor([0, 1])).tolist() == [3.0, 5.0]
    shifted = whiten(torch.tensor([1.0, 3.0]), tokens_where(torch.ones(2), torch.tensor([0, 2])), False)
    assert shifted.tolist() == pytest.approx([2 - 0.5**0.5, 2 + 0.5**0.5])
    level = torch.full((3,), 0.1)
    assert whiten(level, tokens_where(torch.ones(3), torch.tensor([0, 3]))).tolist() == [0.0] * 3


def test_parts_of_a_batch_merge_to_the_whole() -> None:
    """Standard deviations with the means they were taken around, of rows with ddof 1 and of tokens with ddof 0."""
    values = np.array([1.0, 2.0, 6.0, 7.0, 11.0])
    parts = []
    for part in (values[:2], values[2:]):
        metrics = {
            "x_seq_mean": part.mean(), "x_seq_std": part.std(ddof=1), "x_seq_max_deviation": abs(part - 1).max(),
            "x_clamped_mean": part.mean(), "x_std": part.std(), "x_max": part.max(), "x_min": part.min(),
            "x_eff_sample_size": part.mean() ** 2 / np.mean(part**2),
        }  # fmt: skip
        parts.append((metrics, dict.fromkeys(metrics, float(len(part)))))
    merged, counts = merge_metrics(parts)
    assert merged["x_seq_std"] == pytest.approx(values.std(ddof=1))
    assert merged["x_std"] == pytest.approx(values.std())
    assert merged["x_seq_mean"] == merged["x_clamped_mean"] == pytest.approx(values.mean())
    assert (merged["x_max"], merged["x_min"], merged["x_seq_max_deviation"]) == (11, 1, 10)
    assert merged["x_eff_sample_size"] == pytest.approx(values.mean() ** 2 / np.mean(values**2))
    assert set(counts.values()) == {5.0}


# KL, metrics of a chain ---------------------------------------------------------------------------------------


def test_k3_is_held_at_ten() -> None:
    apart = [-5.0, -30.0, 30.0, 1.0]
    want = [10.0, 10.0, 10.0, math.exp(-1)]
    columns = {"rollout_log_probs": apart, "ref_log_probs": [0.0] * 4}
    batch = batch_of([member("a", 0, 0.0, [[1, 1, 1, 1]], **columns)])
    config = {"estimator": "reinforce", "gamma": 0.0, "kl": {"penalty": "k3", "coefficient": 1.0}}
    result = run_chain(build_chain(config), batch)
    assert (-result.columns["token_level_rewards"]).tolist() == pytest.approx(want)
    assert padded.approx_kl(torch.tensor(apart), torch.zeros(4), "k3").tolist() == pytest.approx(want)


def test_an_adaptive_coefficient_moves_a_fifth_at_most() -> None:
    for kl, want in ((0.0, 0.8), (5.0, 1.2), (0.11, 1.1)):
        assert padded.adapted_coefficient(1.0, kl, 0.1, 10.0, 10.0) == pytest.approx(want)
    assert padded.adapted_coefficient(1.0, 0.0, 0.1, 10.0, 100.0) == 0.0


def test_kl_of_steps_and_rows_leaves_out_what_is_masked() -> None:
    steps = [Step(start=0, end=2, reward=5.0), Step(start=2, end=4, reward=1.0)]
    columns = {"rollout_log_probs": [1.0, 9.0, 2.0, 9.0], "ref_log_probs": [0.0] * 4}
    pairs = [
        member("a", 0, 6.0, [[1, 0, 1, 0]], steps, **columns),
        member("a", 1, 6.0, [[0, 0, 0, 0]], **columns),
    ]
    result = run_chain(
        build_chain({"estimator": "step_reinforce", "gamma": 1.0, "kl": {"coefficient": 1.0}}),
        batch_of(pairs),
    )
    assert result.step_rewards.tolist() == [4.0, -1.0]
    assert result.rewards.tolist() == [3.0, 6.0]
    assert result.metrics["critic/kl"] == 1.5
    assert result.weights["critic/kl"] == 1


def test_baselines_count_in_no_metric_of_steps() -> None:
    def pair(index: int, is_baseline: bool) -> Pair:
        steps = [Step(start=0, end=2, reward=1.0 + index)]
        info, _ = member("a", index, 0.0, [[1, 1]], steps, is_baseline)
        return info, {}

    batch = pack([pair(0, False)[0], pair(1, True)[0]])
    result = run_chain(build_chain("step_reinforce"), batch)
    assert (result.metrics["critic/advantages/max"], result.weights["critic/advantages/mean"]) == (1.0, 2.0)
    assert result.metrics["critic/score/max"] == 0.0


def test_rewards_are_counted_by_trajectory_or_by_row() -> None:
    pairs = [
        member("a", 0, 0.0, [[1], [1], [1]]),
        member("a", 1, 1.0, [[1]]),
        member("a", 2, 9.0, [[1]], (), True),
    ]
    for statistics, mean in (("trajectory", 0.5), ("row", 0.25)):
        config = {"norm_by_std": False, "reward": {"mean": "group", "statistics": statistics}}
        assert run_chain(build_chain(config), batch_of(pairs)).rewards[:2].tolist() == [-mean, 1 - mean]


def test_a_row_without_tokens_stays_out_of_whitening() -> None:
    pairs = [*rows([1.0, 3.0], [1, 1]), member("a", 2, 8.0, [[0]])]
    config = {"norm_by_std": False, "whiten_advantages": True}
    result = run_chain(build_chain(config), batch_of(pairs))
    assert result.advantages is not None
    np.testing.assert_allclose(result.advantages, [-(0.5**0.5), 0.5**0.5, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "scope"),
    [
        ({}, "group"),
        ({"estimator": "gae"}, "row"),
        ({"estimator": "gae", "kl": {}, "token_reward_clip": 1.0, "advantage_clip": 1.0}, "row"),
        ({"estimator": "gae", "reward": {"mean": "group"}}, "group"),
        ({"estimator": "gae", "reward": {"mean": "group", "std": "batch"}}, "batch"),
        ({"estimator": "gae", "reward": {"mean": "running", "std": "running"}}, "row"),
        ({"estimator": "gae", "whiten_rewards": True}, "batch"),
        ({"estimator": "gae", "whiten_advantages": True}, "batch"),
        ({"estimator": "gae", "masks": {"max_length": 3}}, "row"),
        ({"estimator": "gae", "masks": {"difficulty_low": 0.0}}, "group"),
        ({"estimator": "gae", "sample_weights": {"length": True}}, "batch"),
        ({"estimator": "gae", "distill": {}}, "row"),
        ({"estimator": "gae", "correction": {}}, "row"),
        ({"estimator": "gae", "correction": {"batch_normalize": True}}, "batch"),
        ({"estimator": "gae", "correction": {"m2_threshold": 1.0}}, "batch"),
        ({"estimator": "gpg"}, "batch"),
        ({"estimator": "gdpo"}, "batch"),
        ({"estimator": "reinforce_plus_plus"}, "batch"),
    ],
)
def test_a_chain_says_how_much_of_a_batch_it_must_see(config: dict[str, Any], scope: str) -> None:
    assert build_chain(config).scope == scope


def test_defaults_of_the_configuration() -> None:
    config = build_chain(
        {"kl": {}, "correction": {}, "distill": {}, "reward": {"overlong": {"max_length": 9, "buffer": 3}}}
    ).config
    assert config.kl is not None
    assert config.correction is not None
    assert config.distill is not None
    assert config.reward.overlong is not None
    assert (config.kl.penalty, config.kl.coefficient, config.kl.horizon) == ("k1", 0.001, 10000.0)
    correction = config.correction
    assert (correction.level, correction.mode, correction.upper, correction.lower) == (
        "token",
        "truncate",
        2.0,
        None,
    )
    assert (config.distill.coefficient, config.distill.only) == (1.0, False)
    assert (config.reward.epsilon, config.reward.statistics) == (1e-6, "trajectory")
    assert (config.reward.overlong.factor, config.reward.overlong.capped) == (1.0, True)
