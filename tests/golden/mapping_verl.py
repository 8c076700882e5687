"""verl's recorded functions in terms of streamadv's."""

from __future__ import annotations

from typing import Any

from streamadv import padded
from streamadv.algorithms.kl import approx_kl

from .compare import Function, Inputs

Result = dict[str, Any]


def _options(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of `names` that the call gave, as arguments or as fields of verl's config."""
    plain = {name.removeprefix("config."): value for name, value in kwargs.items()}
    return {name: plain[name] for name in names if name in plain}


def _pair(pair: tuple[Any, Any]) -> Result:
    return {"advantages": pair[0], "returns": pair[1]}


def _outcome(function: Any, *names: str, **fixed: Any) -> Function:
    def call(z: Inputs, kwargs: dict[str, Any]) -> Result:
        options = _options(kwargs, *names)
        return _pair(function(z["token_level_rewards"], z["response_mask"], z["index"], **options, **fixed))

    return call


def _gae(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = _options(kwargs, "gamma", "lam")
    return _pair(
        padded.compute_gae_advantage_return(
            z["token_level_rewards"], z["values"], z["response_mask"], **options, peer_quirks="verl"
        )
    )


def _reinforce_plus_plus(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return _pair(
        padded.compute_reinforce_plus_plus_outcome_advantage(
            z["token_level_rewards"], z["response_mask"], **_options(kwargs, "gamma"), peer_quirks="verl"
        )
    )


def _remax(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return _pair(
        padded.compute_remax_outcome_advantage(
            z["token_level_rewards"], z["reward_baselines"], z["response_mask"], peer_quirks="verl"
        )
    )


def _token_baseline(function: Any) -> Function:
    def call(z: Inputs, kwargs: dict[str, Any]) -> Result:
        return _pair(
            function(
                z["token_level_rewards"],
                z["response_mask"],
                z["index"],
                z["old_log_probs"],
                z["sum_pi_squared"],
                z["rollout_is_weights"] if kwargs["rollout_is_weights"] else None,
                kwargs["handle_zero_tail"],
            )
        )

    return call


def _kl_penalty(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return {"kl": approx_kl(z["logprob"], z["ref_logprob"], kwargs["kl_penalty"])}


VERL: dict[str, Function] = {
    "verl_adv_gae": _gae,
    "verl_adv_gpg": _outcome(padded.compute_gpg_outcome_advantage, "f_norm", peer_quirks="verl"),
    "verl_adv_grpo": _outcome(
        padded.compute_grpo_outcome_advantage, "epsilon", "norm_adv_by_std_in_grpo", peer_quirks="verl"
    ),
    "verl_adv_grpo_passk": _outcome(
        padded.compute_grpo_passk_outcome_advantage, "epsilon", "norm_adv_by_std_in_grpo"
    ),
    "verl_adv_grpo_vectorized": _outcome(
        padded.compute_grpo_vectorized_outcome_advantage,
        "epsilon",
        "norm_adv_by_std_in_grpo",
        peer_quirks="verl",
    ),
    "verl_adv_opo": _outcome(padded.compute_opo_outcome_advantage, peer_quirks="verl"),
    "verl_adv_optimal_token_baseline": _token_baseline(padded.compute_optimal_token_baseline_advantage),
    "verl_adv_reinforce_plus_plus": _reinforce_plus_plus,
    "verl_adv_reinforce_plus_plus_baseline": _outcome(
        padded.compute_reinforce_plus_plus_baseline_outcome_advantage, peer_quirks="verl"
    ),
    "verl_adv_remax": _remax,
    "verl_adv_rloo": _outcome(padded.compute_rloo_outcome_advantage, peer_quirks="verl"),
    "verl_adv_rloo_vectorized": _outcome(padded.compute_rloo_outcome_advantage),
    "verl_adv_tir_optimal_token_baseline": _token_baseline(
        padded.compute_tir_optimal_token_baseline_advantage
    ),
    "verl_kl_penalty": _kl_penalty,
}
