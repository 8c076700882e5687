"""Presets and the padded surface give the same numbers, packed and padded, whatever the order of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamadv import padded
from streamadv.algorithms import ChainResult, PackedBatch, build_chain, expand, preset_names, run_chain
from streamadv.errors import SettingError
from tests.shares import examples

from .reference import Pair, batch_of, member

Rows = dict[str, Any]


def random_rows(seed: int) -> Rows:
    """Padded rows of ragged groups, each row its own trajectory; the last column is always padding."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, 4)
    rows, width = int(sizes.sum()), int(rng.integers(3, 100))
    lengths = rng.integers(1, width, rows)
    mask = (rng.random((rows, width)) < 0.6) & (np.arange(width) < lengths[:, None])
    rewards = rng.choice([0.0, 1.0, 0.1, -100.0, 100.0], rows)
    tokens = np.zeros((rows, width), np.float32)
    for row in range(rows):
        if mask[row].any():
            tokens[row, np.flatnonzero(mask[row])[-1]] = rewards[row]
    columns = {
        name: rng.normal(size=(rows, width)).astype(np.float32)
        for name in ("values", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    columns["sum_pi_squared"] = rng.random((rows, width)).astype(np.float32)
    labels = np.repeat(np.arange(4), sizes)
    return {
        "mask": mask,
        "tokens": tokens,
        "rewards": rewards,
        "labels": labels,
        "lengths": lengths,
        **columns,
    }


COLUMNS = ("values", "old_log_probs", "rollout_log_probs", "ref_log_probs", "sum_pi_squared")


def packed(rows: Rows) -> PackedBatch:
    """The same rows without padding. A row without trainable tokens has no place for its reward."""
    pairs: list[Pair] = []
    for i, label in enumerate(rows["labels"]):
        end = rows["lengths"][i]
        reward = float(rows["rewards"][i]) if rows["mask"][i].any() else 0.0
        columns = {name: rows[name][i, :end] for name in COLUMNS}
        pairs.append(member(f"g{label}", i, reward, [rows["mask"][i, :end].astype(int).tolist()], **columns))
    return batch_of(pairs)


def unpadded(rows: Rows, values: Tensor) -> Tensor:
    return torch.cat([values[i, : rows["lengths"][i]] for i in range(len(values))])


def by_token(batch: PackedBatch, result: ChainResult) -> tuple[Tensor, Tensor]:
    assert result.advantages is not None
    advantages = expand(batch, result.level, result.advantages)
    if result.returns is None:
        return advantages, advantages
    return advantages, expand(batch, result.level, result.returns)


def outcome(function: Callable[..., Any], **options: Any) -> Callable[[Rows], Any]:
    return lambda z: function(
        torch.from_numpy(z["tokens"]), torch.from_numpy(z["mask"]), z["labels"], **options
    )


def token_baseline(function: Callable[..., Any]) -> Callable[[Rows], Any]:
    return lambda z: function(
        torch.from_numpy(z["tokens"]),
        torch.from_numpy(z["mask"]),
        z["labels"],
        torch.from_numpy(z["old_log_probs"]),
        torch.from_numpy(z["sum_pi_squared"]),
    )


VERL: dict[str, Callable[[Rows], Any]] = {
    "grpo": outcome(padded.compute_grpo_outcome_advantage),
    "dr_grpo": outcome(padded.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
    "rloo": outcome(padded.compute_rloo_outcome_advantage),
    "opo": outcome(padded.compute_opo_outcome_advantage),
    "gpg": outcome(padded.compute_gpg_outcome_advantage),
    "grpo_passk": outcome(padded.compute_grpo_passk_outcome_advantage),
    "reinforce_plus_plus_baseline": outcome(padded.compute_reinforce_plus_plus_baseline_outcome_advantage),
    "maxrl": outcome(padded.compute_maxrl_outcome_advantage, epsilon=0.0),
    "optimal_token_baseline": token_baseline(padded.compute_tir_optimal_token_baseline_advantage),
    "verl/tir_optimal_token_baseline": token_baseline(padded.compute_tir_optimal_token_baseline_advantage),
    "verl/grpo": outcome(padded.compute_grpo_outcome_advantage, peer_quirks="verl"),
    "verl/grpo_vectorized": outcome(padded.compute_grpo_vectorized_outcome_advantage, peer_quirks="verl"),
    "verl-2026-01/grpo_vectorized": outcome(
        padded.compute_grpo_vectorized_outcome_advantage, peer_quirks="verl-2026-01"
    ),
    "verl/rloo": outcome(padded.compute_rloo_outcome_advantage, peer_quirks="verl"),
    "verl/rloo_vectorized": outcome(padded.compute_rloo_outcome_advantage),
    "verl/gpg": outcome(padded.compute_gpg_outcome_advantage, peer_quirks="verl"),
    "verl/reinforce_plus_plus_baseline": outcome(
        padded.compute_reinforce_plus_plus_baseline_outcome_advantage, peer_quirks="verl"
    ),
    "reinforce_plus_plus": lambda z: padded.compute_reinforce_plus_plus_outcome_advantage(
        torch.from_numpy(z["tokens"]), torch.from_numpy(z["mask"])
    ),
    "ppo": lambda z: padded.compute_gae_advantage_return(
        torch.from_numpy(z["tokens"]), torch.from_numpy(z["values"]), torch.from_numpy(z["mask"]), lam=0.95
    ),
}


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(VERL)))
def test_packed_and_padded_agree(seed: int, name: str) -> None:
    rows = random_rows(seed)
    batch = packed(rows)
    got = by_token(batch, run_chain(build_chain(name), batch))
    want = VERL[name](rows)
    for one, other in zip(got, want, strict=True):
        mask = batch.column("response_mask")
        # January's variance from sums of squares in float32: padded repeats it, packed does not.
        rtol, atol = (1e-6, 1e-6) if name == "verl-2026-01/grpo_vectorized" else (2e-7, 1e-7)
        torch.testing.assert_close(one, unpadded(rows, other) * mask, rtol=rtol, atol=atol)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(VERL)))
def test_order_of_rows_and_padding_do_not_matter(seed: int, name: str) -> None:
    rows = random_rows(seed)
    before = VERL[name](rows)
    shuffle = np.random.default_rng(seed).permutation(len(rows["labels"]))
    moved = {key: value[shuffle] for key, value in rows.items()}
    wider = {
        key: np.concatenate([value, np.zeros((len(value), 5), value.dtype)], 1) if value.ndim == 2 else value
        for key, value in moved.items()
    }
    width = rows["mask"].shape[1]
    if name == "grpo_passk":  # a tie goes to the row that comes first
        return
    for one, other in zip(before, VERL[name](wider), strict=True):
        torch.testing.assert_close(one[shuffle], other[:, :width], rtol=2e-7, atol=1e-7)


def of_roll(rows: Rows) -> dict[str, Tensor]:
    """As ROLL has them. Rows end with their last trainable token: behind it ROLL would bootstrap from padding."""
    data = {name: torch.from_numpy(rows[name]) for name in ("values", "old_log_probs", "ref_log_probs")}
    data["response_mask"] = torch.from_numpy(rows["mask"])
    data["response_level_rewards"] = torch.from_numpy(np.where(rows["mask"].any(1), rows["rewards"], 0.0))
    inside = torch.arange(rows["mask"].shape[1]) < torch.from_numpy(rows["lengths"])[:, None]
    return {**data, "values": data["values"] * inside}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["roll/grpo", "roll/reinforce", "roll/gae", "roll/agentic_reinforce"]),
    with_kl=st.booleans(),
)
def test_rolls_order_of_use_is_its_preset(seed: int, name: str, with_kl: bool) -> None:
    rows = random_rows(seed)
    batch = packed(rows)
    estimator = name.removeprefix("roll/")
    config: dict[str, Any] = build_chain(name).config.model_dump()
    if with_kl:
        config["kl"] = {"penalty": "k3", "coefficient": 0.1, "log_probs": "old_log_probs"}
    got = by_token(batch, run_chain(build_chain(config), batch))
    data = of_roll(rows)
    data, _ = padded.reward_postprocess(data, adv_estimator=estimator, index=rows["labels"])
    data, _ = padded.compute_token_reward(data, add_token_level_kl=with_kl, kl_penalty="k3", kl_coef=0.1)
    data, _ = padded.compute_advantage(data, adv_estimator=estimator, peer_quirks="roll")
    mask = batch.column("response_mask")
    torch.testing.assert_close(got[0], unpadded(rows, data["advantages"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], unpadded(rows, data["returns"]) * mask, rtol=1e-5, atol=1e-5)


def turns(rng: np.random.Generator, width: int) -> list[int]:
    """A response of at most `width` tokens: it begins with the policy's, observations lie between its turns."""
    mask: list[int] = []
    while len(mask) < width and (not mask or rng.random() < 0.8):
        mask += [1] * int(rng.integers(1, 6)) + [0] * int(rng.integers(0, 4))
    return mask[:width]


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    prompts=st.sampled_from(["none", "one for the group", "one for each row"]),
    name=st.sampled_from(["optimal_token_baseline", "tir_optimal_token_baseline"]),
    rejected=st.booleans(),
)
def test_token_baselines_compare_responses_whatever_stands_before_them(
    seed: int, prompts: str, name: str, rejected: bool
) -> None:
    """verl's columns count from the response's first token; a rejected token keeps its column."""
    rng = np.random.default_rng(seed)
    width = 24
    labels = np.repeat(np.arange(3), rng.integers(1, 5, 3))
    masks = [turns(rng, width) for _ in labels]
    shape = (len(labels), width)
    mask = np.array([[*row, *[0] * (width - len(row))] for row in masks], np.uint8)
    old, rollout = rng.normal(-1, 1, shape).astype(np.float32), rng.normal(-1, 1, shape).astype(np.float32)
    squares = rng.random(shape).astype(np.float32)
    kept = mask * (np.abs(old - rollout) <= np.log(1.5)) if rejected else mask
    tokens = np.zeros(shape, np.float32)
    pairs: list[Pair] = []
    shared = rng.integers(1, 6, 3)
    lengths = {"none": np.zeros(len(labels), int), "one for the group": shared[labels]}
    before = lengths.get(prompts, rng.integers(1, 6, len(labels)))
    for i, (label, row) in enumerate(zip(labels, masks, strict=True)):
        reward = float(rng.choice([0.0, 1.0, -2.0])) if kept[i].any() else 0.0
        if kept[i].any():
            tokens[i, np.flatnonzero(kept[i])[-1]] = reward
        given = {"old_log_probs": old, "rollout_log_probs": rollout, "sum_pi_squared": squares}
        columns = {
            key: [*rng.normal(size=before[i]), *column[i, : len(row)]] for key, column in given.items()
        }
        pairs.append(member(f"g{label}", i, reward, [[0] * before[i] + row], **columns))
    config: dict[str, Any] = build_chain(f"verl/{name}").config.model_dump()
    if rejected:
        test = {"kind": "token_k1", "upper": 1.5}
        config["correction"] = {"level": None, "rejections": [test], "before_estimator": True}
    batch = batch_of(pairs)
    got = by_token(batch, run_chain(build_chain(config), batch))[0]
    function = getattr(padded, f"compute_{name}_advantage")
    want, _ = function(*map(torch.from_numpy, (tokens, kept)), labels, *map(torch.from_numpy, (old, squares)))
    responses = [torch.cat([torch.zeros(before[i]), want[i, : len(row)]]) for i, row in enumerate(masks)]
    torch.testing.assert_close(got, torch.cat(responses), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("company", [[0, 1, 1, 0], [0, 0, 0, 0]])
def test_columns_are_places_in_the_row_where_nobody_has_a_prompt(company: list[int]) -> None:
    """One row of the group begins with a trainable token; the other has an observation there, or nothing."""
    masks = np.array([[1, 0, 1, 1], company], np.uint8)
    rng = np.random.default_rng(0)
    old, squares = (rng.random((2, 4)).astype(np.float32) for _ in range(2))
    rewards = np.array([[0, 0, 0, 1], [0, 0, 2 * company[2], 0]], np.float32)
    given = [torch.from_numpy(array) for array in (rewards, masks)]
    want, _ = padded.compute_optimal_token_baseline_advantage(
        *given, ["a", "a"], torch.from_numpy(old), torch.from_numpy(squares)
    )
    pairs = [
        member("a", i, float(rewards[i].sum()), [masks[i].tolist()], old_log_probs=old[i], sum_pi_squared=squares[i])
        for i in (0, 1)
    ]  # fmt: skip
    result = run_chain(build_chain("verl/optimal_token_baseline"), batch_of(pairs))
    assert result.advantages is not None
    torch.testing.assert_close(result.advantages, want.reshape(-1), rtol=1e-6, atol=1e-6)


def test_every_preset_builds_and_says_what_it_does() -> None:
    for name in preset_names():
        chain = build_chain(name)
        assert [line.split(".")[0] for line in chain.describe()] == [
            str(number) for number in range(1, len(chain.steps) + 1)
        ]
    assert "grpo" in preset_names()
    with pytest.raises(SettingError, match="verl/nothing' is unknown"):
        build_chain("verl/nothing")


def test_nothing_passed_in_is_changed() -> None:
    rows = random_rows(3)
    data = {
        "response_level_rewards": torch.from_numpy(rows["rewards"]),
        "response_mask": torch.from_numpy(rows["mask"]),
        "old_log_probs": torch.from_numpy(rows["old_log_probs"]),
        "ref_log_probs": torch.from_numpy(rows["ref_log_probs"]),
    }
    before = {name: value.clone() for name, value in data.items()}
    result, _ = padded.reward_postprocess(data, adv_estimator="grpo", index=rows["labels"], reward_clip=0.5)
    result, _ = padded.compute_token_reward(result, add_token_level_kl=True, kl_coef=1.0, reward_clip=0.1)
    result, _ = padded.compute_advantage(
        result, adv_estimator="grpo", whiten_advantages=True, advantage_clip=0.1
    )
    assert data.keys() == before.keys()
    assert all(torch.equal(data[name], before[name]) for name in before)
    assert result["advantages"].abs().max() <= 0.1


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["roll/grpo", "roll/reinforce", "roll/gae", "roll/agentic_reinforce"]),
    limit=st.sampled_from([0.3, 1.0, 5.0]),
    whitened=st.booleans(),
)
def test_rolls_reward_clip_holds_rewards_twice(seed: int, name: str, limit: float, whitened: bool) -> None:
    """ROLL's reward_clip bounds the response's reward before the KL penalty and each token's reward after it."""
    rows = random_rows(seed)
    batch = packed(rows)
    estimator = name.removeprefix("roll/")
    config: dict[str, Any] = build_chain(name).config.model_dump()
    config["reward"]["clip"] = limit
    config["token_reward_clip"] = limit
    config["kl"] = {"penalty": "k1", "coefficient": 1.5, "log_probs": "old_log_probs"}
    config["whiten_rewards"] = whitened
    result = run_chain(build_chain(config), batch)
    data = of_roll(rows)
    data, _ = padded.reward_postprocess(
        data, adv_estimator=estimator, index=rows["labels"], reward_clip=limit
    )
    data, metrics = padded.compute_token_reward(data, add_token_level_kl=True, kl_coef=1.5, reward_clip=limit)
    data, _ = padded.compute_advantage(
        data, adv_estimator=estimator, whiten_rewards=whitened, peer_quirks="roll"
    )
    advantages, returns = by_token(batch, result)
    mask = batch.column("response_mask")
    torch.testing.assert_close(advantages, unpadded(rows, data["advantages"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, unpadded(rows, data["returns"]) * mask, rtol=1e-5, atol=1e-5)
    share = "critic/token_reward_clip_frac"
    if mask.any():
        assert result.metrics[share] == pytest.approx(metrics[share], abs=1e-6)
