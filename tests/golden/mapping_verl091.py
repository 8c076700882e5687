"""The recorded functions of verl 0.9.1 in terms of streamadv's."""

from __future__ import annotations

import functools
from typing import Any

from streamadv import padded
from streamadv.algorithms.quirks import PeerQuirks

from . import mapping_verl as january
from .compare import Function, Inputs
from .mapping_verl import Result, outcome, token_baseline

NOW: PeerQuirks = "verl"


def _now(function: Any) -> Function:
    return functools.partial(function, quirks=NOW)


def _kl_penalty(z: Inputs, kwargs: dict[str, Any]) -> Result:
    log_probs = z["logprob"].requires_grad_()
    kl = padded.approx_kl(log_probs, z["ref_logprob"], kwargs["kl_penalty"])
    kl.sum().backward()
    return {"kl": kl, "grad_logprob": log_probs.grad}


VERL091: dict[str, Function] = {
    "verl091_adv_gae": _now(january.gae),
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
    "verl091_kl_penalty": _kl_penalty,
    "verl091_rollout_correction_and_rejection": _now(january.correction),
}
