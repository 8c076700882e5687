"""Every preset of a peer, as a chain, against the padded functions called in that peer's order.

The golden vectors hold the padded functions to the peers' recorded calls, and `tests/integrations/verl/test_presets.py`
holds the order to verl itself. Rewards of estimators of tokens stand on the last token that is left: the peers lose a
reward whose token was rejected, a chain credits it to the action before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamadv import padded
from streamadv.algorithms import build_chain, expand, preset_names, run_chain
from streamadv.algorithms.chain.sources import split_by_source
from streamadv.algorithms.packing import pack_trajectories
from streamadv.errors import SettingError
from streamadv.trajectory.schema import Step
from tests.shares import examples

from .reference import batch_of, member

WIDTH = 9
KL = {"penalty": "k3", "coefficient": 0.3, "log_probs": "old_log_probs"}
CORRECTION = {"level": "token", "upper": 1.5, "rejections": [{"kind": "token_k1", "upper": 1.6}]}
COLUMNS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values", "sum_pi_squared")
Rows = dict[str, Any]


def by_verl(
    function: str, *columns: str, **options: Any
) -> Callable[[Rows, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A padded estimator of rows `z`, token rewards and the mask that is left, with verl's arguments."""
    estimate = getattr(padded, function)

    def call(z: Rows, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = estimate(rewards, *(z[name] for name in columns), mask, **options)
        return result

    def grouped(z: Rows, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        given = [z[name] for name in columns if name != "labels"]
        result: tuple[Tensor, Tensor] = estimate(rewards, mask, z["labels"], *given, **options)
        return result

    return grouped if "labels" in columns else call


OUTCOME = "compute_{}_outcome_advantage"
BASELINE = "compute_{}_advantage"
VERL = {
    "dr_grpo": by_verl(OUTCOME.format("grpo"), "labels", norm_adv_by_std_in_grpo=False, peer_quirks="verl"),
    "gae": by_verl("compute_gae_advantage_return", "values"),
    "gpg": by_verl(OUTCOME.format("gpg"), "labels", peer_quirks="verl"),
    "grpo": by_verl(OUTCOME.format("grpo"), "labels", peer_quirks="verl"),
    "grpo_passk": by_verl(OUTCOME.format("grpo_passk"), "labels"),
    "grpo_vectorized": by_verl(OUTCOME.format("grpo_vectorized"), "labels", peer_quirks="verl"),
    "opo": by_verl(OUTCOME.format("opo"), "labels", peer_quirks="verl"),
    "optimal_token_baseline": by_verl(
        BASELINE.format("optimal_token_baseline"), "labels", "old_log_probs", "sum_pi_squared"
    ),
    "reinforce_plus_plus": by_verl(OUTCOME.format("reinforce_plus_plus")),
    "reinforce_plus_plus_baseline": by_verl(
        OUTCOME.format("reinforce_plus_plus_baseline"), "labels", peer_quirks="verl"
    ),
    "remax": by_verl(OUTCOME.format("remax"), "baselines"),
    "rloo": by_verl(OUTCOME.format("rloo"), "labels", peer_quirks="verl"),
    "rloo_vectorized": by_verl(OUTCOME.format("rloo"), "labels"),
    "tir_optimal_token_baseline": by_verl(
        BASELINE.format("tir_optimal_token_baseline"), "labels", "old_log_probs", "sum_pi_squared"
    ),
}
WEIGHTED = {"optimal_token_baseline", "tir_optimal_token_baseline"}
BY_TOKEN = {"gae", "reinforce_plus_plus", "remax", *WEIGHTED}


def drawn(seed: int) -> Rows:
    """Responses of groups of 2 to 4, without prompts, some with observations; log-probs near enough to keep some."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(3), rng.integers(2, 5, 3))
    shape = (len(labels), WIDTH)
    mask = np.ones(shape, np.int64)
    mask[:, 3:5] = rng.random((shape[0], 1)) < 0.5
    mask *= np.arange(WIDTH) < rng.integers(3, WIDTH + 1, shape[0])[:, None]
    old = rng.normal(-1, 0.4, shape)
    numbers = {
        "old_log_probs": old,
        "rollout_log_probs": old + rng.normal(0, 0.4, shape),
        "ref_log_probs": old + rng.normal(0, 0.5, shape),
        "values": rng.normal(size=shape),
        "sum_pi_squared": rng.random(shape),
    }
    columns = {name: torch.from_numpy(values.astype(np.float32)) for name, values in numbers.items()}
    rewards, baselines = (rng.choice([0.0, 1.0, 0.5], shape[0]) for _ in range(2))
    baselines = np.array([baselines[labels == label][0] for label in labels])
    return {
        "mask": torch.from_numpy(mask),
        "labels": labels,
        "rewards": rewards,
        "baselines": torch.from_numpy(baselines).float(),
        **columns,
    }


def placed(rewards: Any, mask: Tensor) -> Tensor:
    """[B, T]: `rewards` on the last token of `mask`; a row without any has it on token 0, where only sums see it."""
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    return torch.zeros(mask.shape).scatter(
        1, last[:, None], torch.as_tensor(rewards, dtype=torch.float32)[:, None]
    )


def corrected(z: Rows) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    weights, mask, metrics = padded.compute_rollout_correction_and_rejection_mask(
        z["old_log_probs"], z["rollout_log_probs"], z["mask"], "token", 1.5, rollout_rs="token_k1",
        rollout_rs_threshold=1.6, peer_quirks="verl",
    )  # fmt: skip
    return weights, mask, dict(metrics)


def chain_config(name: str, **sections: Any) -> dict[str, Any]:
    return {**build_chain(name).config.model_dump(), **sections}


def packed(z: Rows, with_baselines: bool) -> Any:
    pairs = []
    for i, label in enumerate(z["labels"]):
        columns = {name: z[name][i].numpy() for name in COLUMNS}
        pairs.append(member(f"g{label}", i, float(z["rewards"][i]), [z["mask"][i].tolist()], **columns))
        is_last = i + 1 == len(z["labels"]) or z["labels"][i + 1] != label
        if with_baselines and is_last:
            reward = float(z["baselines"][i])
            pairs.append(member(f"g{label}", 100, reward, [z["mask"][i].tolist()], (), True, **columns))
    return batch_of(pairs)


@pytest.mark.parametrize("name", VERL)
@pytest.mark.parametrize(
    ("kl", "correction"),
    [
        (None, None),
        (KL, CORRECTION),
        pytest.param(KL, None, marks=pytest.mark.release),
        pytest.param(None, CORRECTION, marks=pytest.mark.release),
    ],
)
def test_verl(name: str, kl: Any, correction: Any) -> None:
    for seed in range(examples(12)):
        z = drawn(seed)
        weights, mask, metrics = corrected(z) if correction else (None, z["mask"], {})
        rewards = placed(z["rewards"], mask if name in BY_TOKEN else z["mask"])
        if kl:
            rewards, kl_metrics = padded.apply_kl_penalty(
                rewards, z["mask"], z["old_log_probs"], z["ref_log_probs"], kl_penalty="k3", kl_coef=0.3
            )
            metrics |= {"critic/kl": kl_metrics["critic/kl"]}
        if name in BY_TOKEN:
            rewards = rewards * mask
        if name in WEIGHTED and weights is not None:
            advantages, returns = getattr(padded, BASELINE.format(name))(
                rewards,
                mask,
                z["labels"],
                z["old_log_probs"],
                z["sum_pi_squared"],
                rollout_is_weights=weights,
            )
        else:
            advantages, returns = VERL[name](z, rewards, mask)
        batch = packed(z, name == "remax")
        result = run_chain(build_chain(chain_config(f"verl/{name}", kl=kl, correction=correction)), batch)
        assert result.advantages is not None
        if correction:
            batch = replace(batch, columns={**batch.columns, **result.columns})
        own = (~batch.baseline)[batch.row_trajectory]

        def rows_of(values: Tensor, batch: Any = batch, own: Tensor = own) -> Tensor:
            return values.reshape(-1, WIDTH)[own]

        assert torch.equal(rows_of(batch.column("response_mask")), mask.to(torch.uint8))
        if weights is not None:
            torch.testing.assert_close(rows_of(batch.column("rollout_is_weights")), weights)
        got = rows_of(expand(batch, result.level, result.advantages))
        torch.testing.assert_close(got, advantages * mask, rtol=1e-4, atol=2e-5)
        if result.returns is not None:
            got = rows_of(expand(batch, result.level, result.returns))
            torch.testing.assert_close(got, returns * mask, rtol=1e-4, atol=2e-5)
        for metric, value in metrics.items():
            assert result.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


def test_verl_charges_sessions_of_several_rows_the_kl_of_the_last() -> None:
    """`compute_advantage_for_multi_trajectories`: the last row stands for its session."""
    z = drawn(3)
    sessions = [f"{label}-{i // 2}" for i, label in enumerate(z["labels"])]
    pairs, at = [], 0
    while at < len(sessions):
        rows = [i for i in range(at, len(sessions)) if sessions[i] == sessions[at]]
        columns = {name: torch.cat([z[name][i] for i in rows]).numpy() for name in COLUMNS}
        masks = [z["mask"][i].tolist() for i in rows]
        pairs.append(member(f"g{z['labels'][at]}", at, float(z["rewards"][rows[-1]]), masks, **columns))
        at = rows[-1] + 1
    batch = batch_of(pairs)
    result = run_chain(build_chain(chain_config("verl/grpo", kl=KL)), batch)
    rewards, _ = padded.apply_kl_penalty(
        placed(z["rewards"], z["mask"]),
        z["mask"],
        z["old_log_probs"],
        z["ref_log_probs"],
        kl_penalty="k3",
        kl_coef=0.3,
    )
    advantages, _ = padded.compute_multi_trajectory_grpo_advantage(
        rewards, z["mask"], z["labels"], sessions, torch.arange(len(sessions)), peer_quirks="verl"
    )
    assert result.advantages is not None
    got = expand(batch, result.level, result.advantages).reshape(-1, WIDTH)
    torch.testing.assert_close(got, advantages * z["mask"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["verl/gae", "verl/gpg", "verl/reinforce_plus_plus_baseline", "trl/grpo_batch"]
)
def test_sources_are_batches_of_their_own(name: str) -> None:
    """by_source: what a preset takes over the batch it takes over the groups of one source, KL and rejection too."""
    batch = replace(packed(drawn(5), False), group_sources=["math", "code", "math"])
    config = chain_config(name, kl=KL, correction=CORRECTION)
    if name == "verl/gae":
        config["advantage_clip"] = 1.5
    together = run_chain(build_chain({**config, "by_source": True}), batch)
    assert together.advantages is not None
    for source, part in split_by_source(batch):
        alone = run_chain(build_chain(config), part.batch)
        assert alone.advantages is not None
        assert torch.equal(together.advantages[part.indices[together.level]], alone.advantages)
        assert together.metrics[f"{source}/critic/kl"] == alone.metrics["critic/kl"]


def test_an_order_can_be_left() -> None:
    after = {**CORRECTION, "before_estimator": False}
    steps = [step.name for step in build_chain(chain_config("verl/grpo", correction=after)).steps]
    assert steps.index("correction") > steps.index("estimator")
    steps = [step.name for step in build_chain({"correction": CORRECTION}).steps]
    assert steps.index("correction") > steps.index("estimator")


def test_a_preset_takes_more_fields() -> None:
    chain = build_chain({"preset": "verl/grpo", "kl": {"coefficient": 0.2}, "epsilon": 1e-4})
    assert chain.config == build_chain(chain_config("verl/grpo", kl={"coefficient": 0.2}, options={
        "singleton": "raw", "epsilon": 1e-4
    })).config  # fmt: skip
    with pytest.raises(SettingError, match="preset 'verl/gpro' is unknown: did you mean verl/grpo"):
        build_chain({"preset": "verl/gpro"})


def test_several_teachers_are_rolls_sum() -> None:
    z = drawn(1)
    pairs = []
    for i, label in enumerate(z["labels"]):
        columns = {"rollout_log_probs": z["rollout_log_probs"][i], "teacher_log_probs_a": z["ref_log_probs"][i],
                   "teacher_log_probs_b": z["old_log_probs"][i]}  # fmt: skip
        pairs.append(member(f"g{label}", i, float(z["rewards"][i]), [z["mask"][i].tolist()], **columns))
    distill = {"teachers": {"a": 0.5, "b": 2.0}, "penalty": "k3"}
    found = run_chain(build_chain({"preset": "roll/reinforce", "distill": distill}), batch_of(pairs))
    rewards = {"token_level_rewards": placed(z["rewards"], z["mask"]), "response_mask": z["mask"]}
    teachers = {"teacher_log_probs_a": z["ref_log_probs"], "teacher_log_probs_b": z["old_log_probs"]}
    want, _ = padded.compute_advantage(
        {**rewards, **teachers, "rollout_log_probs": z["rollout_log_probs"]}, adv_estimator="reinforce",
        distill_teachers={"a": 0.5, "b": 2.0}, distill_penalty="k3", peer_quirks="roll",
        **{"distill_from": "rollout_log_probs"},
    )  # fmt: skip
    assert found.advantages is not None
    torch.testing.assert_close(
        found.advantages.reshape(-1, WIDTH), want["advantages"] * z["mask"], rtol=1e-5, atol=1e-6
    )
    with pytest.raises(SettingError, match=r"distill\.coefficient does nothing beside distill.teachers"):
        build_chain({"distill": {**distill, "coefficient": 0.3}})


STEP_TOKENS = 3


@pytest.mark.parametrize("name", ["gigpo", "step_reinforce"])
@pytest.mark.parametrize("kl", [None, KL])
@pytest.mark.parametrize("finish", [{}, {"whiten_advantages": True, "advantage_clip": 0.8}])
def test_roll_steps(name: str, kl: Any, finish: Any) -> None:
    """ROLL's rows are steps: it normalises and discounts their rewards, then takes the KL off their tokens."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 4, 6)  # steps of each of three groups' two trajectories
        trajectory = np.repeat(np.arange(6), lengths)
        group = trajectory // 2
        episode, scores = rng.choice([0.0, 1.0], 6), rng.choice([0.0, 0.5, 1.0], len(trajectory))
        states = [f"{group[i]}-{rng.integers(2)}" for i in range(len(trajectory))]
        shape = (len(trajectory), STEP_TOKENS)
        old = torch.from_numpy(rng.normal(-1, 0.5, shape).astype(np.float32))
        ref = old + torch.from_numpy(rng.normal(0, 0.6, shape).astype(np.float32))
        pairs = []
        for number in range(6):
            own = np.flatnonzero(trajectory == number)
            spans = [
                Step(
                    start=k * STEP_TOKENS,
                    end=(k + 1) * STEP_TOKENS,
                    reward=float(scores[i]),
                    state_key=states[i],
                )
                for k, i in enumerate(own)
            ]
            columns = {
                "old_log_probs": old[own].reshape(-1).numpy(),
                "ref_log_probs": ref[own].reshape(-1).numpy(),
            }
            masks = [[1] * (STEP_TOKENS * len(own))]
            pairs.append(member(f"g{number // 2}", number, float(episode[number]), masks, spans, **columns))
        result = run_chain(
            build_chain(chain_config(f"roll/{name}", kl=kl, **finish)), batch := batch_of(pairs)
        )
        returns = padded.compute_discounted_returns(
            torch.from_numpy(scores), trajectory.tolist(), torch.arange(len(trajectory)).double(), 0.95
        )
        rewards = {"step_rewards": returns, "episode_scores": torch.from_numpy(episode[trajectory])}
        norms = dict.fromkeys(
            ["norm_mean_type", "norm_std_type", "step_norm_mean_type", "step_norm_std_type"], "group"
        )
        data, _ = padded.compute_response_level_rewards(
            rewards, adv_estimator=name, **({} if name == "step_reinforce" else norms),
            traj_group_id=group.tolist(), state_hash=states,
        )  # fmt: skip
        data |= {"response_mask": torch.ones(shape), "old_log_probs": old, "ref_log_probs": ref}
        data, metrics = padded.compute_token_reward(
            data, add_token_level_kl=kl is not None, kl_penalty="k3", kl_coef=0.3
        )
        data, _ = padded.compute_advantage(data, adv_estimator=name, peer_quirks="roll", **finish)
        assert result.advantages is not None
        got = expand(batch, result.level, result.advantages).reshape(shape)
        torch.testing.assert_close(got, data["advantages"], rtol=1e-4, atol=1e-5)
        if result.returns is not None and name == "gigpo":
            got = expand(batch, result.level, result.returns).reshape(shape)
            torch.testing.assert_close(got, data["returns"], rtol=1e-4, atol=1e-5)
        if kl:
            assert result.metrics["critic/kl"] == pytest.approx(metrics["critic/kl"], rel=1e-5)


def test_an_empty_batch_has_no_advantages() -> None:
    for name in ("ppo", "vtrace", "step_rloo", *(name for name in preset_names() if "/" in name)):
        chain = build_chain(name)
        result = run_chain(chain, pack_trajectories([], names=("response_mask", *chain.needs)))
        assert result.advantages is not None
        assert len(result.advantages) == 0, name
