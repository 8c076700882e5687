"""What verl 0.9.1 has brought, by hand."""

from __future__ import annotations

import pytest
import torch

from streamadv import padded
from streamadv.errors import OptionError


def test_a_group_whose_equal_rewards_do_not_cancel_is_filtered() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.2, 0.1])  # the mean of three 0.1 is another number than 0.1
    keep = padded.dapo_filter_groups(rewards, ["a", "a", "a", "b", "b", "alone"])
    assert keep.tolist() == [0, 0, 0, 1, 1, 1]


def test_pf_ppo_draws_extremes() -> None:
    scores = torch.tensor([-2.0, 1.0, 3.0])
    assert padded.pf_ppo_weights(scores).tolist() == pytest.approx([4, 1, 9])
    assert padded.pf_ppo_weights(scores, "max_min").tolist() == pytest.approx([1, 1e-8, 1])
    assert padded.pf_ppo_weights(scores, "max_random").tolist() == pytest.approx([0.1, 0.1, 0.4])
    with pytest.raises(OptionError, match="weight_pow is -1"):
        padded.pf_ppo_weights(torch.zeros(2), weight_pow=-1.0)


def test_a_session_has_the_advantage_of_its_last_row() -> None:
    rewards = torch.tensor([[9.0, 0.0], [0.0, 3.0], [0.0, 1.0], [7.0, 0.0]])
    mask = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0]])
    pair = padded.compute_multi_trajectory_grpo_advantage(
        rewards, mask, ["p"] * 4, [0, 0, 1, 1], torch.tensor([0, 1, 5, 2]), norm_adv_by_std_in_grpo=False
    )
    assert pair[0].tolist() == [[1, 0], [1, 1], [0, -1], [-1, 0]]


def test_icepop_that_leaves_no_weight_has_no_effective_sample() -> None:
    weights, metrics = padded.compute_rollout_correction_weights(
        torch.full((1, 3), 5.0), torch.ones(1, 3), "sequence", "0.5_2", True, peer_quirks="verl"
    )
    assert weights.tolist() == [[0, 0, 0]]
    assert metrics["rollout_is_eff_sample_size"] == 0
    assert metrics["rollout_is_oob_ratio"] == 1


@pytest.mark.parametrize("text", ["", " ", "0.5_1_2", "_2", "0_2", "nan", "2_0.5", "a"])
def test_bounds_in_text_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="rollout_is_"):
        padded.compute_rollout_correction_weights(torch.zeros(1, 1), torch.ones(1, 1), "token", text)


def test_a_teacher_has_a_part_in_its_own_rows() -> None:
    batch = {
        "response_mask": torch.ones(2, 1),
        "token_level_rewards": torch.zeros(2, 1),
        "rollout_log_probs": torch.zeros(2, 1),
        "teacher_log_probs_math": torch.full((2, 1), -1.0),
        "teacher_log_probs_code": torch.full((2, 1), -2.0),
        "teacher_rows_code": torch.tensor([0, 1]),
    }
    teachers = {"math": 1.0, "code": 0.5}
    result, _ = padded.compute_advantage(batch, distill_teachers=teachers, distill_only=True)
    assert result["advantages"].tolist() == [[-1], [-2]]
    with pytest.raises(OptionError, match="distill_teachers has the coefficients"):
        padded.compute_advantage(batch, distill_teachers=teachers, distill_coef=1.0, distill_only=True)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_a_plus_keeps_the_value_and_has_the_gradient_of_k2(name: str) -> None:
    log_probs = torch.tensor([-0.3, 1.5, -40.0], requires_grad=True)
    ref = torch.tensor([0.4, -2.0, 30.0])
    kl = padded.approx_kl(log_probs, ref, name + "+")  # type: ignore[arg-type]
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), padded.approx_kl(log_probs.detach(), ref, name))  # type: ignore[arg-type]
    torch.testing.assert_close(log_probs.grad, log_probs.detach() - ref)
