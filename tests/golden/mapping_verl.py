"""verl's recorded functions in terms of streamadv's."""

from __future__ import annotations

from typing import Any

from streamadv import padded

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


def _passk(z: Inputs, kwargs: dict[str, Any]) -> Result:
    # verl takes the norm from its config and ignores the argument of that name.
    options = _options(
        {name: value for name, value in kwargs.items() if "." in name}, "norm_adv_by_std_in_grpo"
    )
    options |= _options(kwargs, "epsilon")
    return _pair(
        padded.compute_grpo_passk_outcome_advantage(
            z["token_level_rewards"], z["response_mask"], z["index"], **options
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
                z["rollout_is_weights"] if kwargs.get("rollout_is_weights") else None,
                **_options(kwargs, "handle_zero_tail", "epsilon"),
            )
        )

    return call


def coefficients(z: Inputs, first: float, kind: str | None, target: float, horizon: float) -> list[float]:
    """The KL coefficient after each of the recorded batches."""
    values = []
    for kl, steps in zip(z["current_kl"].tolist(), z["n_steps"].tolist(), strict=True):
        if kind != "fixed":
            first = padded.adapted_coefficient(first, kl, target, horizon, steps, peer_quirks="verl")
        values.append(first)
    return values


def _kl_penalty(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return {"kl": padded.approx_kl(z["logprob"], z["ref_logprob"], kwargs["kl_penalty"])}


def _controller(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return {
        "values": coefficients(
            z, kwargs["kl_coef"], kwargs.get("type"), kwargs["target_kl"], kwargs["horizon"]
        )
    }


def _apply_kl_penalty(z: Inputs, kwargs: dict[str, Any]) -> Result:
    control = kwargs["controller"]
    rewards, metrics = padded.apply_kl_penalty(
        z["token_level_scores"],
        z["response_mask"],
        z["old_log_probs"],
        z["ref_log_prob"],
        kl_penalty=kwargs["kl_penalty"],
        kl_coef=control["init_kl_coef"],
        peer_quirks="verl",
    )
    after = padded.adapted_coefficient(
        control["init_kl_coef"],
        metrics["critic/kl"],
        control["target_kl"],
        control["horizon"],
        len(rewards),
        peer_quirks="verl",
    )
    named = {
        "actor/reward_kl_penalty": metrics["critic/kl"],
        "actor/reward_kl_penalty_coeff": metrics["critic/kl_coef"],
    }
    return {"token_level_rewards": rewards, "kl_coef_after": after, "metrics": named}


def _weights(z: Inputs, kwargs: dict[str, Any]) -> Result:
    weights, metrics = padded.compute_rollout_correction_weights(
        z["log_ratio"], z["response_mask"], **kwargs, peer_quirks="verl"
    )
    return {"weights": weights, "metrics": metrics}


def _rejection(z: Inputs, kwargs: dict[str, Any]) -> Result:
    mask, metrics = padded.compute_rollout_rejection_mask(
        z["log_ratio"], z["response_mask"], **kwargs, peer_quirks="verl"
    )
    return {"mask": mask, "metrics": metrics}


def _diagnostics(z: Inputs, kwargs: dict[str, Any]) -> Result:
    rollout = z["rollout_log_prob"]
    return {
        "metrics": padded.compute_offpolicy_metrics(
            z["old_log_prob"], rollout, z["response_mask"], peer_quirks="verl"
        )
    }


def _correction(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = {name: value for name, value in kwargs.items() if name not in z}
    weights, mask, metrics = padded.compute_rollout_correction_and_rejection_mask(
        z["old_log_prob"], z["rollout_log_prob"], z["response_mask"], **options, peer_quirks="verl"
    )
    return {"weights": weights, "mask": mask, "metrics": metrics}


def _masked_ops(z: Inputs, kwargs: dict[str, Any]) -> Result:
    if "loss_agg_mode" in kwargs:
        counts = _options(kwargs, "batch_num_tokens", "global_batch_size", "loss_scale_factor")
        mode = kwargs["loss_agg_mode"]
        loss = padded.agg_loss(z["x"], z["mask"], mode, **counts, peer_quirks="verl")
        if mode.endswith("norm"):  # in January it was neither divided by the rows nor multiplied by the ranks
            rows = counts.get("global_batch_size") or int((z["mask"] != 0).any(1).sum())
            return {"value": loss * rows if rows else 0.0}
        return {"value": loss * kwargs.get("dp_size", 1)}
    if "unbiased" in kwargs:
        return {"value": padded.masked_var(z["x"], z["mask"], kwargs["unbiased"])}
    if "shift_mean" in kwargs:
        return {"value": padded.masked_whiten(z["x"], z["mask"], kwargs["shift_mean"])}
    if "eps" in kwargs:
        mean, std, count = padded.group_mean_std(z["scores"], z["index"], kwargs["eps"], peer_quirks="verl")
        return {"mean": mean, "std": std, "count": count}
    values = z[kwargs.get("values", "x")]
    dim = kwargs.get("axis")
    operation = padded.masked_sum if z["variant"].startswith("sum") else padded.masked_mean
    return {"value": operation(values, z["mask"], dim)}


VERL: dict[str, Function] = {
    "verl_apply_kl_penalty": _apply_kl_penalty,
    "verl_compute_offpolicy_metrics": _diagnostics,
    "verl_compute_rollout_correction_weights": _weights,
    "verl_compute_rollout_rejection_mask": _rejection,
    "verl_kl_controller": _controller,
    "verl_masked_ops": _masked_ops,
    "verl_rollout_correction_and_rejection": _correction,
    "verl_adv_gae": _gae,
    "verl_adv_gpg": _outcome(padded.compute_gpg_outcome_advantage, "f_norm", peer_quirks="verl"),
    "verl_adv_grpo": _outcome(
        padded.compute_grpo_outcome_advantage, "epsilon", "norm_adv_by_std_in_grpo", peer_quirks="verl"
    ),
    "verl_adv_grpo_passk": _passk,
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
