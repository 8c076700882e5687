"""Presets `verl/<name>` and losses against verl's own functions, called in the order of its trainers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from streamadv import losses
from streamadv.algorithms import build_chain, expand, run_chain
from tests.unit.algorithms.test_peer_order import (
    BY_TOKEN,
    CORRECTION,
    KL,
    VERL,
    WEIGHTED,
    WIDTH,
    chain_config,
    drawn,
    packed,
    placed,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def of_verl(name: str, z: dict[str, Any], kl: bool, correction: bool) -> tuple[Any, Any, dict[str, float]]:
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    mask, weights, metrics = z["mask"], None, {}
    if correction:
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            z["old_log_probs"], z["rollout_log_probs"], z["mask"], rollout_is="token", rollout_is_threshold=1.5,
            rollout_rs="token_k1", rollout_rs_threshold="1.6",
        )  # fmt: skip
        weights = weights.batch["rollout_is_weights"] if hasattr(weights, "batch") else weights
    scores = placed(z["rewards"], mask if name in BY_TOKEN else z["mask"])
    tensors = {
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "response_mask": z["mask"],
        "old_log_probs": z["old_log_probs"],
        "ref_log_prob": z["ref_log_probs"],
        "values": z["values"],
        "sum_pi_squared": z["sum_pi_squared"],
    }
    if name == "remax":
        tensors["reward_baselines"] = z["baselines"]
    uid = np.array([str(label) for label in z["labels"]], dtype=object)
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
    if kl:
        data, kl_metrics = apply_kl_penalty(data, core_algos.FixedKLController(0.3), "low_var_kl")
        metrics = {**metrics, "critic/kl": kl_metrics["actor/reward_kl_penalty"]}
    data.batch["response_mask"] = mask
    if weights is not None and name in WEIGHTED:
        data.batch["rollout_is_weights"] = weights
    data = compute_advantage(
        data, "grpo" if name == "dr_grpo" else name, gamma=1.0, lam=1.0,
        norm_adv_by_std_in_grpo=name != "dr_grpo", config=AlgoConfig(),
    )  # fmt: skip
    return data.batch["advantages"] * mask, data.batch["returns"] * mask, metrics


@pytest.mark.parametrize("name", VERL)
@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_presets(name: str, with_kl: bool, corrected: bool) -> None:
    for seed in range(100, 130):
        z = drawn(seed)
        advantages, returns, metrics = of_verl(name, z, with_kl, corrected)
        batch = packed(z, name == "remax")
        sections = {"kl": KL if with_kl else None, "correction": CORRECTION if corrected else None}
        result = run_chain(build_chain(chain_config(f"verl/{name}", **sections)), batch)
        assert result.advantages is not None
        if corrected:
            batch = replace(batch, columns={**batch.columns, **result.columns})
        own = (~batch.baseline)[batch.row_trajectory]
        got = expand(batch, result.level, result.advantages).reshape(-1, WIDTH)[own]
        finite = ~advantages.isnan()  # OPO's of a group without tokens
        torch.testing.assert_close(got[finite], advantages[finite], rtol=1e-4, atol=5e-5)
        if result.returns is not None:
            got = expand(batch, result.level, result.returns).reshape(-1, WIDTH)[own]
            torch.testing.assert_close(got[finite], returns[finite], rtol=1e-4, atol=5e-5)
        has_tokens = bool((z["mask"].sum(1) > 0).all())
        for metric, value in metrics.items():
            if has_tokens and metric in result.metrics:
                assert result.metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric


@pytest.mark.parametrize("name", ["sapo", "geo_mean", "dppo_tv", "dppo_kl", "cispo", "kl_cov", "dro", "gspo"])
def test_losses(name: str) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    object.__setattr__(config.policy_loss, "dro_beta", 0.3)
    functions = {
        "sapo": (losses.sapo, {}), "geo_mean": (losses.gmpo, {"clip_low": 0.2, "clip_high": 0.2}),
        "dppo_tv": (losses.dppo, {"ratio_bound": 3.0}),
        "dppo_kl": (losses.dppo, {"divergence": "kl", "ratio_bound": 3.0}),
        "cispo": (losses.cispo, {}), "kl_cov": (losses.kl_cov, {}), "dro": (losses.dro, {"beta": 0.3}),
        "gspo": (losses.gspo, {"clip_low": 0.2, "clip_high": 0.2}),
    }  # fmt: skip
    function, options = functions[name]
    for seed in range(20):
        z = drawn(seed)
        generator = torch.Generator().manual_seed(seed)
        advantages = torch.randn(len(z["mask"]), 1, generator=generator).expand(z["mask"].shape)
        found = []
        for peer in (True, False):
            log_probs = z["old_log_probs"].clone().requires_grad_()
            arguments = (z["rollout_log_probs"], log_probs, advantages, z["mask"])
            if peer:
                loss, _ = get_policy_loss_fn(name)(
                    *arguments, loss_agg_mode="seq-mean-token-mean", config=config
                )
            else:
                tokens, _ = function(log_probs, z["rollout_log_probs"], advantages, z["mask"], **options)
                loss = losses.aggregate(tokens, z["mask"], "seq-mean-token-mean")
            loss.backward()
            assert log_probs.grad is not None
            found.append((loss.detach(), log_probs.grad))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
