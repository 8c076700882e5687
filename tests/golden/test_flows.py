"""ROLL's agentic and RLVR pipelines as one chain each: equal to ROLL's functions called in ROLL's order.

The functions are those of `streamadv.padded` with ROLL's quirks, which the recorded vectors tie to ROLL's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamadv import padded
from streamadv.algorithms import ChainResult, PackedBatch, build_chain, expand, run_chain
from streamadv.trajectory.columns import Array

from ..unit.algorithms.reference import batch_of, member

GROUPS, SIZE, WIDTH = 4, 3, 12
RESPONSE = 8  # most response tokens: a response of so many has been cut off


class Rollouts:
    """B rows of prompt, response with observations in it, and padding; ROLL's column t is token t + 1."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        count = GROUPS * SIZE
        self.attention = np.zeros((count, WIDTH), np.int64)
        self.mask = np.zeros((count, WIDTH), np.int64)
        for row in range(count):
            prompt, response = int(rng.integers(1, 5)), int(rng.integers(1, RESPONSE + 1))
            self.attention[row, : prompt + response] = 1
            self.mask[row, prompt : prompt + response] = 1
            for gap in rng.integers(prompt, prompt + response, 2):
                self.mask[row, gap] = 0
            self.mask[row, prompt + response - 1] = 1
        self.rewards = rng.integers(0, 3, count) / 2.0
        self.difficulty = 1 - self.rewards.reshape(GROUPS, SIZE).mean(1).clip(0, 1).repeat(SIZE)
        self.columns = {
            name: rng.normal(-1, 0.5, (count, WIDTH - 1)).astype(np.float32)
            for name in ("old_log_probs", "ref_log_probs", "values", "rollout_log_probs", "teacher_log_probs")
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        positions = np.maximum(np.cumsum(self.attention, 1) - 1, 0)
        arrays = {"attention_mask": self.attention, "response_mask": self.mask, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in {**arrays, **self.columns}.items()}

    def packed(self) -> PackedBatch:
        return batch_of(
            [
                member(
                    f"g{row // SIZE}",
                    row % SIZE,
                    float(self.rewards[row]),
                    [self.mask[row, 1:].tolist()],
                    **{name: column[row] for name, column in self.columns.items()},
                )
                for row in range(len(self.mask))
            ]
        )

    def on_tokens(self, batch: PackedBatch, result: ChainResult, values: Tensor) -> Array:
        return expand(batch, result.level, values).reshape(len(self.mask), -1).numpy()


ESTIMATORS = ["grpo", "reinforce", "gae", "agentic_reinforce"]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    estimator=st.sampled_from(ESTIMATORS),
    kl=st.sampled_from([None, "k1", "k3"]),
    clip=st.sampled_from([None, 0.8]),
    whiten=st.booleans(),
    distill=st.sampled_from([0.0, 0.3]),
)
def test_agentic(
    seed: int, estimator: str, kl: str | None, clip: float | None, whiten: bool, distill: float
) -> None:
    rollouts = Rollouts(seed)
    index = [row // SIZE for row in range(len(rollouts.mask))]
    rewards = torch.from_numpy(rollouts.rewards)
    normed = padded.agentic_reward_norm(
        rewards, index, norm_mean_type="group", norm_std_type="group", peer_quirks="roll"
    )
    if clip is not None:
        normed = normed.clamp(-clip, clip)
    charged, _ = padded.compute_token_reward(
        {**rollouts.tensors, "response_level_rewards": normed},
        add_token_level_kl=kl is not None,
        kl_coef=0.05,
        kl_penalty=kl or "k1",  # type: ignore[arg-type]
        reward_clip=clip,
        peer_quirks="roll",
    )
    want, _ = padded.compute_advantage(
        {**rollouts.tensors, **charged},
        adv_estimator=estimator,  # type: ignore[arg-type]
        gamma=0.9,
        lambd=0.8,
        whiten_rewards=whiten,
        whiten_advantages=whiten,
        advantage_clip=1.5,
        distill_coef=distill,
        peer_quirks="roll",
    )
    config: dict[str, Any] = build_chain(f"roll/{estimator}").config.model_dump()
    config["options"]["gamma"] = 0.9
    if estimator == "gae":
        config["options"]["lam"] = 0.8
    config |= {
        "reward": {"mean": "group", "std": "group", "statistics": "row", "clip": clip},
        "kl": {"penalty": kl, "coefficient": 0.05, "log_probs": "old_log_probs"} if kl else None,
        "token_reward_clip": clip,
        "whiten_rewards": whiten,
        "whiten_advantages": whiten,
        "advantage_clip": 1.5,
        "distill": {"coefficient": distill} if distill else None,
    }
    compare(rollouts, config, want, rollouts.mask[:, 1:] != 0)


@pytest.mark.release
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    estimator=st.sampled_from(["reinforce", "gae"]),
    mean=st.sampled_from([None, "batch", "group"]),
    std=st.sampled_from([None, "batch", "group"]),
    by_difficulty=st.booleans(),
    by_length=st.booleans(),
)
def test_rlvr_with_masks_and_weights(
    seed: int, estimator: str, mean: Any, std: Any, by_difficulty: bool, by_length: bool
) -> None:
    rollouts = Rollouts(seed)
    tensors, rewards = rollouts.tensors, torch.from_numpy(rollouts.rewards)
    mask, _ = padded.sample_level_mask(
        tensors["response_mask"],
        rewards,
        n_sample=SIZE,
        max_response_length=RESPONSE,
        max_len_mask=True,
        use_difficulty_mask=True,
        difficulty_low_threshold=0.1,
        difficulty_high_threshold=0.95,
    )
    shaped, _ = padded.reward_postprocess(
        {"response_level_rewards": rewards},
        adv_estimator=estimator,  # type: ignore[arg-type]
        norm_mean_type=mean,
        norm_std_type=std,
        n_sample=SIZE,
        reward_clip=2.0,
    )
    charged, _ = padded.compute_token_reward(
        {**tensors, **shaped}, add_token_level_kl=True, kl_coef=0.05, kl_penalty="k3", peer_quirks="roll"
    )
    want, _ = padded.compute_advantage(
        {**tensors, **charged, "response_mask": mask},
        adv_estimator=estimator,  # type: ignore[arg-type]
        whiten_advantages=True,
        peer_quirks="roll",
    )
    config: dict[str, Any] = build_chain(f"roll/{estimator}").config.model_dump() | {
        "reward": {
            "mean": mean,
            "std": std,
            "statistics": "row" if mean or std else "trajectory",
            "clip": 2.0,
        },
        "masks": {"difficulty_low": 0.1, "difficulty_high": 0.95, "max_length": RESPONSE},
        "kl": {"penalty": "k3", "coefficient": 0.05, "log_probs": "old_log_probs"},
        "whiten_advantages": True,
    }
    if by_difficulty or by_length:
        config["sample_weights"] = {"difficulty": by_difficulty, "length": by_length}
    trained = mask[:, 1:].numpy() != 0
    result = compare(rollouts, config, want, trained)
    batch_mask = result.columns["response_mask"].reshape(trained.shape).numpy() != 0
    assert np.array_equal(batch_mask, trained)
    if config.get("sample_weights") and trained.any():
        rows = torch.from_numpy(trained.any(1))  # a row without a token weighs nothing
        difficulty = torch.from_numpy(rollouts.difficulty)[rows] if by_difficulty else None
        weights = padded.sample_weights(mask[rows], difficulty, by_length=by_length)
        got = result.columns["sample_weights"].reshape(trained.shape).numpy()
        expected = np.zeros(trained.shape)
        expected[trained.any(1)] = weights.numpy()[:, None]
        assert got[trained] == pytest.approx(expected[trained], rel=1e-4)


def compare(rollouts: Rollouts, config: dict[str, Any], want: dict[str, Tensor], known: Array) -> ChainResult:
    """known: the tokens that are trained on; elsewhere ROLL leaves values."""
    batch = rollouts.packed()
    result = run_chain(build_chain(config), batch)
    assert result.advantages is not None
    returns = result.advantages if result.returns is None else result.returns
    for name, values in (("advantages", result.advantages), ("returns", returns)):
        got = rollouts.on_tokens(batch, result, values)
        expected = want[name][:, -(WIDTH - 1) :].numpy()
        assert got[known] == pytest.approx(expected[known], abs=2e-5), name
    return result
