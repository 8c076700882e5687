"""verl's recorded functions, as of January 2026, in terms of streamadv's."""

from __future__ import annotations

from typing import Any, Final

from streamadv import padded
from streamadv.algorithms.arguments import PeerQuirks

from .compare import Function, Inputs

Result = dict[str, Any]

JANUARY: Final[PeerQuirks] = "verl-2026-01"


def options_of(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of `names` that the call gave, as arguments or as fields of verl's config."""
    plain = {name.removeprefix("config."): value for name, value in kwargs.items()}
    return {name: plain[name] for name in names if name in plain}


def _without(kwargs: dict[str, Any], z: Inputs) -> dict[str, Any]:
    """The options of a rollout correction: what is no input."""
    return {name: value for name, value in kwargs.items() if name.startswith("rollout_") and name not in z}


def both(pair: tuple[Any, Any]) -> Result:
    return {"advantages": pair[0], "returns": pair[1]}


def outcome(function: Any, *names: str, **fixed: Any) -> Function:
    def call(z: Inputs, kwargs: dict[str, Any]) -> Result:
        options = options_of(kwargs, *names)
        return both(function(z["token_level_rewards"], z["response_mask"], z["index"], **options, **fixed))

    return call


def gae(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    options = options_of(kwargs, "gamma", "lam")
    return both(
        padded.compute_gae_advantage_return(
            z["token_level_rewards"], z["values"], z["response_mask"], **options, peer_quirks=quirks
        )
    )


def reinforce_plus_plus(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    return both(
        padded.compute_reinforce_plus_plus_outcome_advantage(
            z["token_level_rewards"], z["response_mask"], **options_of(kwargs, "gamma"), peer_quirks=quirks
        )
    )


def remax(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    return both(
        padded.compute_remax_outcome_advantage(
            z["token_level_rewards"], z["reward_baselines"], z["response_mask"], peer_quirks=quirks
        )
    )


def passk(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    # verl takes the norm from its config and ignores the argument of that name.
    options = options_of(
        {name: value for name, value in kwargs.items() if "." in name}, "norm_adv_by_std_in_grpo"
    )
    options |= options_of(kwargs, "epsilon")
    return both(
        padded.compute_grpo_passk_outcome_advantage(
            z["token_level_rewards"], z["response_mask"], z["index"], **options
        )
    )


def token_baseline(function: Any, quirks: PeerQuirks = JANUARY) -> Function:
    def call(z: Inputs, kwargs: dict[str, Any]) -> Result:
        return both(
            function(
                z["token_level_rewards"],
                z["response_mask"],
                z["index"],
                z["old_log_probs"],
                z["sum_pi_squared"],
                z["rollout_is_weights"] if kwargs.get("rollout_is_weights") else None,
                **options_of(kwargs, "handle_zero_tail", "epsilon"),
                peer_quirks=quirks,
            )
        )

    return call


def coefficients(
    z: Inputs, first: float, kind: str | None, target: float, horizon: float, quirks: PeerQuirks = JANUARY
) -> list[float]:
    """The KL coefficient after each of the recorded batches."""
    values = []
    for kl, steps in zip(z["current_kl"].tolist(), z["n_steps"].tolist(), strict=True):
        if kind != "fixed":
            first = padded.adapted_coefficient(first, kl, target, horizon, steps, peer_quirks=quirks)
        values.append(first)
    return values


def kl_penalty(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    return {"kl": padded.approx_kl(z["logprob"], z["ref_logprob"], kwargs["kl_penalty"])}


def controller(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    return {
        "values": coefficients(
            z, kwargs["kl_coef"], kwargs.get("type"), kwargs["target_kl"], kwargs["horizon"]
        )
    }


def apply_kl_penalty(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    control = kwargs["controller"]
    first = control.get("init_kl_coef", control.get("kl_coef"))
    rewards, metrics = padded.apply_kl_penalty(
        z["token_level_scores"],
        z["response_mask"],
        z["old_log_probs"],
        z["ref_log_prob"],
        kl_penalty=kwargs["kl_penalty"],
        kl_coef=first,
        peer_quirks=quirks,
    )
    after = first
    if control.get("type") != "fixed":
        after = padded.adapted_coefficient(
            first,
            metrics["critic/kl"],
            control["target_kl"],
            control["horizon"],
            len(rewards),
            peer_quirks=quirks,
        )
    named = {
        "actor/reward_kl_penalty": metrics["critic/kl"],
        "actor/reward_kl_penalty_coeff": metrics["critic/kl_coef"],
    }
    return {"token_level_rewards": rewards, "kl_coef_after": after, "metrics": named}


def weights(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    weights, metrics = padded.compute_rollout_correction_weights(
        z["log_ratio"], z["response_mask"], **_without(kwargs, z), peer_quirks=quirks
    )
    return {"weights": weights, "metrics": metrics}


def rejection(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    mask, metrics = padded.compute_rollout_rejection_mask(
        z["log_ratio"], z["response_mask"], **_without(kwargs, z), peer_quirks=quirks
    )
    return {"mask": mask, "metrics": metrics}


def diagnostics(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    rollout = z["rollout_log_prob"]
    return {
        "metrics": padded.compute_offpolicy_metrics(
            z["old_log_prob"], rollout, z["response_mask"], peer_quirks=quirks
        )
    }


def correction(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    options = _without(kwargs, z)
    weights, mask, metrics = padded.compute_rollout_correction_and_rejection_mask(
        z["old_log_prob"], z["rollout_log_prob"], z["response_mask"], **options, peer_quirks=quirks
    )
    return {"weights": weights, "mask": mask, "metrics": metrics}


def masked_ops(z: Inputs, kwargs: dict[str, Any], quirks: PeerQuirks = JANUARY) -> Result:
    if "loss_agg_mode" in kwargs:
        counts = options_of(kwargs, "dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
        return {
            "value": padded.agg_loss(z["x"], z["mask"], kwargs["loss_agg_mode"], **counts, peer_quirks=quirks)
        }
    if "unbiased" in kwargs:
        return {"value": padded.masked_var(z["x"], z["mask"], kwargs["unbiased"])}
    if "shift_mean" in kwargs:
        return {"value": padded.masked_whiten(z["x"], z["mask"], kwargs["shift_mean"])}
    if "eps" in kwargs:
        mean, std, count = padded.group_mean_std(z["scores"], z["index"], kwargs["eps"], peer_quirks=quirks)
        return {"mean": mean, "std": std, "count": count}
    values = z[kwargs.get("values", "x")]
    dim = kwargs.get("axis")
    operation = padded.masked_sum if z["variant"].startswith("sum") else padded.masked_mean
    return {"value": operation(values, z["mask"], dim)}


VERL: dict[str, Function] = {
    "verl_apply_kl_penalty": apply_kl_penalty,
    "verl_compute_offpolicy_metrics": diagnostics,
    "verl_compute_rollout_correction_weights": weights,
    "verl_compute_rollout_rejection_mask": rejection,
    "verl_kl_controller": controller,
    "verl_masked_ops": masked_ops,
    "verl_rollout_correction_and_rejection": correction,
    "verl_adv_gae": gae,
    "verl_adv_gpg": outcome(padded.compute_gpg_outcome_advantage, "f_norm", peer_quirks=JANUARY),
    "verl_adv_grpo": outcome(
        padded.compute_grpo_outcome_advantage, "epsilon", "norm_adv_by_std_in_grpo", peer_quirks=JANUARY
    ),
    "verl_adv_grpo_passk": passk,
    "verl_adv_grpo_vectorized": outcome(
        padded.compute_grpo_vectorized_outcome_advantage,
        "epsilon",
        "norm_adv_by_std_in_grpo",
        peer_quirks=JANUARY,
    ),
    "verl_adv_opo": outcome(padded.compute_opo_outcome_advantage, peer_quirks=JANUARY),
    "verl_adv_optimal_token_baseline": token_baseline(padded.compute_optimal_token_baseline_advantage),
    "verl_adv_reinforce_plus_plus": reinforce_plus_plus,
    "verl_adv_reinforce_plus_plus_baseline": outcome(
        padded.compute_reinforce_plus_plus_baseline_outcome_advantage, peer_quirks=JANUARY
    ),
    "verl_adv_remax": remax,
    "verl_adv_rloo": outcome(padded.compute_rloo_outcome_advantage, peer_quirks=JANUARY),
    "verl_adv_rloo_vectorized": outcome(padded.compute_rloo_outcome_advantage),
    "verl_adv_tir_optimal_token_baseline": token_baseline(
        padded.compute_tir_optimal_token_baseline_advantage
    ),
    "verl_kl_penalty": kl_penalty,
}
