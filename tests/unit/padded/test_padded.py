"""The padded surface where inputs are awkward: nothing to count, company without tokens, counts of a whole batch."""

from __future__ import annotations

import pytest
import torch

from streamadv import padded
from streamadv.algorithms.off_policy import importance_weights
from streamadv.errors import ArgumentError, SettingError
from streamadv.losses import AGGREGATIONS
from streamadv.padded import agg_loss
from streamadv.padded.layout import padded_tokens


def test_a_batch_without_trainable_tokens_is_corrected_to_nothing() -> None:
    log_probs, mask = torch.randn(2, 3), torch.zeros(2, 3)
    filters = [padded.RatioFilter("sequence"), padded.RatioFilter("geometric", diff_low=-0.1, diff_high=0.1)]
    weights, kept, metrics = padded.compute_train_infer_correction(
        log_probs, log_probs - 1, mask, weight_level="sequence", filters=filters
    )
    assert not weights.any()
    assert not kept.any()
    assert all(value == 0 for value in metrics.values())


def test_metrics_of_micro_batches_add_up_with_the_counts_of_their_batch() -> None:
    old, mask = torch.randn(4, 6), (torch.rand(4, 6) < 0.7).long()
    mask[:, 0] = 1
    rollout = old + 0.3 * torch.randn(4, 6)

    def metrics(rows: slice) -> dict[str, float]:
        return padded.compute_train_infer_correction(
            old[rows],
            rollout[rows],
            mask[rows],
            weight_level="token",
            filters=[padded.RatioFilter()],
            global_valid_samples=4,
            global_valid_tokens=int(mask.sum()),
        )[2]

    whole, first, second = metrics(slice(0, 4)), metrics(slice(0, 1)), metrics(slice(1, 4))
    for name in (name for name in whole if name.endswith("@sum")):
        assert first[name] + second[name] == pytest.approx(whole[name], abs=1e-6), name


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_losses_of_micro_batches_add_up_with_the_counts_of_their_batch(mode: str) -> None:
    loss, mask = torch.randn(4, 5), (torch.rand(4, 5) < 0.7).long()
    mask[:, 0] = 1
    counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": 4, "loss_scale_factor": 5}
    whole = agg_loss(loss, mask, mode)  # type: ignore[arg-type]
    parts = sum(agg_loss(loss[r], mask[r], mode, **counts) for r in (slice(0, 1), slice(1, 4)))  # type: ignore[arg-type]
    torch.testing.assert_close(parts, whole)


def test_a_truncation_bound_below_one_needs_no_lower_bound() -> None:
    tokens = padded_tokens(torch.ones(1, 3))
    weights, _ = importance_weights(torch.tensor([-2.0, 0.0, 2.0]), tokens, upper=0.5)
    torch.testing.assert_close(weights, torch.tensor([-2.0, 0.0, 2.0]).exp().clamp(max=0.5))
    with pytest.raises(SettingError, match=r"correction\.lower is 2\.0"):
        importance_weights(torch.zeros(3), tokens, upper=0.5, mode="clip")


def test_rows_without_tokens_are_no_company_for_the_token_baseline() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]])
    rewards = torch.tensor([[0.0, 1, 0], [0, 0, 0], [0, 0, 2], [3, 0, 0]])
    log_probs, squares = torch.full((4, 3), -0.5), torch.full((4, 3), 0.4)
    for zero_tail in (False, True):
        advantages, returns = padded.compute_tir_optimal_token_baseline_advantage(
            rewards, mask, ["a", "a", "b", "b"], log_probs, squares, handle_zero_tail=zero_tail
        )
        torch.testing.assert_close(advantages[0], returns[0] * mask[0])  # alone: no baseline
        assert advantages[3, 0].item() == pytest.approx(0.5)  # 3 against the mean of 3 and 2


def test_distillation_alone_leaves_the_rewards_as_they_are() -> None:
    given = {
        "token_level_rewards": torch.randn(2, 4),
        "response_mask": torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]]),
        "rollout_log_probs": torch.randn(2, 4),
        "teacher_log_probs": torch.randn(2, 4),
    }
    result, _ = padded.compute_advantage(given, distill_only=True, distill_coef=0.5, whiten_rewards=True)
    assert torch.equal(result["token_level_rewards"], given["token_level_rewards"])
    expected = -0.5 * (given["rollout_log_probs"] - given["teacher_log_probs"]) * given["response_mask"]
    torch.testing.assert_close(result["advantages"], expected)


def test_a_rejection_without_a_name_is_refused() -> None:
    with pytest.raises(SettingError, match="names no rejection"):
        padded.compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), " , ", 2.0)


def test_correction_without_a_threshold_has_no_weights() -> None:
    log_probs = torch.randn(2, 3)
    weights, mask, _ = padded.compute_rollout_correction_and_rejection_mask(
        log_probs, log_probs, torch.ones(2, 3), rollout_is="token", rollout_is_threshold=None
    )
    assert weights is None
    assert mask.all()


def test_group_std_of_verl_in_january_cancels_where_scores_share_an_offset() -> None:
    scores = torch.tensor([1000.0, 1000.1, 1000.2])
    _, std, _ = padded.group_mean_std(scores, ["a"] * 3)
    _, theirs, _ = padded.group_mean_std(scores, ["a"] * 3, peer_quirks="verl-2026-01")
    assert std[0].item() == pytest.approx(0.1, rel=1e-3)
    squares, total = scores.square().sum(), scores.sum()
    assert theirs[0] == ((squares - total.square() / 3) / 2).clamp(min=1e-6).sqrt()


@pytest.mark.parametrize("kind", ["token_k1", "seq_sum_k2", "seq_mean_k3", "seq_max_k2"])
def test_rejection_takes_log_probs_that_carry_gradients(kind: str) -> None:
    log_ratio, mask = torch.randn(3, 4), torch.ones(3, 4)
    plain, _ = padded.compute_rollout_rejection_mask(log_ratio, mask, kind, 1.5)
    carrying, _ = padded.compute_rollout_rejection_mask(log_ratio.requires_grad_(), mask, kind, 1.5)
    assert torch.equal(carrying, plain)


def test_ratios_are_bounded_unless_rolls_are_wanted() -> None:
    old, rollout, mask = torch.tensor([[30.0, 1.0]]), torch.zeros(1, 2), torch.tensor([[1, 0]])
    options = {"weight_level": "token", "upper_bound": None}
    weights, _, _ = padded.compute_train_infer_correction(old, rollout, mask, **options)
    assert weights.tolist() == [[pytest.approx(torch.tensor(20.0).exp().item()), 0.0]]
    theirs, _, _ = padded.compute_train_infer_correction(old, rollout, mask, **options, peer_quirks="roll")
    assert theirs.tolist() == [[pytest.approx(torch.tensor(30.0).exp().item()), pytest.approx(2.7182817)]]


def test_a_reward_stands_on_the_last_trainable_token_or_on_rolls_last_attended_one() -> None:
    batch = {
        "response_level_rewards": torch.tensor([2.0]),
        "response_mask": torch.tensor([[0, 1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "position_ids": torch.arange(4)[None],
        "old_log_probs": torch.zeros(1, 3),
        "ref_log_probs": torch.zeros(1, 3),
    }
    here, _ = padded.compute_token_reward(batch)
    assert here["token_level_rewards"].tolist() == [[2, 0, 0]]
    theirs, _ = padded.compute_token_reward(batch, peer_quirks="roll")
    assert theirs["token_level_rewards"].tolist() == [[0, 2, 0]]


@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_of_positions_with_channels_the_first_says_where_a_row_ends(channels: int) -> None:
    """As ROLL makes them for vision-language models: whatever the others are."""
    batch = {
        "response_level_rewards": torch.tensor([2.0, -1.0]),
        "response_mask": torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "old_log_probs": torch.zeros(2, 3),
        "ref_log_probs": torch.zeros(2, 3),
    }
    others = torch.randint(0, 99, (2, channels - 1, 4), generator=torch.Generator().manual_seed(channels))
    positions = torch.cat([torch.arange(4).expand(2, 1, 4), others], 1)
    found, _ = padded.compute_token_reward({**batch, "position_ids": positions}, peer_quirks="roll")
    plain, _ = padded.compute_token_reward({**batch, "position_ids": positions[:, 0]}, peer_quirks="roll")
    assert found["token_level_rewards"].tolist() == [[0, 2, 0], [0, 0, -1]]
    assert torch.equal(found["token_level_rewards"], plain["token_level_rewards"])


@pytest.mark.parametrize("written", [0, 1])
def test_equal_advantages_and_returns_are_written_to_apart(written: int) -> None:
    results = padded.compute_grpo_outcome_advantage(
        torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), ["a", "a"]
    )
    assert torch.equal(*results)
    before = results[0].clone()
    results[written][0] = 7
    assert torch.equal(results[1 - written], before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
def test_a_grouped_estimator_refuses_a_mask_of_weights(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0], [1, 2]]).to(dtype)
    with pytest.raises(ArgumentError, match="response_mask holds values other than 0 and 1"):
        padded.compute_opo_outcome_advantage(torch.ones(2, 2), mask, ["a", "a"])


def test_a_grouped_estimator_takes_nan_outside_the_mask_alone() -> None:
    rewards, mask = torch.tensor([[1.0, torch.nan], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 1]])
    advantages, _ = padded.compute_rloo_outcome_advantage(rewards, mask, ["a", "a"])
    assert torch.equal(advantages, torch.tensor([[1.0, 0.0], [-1.0, -1.0]]))
    with pytest.raises(ArgumentError, match=r"token_level_rewards\[0, 1\] is nan"):
        padded.compute_rloo_outcome_advantage(rewards, torch.ones(2, 2), ["a", "a"])
