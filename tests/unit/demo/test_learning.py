"""The demo's loss and update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamadv.demo.environment import BOS, FIRST_ACTION, FIRST_POSITION
from streamadv.demo.policy import Policy, log_probs_and_entropy, seeded_policy
from streamadv.demo.settings import CORRECTIONS
from streamadv.demo.trainer import CLIP_RATIO, LOSSES, TIS_CAP, new_optimizer, update

NUMBERS = st.floats(-3, 3)


def gradient(correction: str, log_prob: float, rollout_log_prob: float, advantage: float) -> float:
    log_probs = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    rollout_log_probs = torch.tensor([rollout_log_prob], dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss, _ = LOSSES[correction](log_probs, rollout_log_probs, advantages, torch.ones(1))
    loss.sum().backward()
    assert log_probs.grad is not None
    return float(log_probs.grad)


@given(NUMBERS, NUMBERS)
def test_on_policy_all_corrections_are_the_policy_gradient(log_prob: float, advantage: float) -> None:
    for correction in CORRECTIONS:
        assert gradient(correction, log_prob, log_prob, advantage) == pytest.approx(-advantage, abs=1e-6)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_off_policy_weights(log_prob: float, rollout_log_prob: float, advantage: float) -> None:
    ratio = float(torch.tensor(log_prob - rollout_log_prob, dtype=torch.float64).exp())
    assert gradient("none", log_prob, rollout_log_prob, advantage) == pytest.approx(-advantage, abs=1e-6)
    weight = min(ratio, TIS_CAP)
    assert gradient("tis", log_prob, rollout_log_prob, advantage) == pytest.approx(
        -weight * advantage, abs=1e-4
    )
    outside = (advantage > 0 and ratio > 1 + CLIP_RATIO) or (advantage < 0 and ratio < 1 - CLIP_RATIO)
    if abs(ratio - 1 - CLIP_RATIO) > 1e-6 and abs(ratio - 1 + CLIP_RATIO) > 1e-6:
        expected = 0.0 if outside else -ratio * advantage
        assert gradient("ppo", log_prob, rollout_log_prob, advantage) == pytest.approx(expected, abs=1e-4)


class MicroBatch:
    """Rows of [position, action] turns, right padded, as `padded()` of the trainer queue gives them."""

    def __init__(self, rows: list[tuple[list[int], float]], log_probs: Tensor) -> None:
        length = max(len(tokens) for tokens, _ in rows)
        self._fields: dict[str, Any] = {
            "input_ids": torch.tensor(
                [tokens + [0] * (length - len(tokens)) for tokens, _ in rows], dtype=torch.int32
            ),
            "advantages": torch.tensor([[advantage] * length for _, advantage in rows]),
        }
        self._fields["response_mask"] = (self._fields["input_ids"] >= FIRST_ACTION).to(torch.uint8)
        self._fields["rollout_log_probs"] = log_probs[: len(rows), None].expand(-1, length)

    def padded(self) -> SimpleNamespace:
        return SimpleNamespace(**self._fields)


GOOD = ([BOS, FIRST_POSITION, FIRST_ACTION + 1], 1.0)
BAD = ([BOS, FIRST_POSITION, FIRST_ACTION + 2, FIRST_POSITION + 1, FIRST_ACTION + 2], -1.0)
UNIFORM = torch.full((2,), 0.25).log()


def updated(micro_batches: list[MicroBatch], num_tokens: int) -> Policy:
    policy = seeded_policy(0)
    update(policy, new_optimizer(policy), micro_batches, num_tokens, "ppo")
    return policy


def test_update_makes_good_actions_likelier() -> None:
    policy = seeded_policy(0)
    optimizer = new_optimizer(policy)
    before = [
        log_probs_and_entropy(policy, torch.tensor([tokens]))[0][0, -1].item() for tokens, _ in (GOOD, BAD)
    ]
    for _ in range(3):
        update(policy, optimizer, [MicroBatch([GOOD, BAD], UNIFORM)], 3, "none")
    after = [
        log_probs_and_entropy(policy, torch.tensor([tokens]))[0][0, -1].item() for tokens, _ in (GOOD, BAD)
    ]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_update_does_not_depend_on_the_cut_into_micro_batches() -> None:
    whole = updated([MicroBatch([GOOD, BAD], UNIFORM)], 3)
    cut = updated([MicroBatch([GOOD], UNIFORM), MicroBatch([BAD], UNIFORM)], 3)
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_an_on_policy_batch_is_not_stale() -> None:
    policy = seeded_policy(0)
    kl = update(policy, new_optimizer(policy), [MicroBatch([GOOD, BAD], UNIFORM)], 3, "ppo")
    assert kl == pytest.approx(0.0, abs=1e-6)
