"""The recorded functions of verl 0.9.1 in terms of streamadv's."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch

from streamadv import padded
from streamadv.algorithms.arguments import PeerQuirks
from streamadv.errors import ArgumentError

from . import mapping_verl as january
from .compare import Function, Inputs
from .mapping_verl import Result, both, options_of, outcome, token_baseline

NOW: PeerQuirks = "verl"


def _now(function: Any) -> Function:
    return functools.partial(function, quirks=NOW)


def _kl_penalty(z: Inputs, kwargs: dict[str, Any]) -> Result:
    log_probs = z["logprob"].requires_grad_()
    kl = padded.approx_kl(log_probs, z["ref_logprob"], kwargs["kl_penalty"])
    kl.sum().backward()
    return {"kl": kl, "grad_logprob": log_probs.grad}


def _gdpo(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = options_of(
        {name: value for name, value in kwargs.items() if "." not in name},
        "epsilon",
        "norm_adv_by_std_in_grpo",
    )
    if kwargs.get("components"):
        options["config"] = {
            name.removeprefix("config."): value
            for name, value in kwargs.items()
            if name.startswith("config.")
        }
        options["non_tensor_batch"] = {
            name: values.numpy() for name, values in z.items() if name.endswith("_reward")
        }
    return both(
        padded.compute_gdpo_outcome_advantage(
            z["token_level_rewards"], z["response_mask"], z["index"], **options, peer_quirks=NOW
        )
    )


def _multi_trajectories(z: Inputs, kwargs: dict[str, Any]) -> Result:
    prompts, sessions, numbers = zip(*(key.rsplit("_", 2) for key in z["batch_keys"]), strict=True)
    return both(
        padded.compute_multi_trajectory_grpo_advantage(
            z["token_level_rewards"],
            z["response_mask"],
            prompts,
            sessions,
            torch.tensor([int(number) for number in numbers]),
            **options_of(kwargs, "epsilon", "norm_adv_by_std_in_grpo"),
            peer_quirks=NOW,
        )
    )


def _filter_groups(z: Inputs, kwargs: dict[str, Any]) -> Result:
    rows = {"reward": z["rm_scores"].sum(1), "acc": z["acc"]}
    metric = None if kwargs.get("partition_id") == "val" else kwargs["metric"]
    if metric is not None and metric not in rows:
        raise ArgumentError(f"no metric {metric}")
    values = rows.get(metric, rows["reward"])
    keep = padded.dapo_filter_groups(values, z["index"]) if metric else torch.ones(len(values))
    groups = zip(z["index"], values.tolist(), keep.tolist(), strict=True)
    counts = Counter(value for _, value in {(group, value) for group, value, stays in groups if not stays})
    return {
        "keep": keep,
        "shared_values": sorted(counts),
        "shared_counts": [counts[v] for v in sorted(counts)],
    }


def _overlong(z: Inputs, kwargs: dict[str, Any]) -> Result:
    rewards = z["scores"]
    if kwargs.get("enable", True):
        rewards = padded.overlong_penalty(
            rewards,
            z["response_attention"].sum(1),
            max_length=kwargs["max_resp_len"],
            buffer=kwargs["len"],
            factor=kwargs["penalty_factor"],
            capped=False,
        )
    penalty = rewards - z["scores"]
    return {"reward": rewards, "overlong_reward": penalty, "overlong": penalty < 0}


def _pf_ppo(z: Inputs, kwargs: dict[str, Any]) -> Result:
    scores = z["token_level_scores"].sum(1)
    options = options_of(kwargs, "reweight_method", "weight_pow")
    weights = padded.pf_ppo_weights(scores, **options)
    generator = torch.Generator().manual_seed(kwargs["torch_seed"])
    drawn = torch.multinomial(weights, len(scores), replacement=True, generator=generator)
    return {
        "weights": weights,
        "sample_indices": drawn,
        "advantages": z["advantages"][drawn],
        "uid": [z["uid"][row] for row in drawn.tolist()],
        "per_row": drawn,
    }


VERL091: dict[str, Function] = {
    "verl091_adv_gae": _now(january.gae),
    "verl091_adv_gdpo": _gdpo,
    "verl091_adv_gpg": outcome(padded.compute_gpg_outcome_advantage, "f_norm", peer_quirks=NOW),
    "verl091_adv_grpo": outcome(
        padded.compute_grpo_outcome_advantage, "epsilon", "norm_adv_by_std_in_grpo", peer_quirks=NOW
    ),
    "verl091_adv_grpo_passk": january.passk,
    "verl091_adv_grpo_vectorized": outcome(
        padded.compute_grpo_vectorized_outcome_advantage,
        "epsilon",
        "norm_adv_by_std_in_grpo",
        peer_quirks=NOW,
    ),
    "verl091_adv_multi_trajectories": _multi_trajectories,
    "verl091_adv_opo": outcome(padded.compute_opo_outcome_advantage, peer_quirks=NOW),
    "verl091_adv_optimal_token_baseline": token_baseline(
        padded.compute_optimal_token_baseline_advantage, NOW
    ),
    "verl091_adv_reinforce_plus_plus": _now(january.reinforce_plus_plus),
    "verl091_adv_reinforce_plus_plus_baseline": outcome(
        padded.compute_reinforce_plus_plus_baseline_outcome_advantage, peer_quirks=NOW
    ),
    "verl091_adv_remax": _now(january.remax),
    "verl091_adv_rloo": outcome(padded.compute_rloo_outcome_advantage, peer_quirks=NOW),
    "verl091_adv_rloo_vectorized": outcome(padded.compute_rloo_outcome_advantage),
    "verl091_adv_tir_optimal_token_baseline": token_baseline(
        padded.compute_tir_optimal_token_baseline_advantage, NOW
    ),
    "verl091_apply_kl_penalty": _now(january.apply_kl_penalty),
    "verl091_compute_rollout_correction_weights": _now(january.weights),
    "verl091_compute_rollout_rejection_mask": _now(january.rejection),
    "verl091_dapo_filter_groups": _filter_groups,
    "verl091_dapo_overlong_reward": _overlong,
    "verl091_kl_penalty": _kl_penalty,
    "verl091_pf_ppo_reweight": _pf_ppo,
    "verl091_rollout_correction_and_rejection": _now(january.correction),
}
