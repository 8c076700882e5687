"""What streamadv gives where the peer raises: the stated values, in float64 loops from the formulas.

A call stands here by "function.variant", or by "function" where the inputs are the reason, so that any variant may.
Each entry gives the outputs to compare; a call not named here, and one for which None comes, must raise here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from streamadv.trajectory.columns import Array

from .compare import Inputs, trainable_tokens

Outputs = dict[str, Array]
Stated = Callable[[Inputs, Mapping[str, Any]], Outputs | None]


def _array(value: Any) -> Array:
    return np.asarray(value, np.float64)


def _kl(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """Every name of an estimator is known everywhere: k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d, at most 10."""
    d = _array(z["log_probs"]) - _array(z["log_probs_base"])
    kl = {"k1": d, "k2": d**2 / 2, "low_var_kl": np.minimum(np.exp(np.minimum(-d, 20)) - 1 + d, 10)}
    found = kl[kwargs["kl_penalty"]]
    return {"kl": found * _array(z["action_mask"]) if kwargs.get("masked") else found}


def _kl_plus(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """A name that ends in "+" has the value of the plain one, as in verl 0.9.1."""
    d = _array(z["logprob"]) - _array(z["ref_logprob"])
    e = np.clip(-d, -20, 20)
    return {"kl": d if kwargs["kl_penalty"] == "k1+" else np.clip(np.expm1(e) - e, -10, 10)}


def _group_of_one(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """A group of one gives 0."""
    return {"rewards": np.zeros(len(z["rewards"]))}


def _passk(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """The best of a group gets its lead over the second; a group of one gives 0."""
    scores, labels = _array(z["token_level_rewards"]).sum(1), np.array(z["index"])
    found = np.zeros(len(scores))
    for label in set(z["index"]):
        own = np.flatnonzero(labels == label)
        if len(own) < 2:
            continue
        second, best = sorted(own, key=lambda i: (scores[i], -i))[-2:]
        found[best] = scores[best] - scores[second]
        if kwargs.get("config.norm_adv_by_std_in_grpo", True):
            found[best] /= scores[own].std(ddof=1) + kwargs.get("epsilon", 1e-6)
    return _on_tokens(found[:, None], z)


def _geometric(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """Geometric ratios are offered: exp of the row's mean log-ratio, at most the threshold."""
    mask = _array(z["response_mask"])
    mean = (_array(z["log_ratio"]) * mask).sum(1) / np.maximum(mask.sum(1), 1)
    weights = np.exp(np.clip(mean, -20, 20)).clip(max=kwargs.get("rollout_is_threshold", 2.0))
    return {"weights": weights[:, None] * mask}


def _gae(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """Not whitened. A masked token carries on what the next action has, as in verl."""
    rewards, values, mask = (_array(z[name]) for name in ("token_level_rewards", "values", "response_mask"))
    gamma, lam = kwargs["gamma"], kwargs["lam"]
    advantages = np.zeros_like(values)
    for row in range(len(values)):
        ahead = following = 0.0
        for t in range(values.shape[1] - 1, -1, -1):
            if mask[row, t]:
                ahead = rewards[row, t] + gamma * following - values[row, t] + gamma * lam * ahead
                following = values[row, t]
            advantages[row, t] = ahead
    return {"advantages": advantages, "returns": advantages + values}


def _reinforce_plus_plus(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """Not whitened. The return begins anew at every masked token, as in verl (January 2026)."""
    rewards, mask = _array(z["token_level_rewards"]), _array(z["response_mask"])
    returns = np.zeros_like(rewards)
    for row in range(len(rewards)):
        ahead = 0.0
        for t in range(rewards.shape[1] - 1, -1, -1):
            returns[row, t] = rewards[row, t] + kwargs["config.gamma"] * ahead
            ahead = returns[row, t] * mask[row, t]
    return {"advantages": returns * mask, "returns": returns}


def _on_carried_returns(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """Not whitened. Masked tokens neither discount nor reset the return, as in verl 0.9.1."""
    rewards, mask = _array(z["token_level_rewards"]), _array(z["response_mask"])
    returns = np.zeros_like(rewards)
    for row in range(len(rewards)):
        ahead = 0.0
        for t in reversed(np.flatnonzero(mask[row])):
            returns[row, t] = ahead = rewards[row, t] + kwargs["config.gamma"] * ahead
    return {"advantages": returns, "returns": returns}


def _reinforce_plus_plus_baseline(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """Not whitened. A group of one keeps its reward, as in verl."""
    scores, labels = _array(z["token_level_rewards"]).sum(1), np.array(z["index"])
    for label in set(z["index"]):
        own = np.flatnonzero(labels == label)
        if len(own) > 1:
            scores[own] -= scores[own].mean()
    return _on_tokens(scores[:, None], z)


def _masked_statistics(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """The variance of fewer than two values is 0, and they are not whitened."""
    return {"value": _array(0.0 if "unbiased" in kwargs else z["x"])}


def _no_metrics(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs | None:
    """No tokens, no metrics: nothing is rejected and there is nothing to weigh."""
    nothing = np.zeros(tuple(z["response_mask"].shape))
    stated = {"weights": nothing, "mask": nothing, "no_metrics": np.array(True)}
    return None if z["variant"].startswith("bad_") else stated


def _no_loss(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs | None:
    """The loss of no tokens is 0, and so is its gradient."""
    nothing = {"loss": _array(0.0), "grad_log_prob": np.zeros(tuple(z["response_mask"].shape))}
    return None if z["variant"].startswith("bad_") else nothing


def _on_tokens(rows: Array, z: Inputs) -> Outputs:
    advantages = rows * _array(z["response_mask"])
    return {"advantages": advantages, "returns": advantages}


def _gdpo(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs | None:
    """Not whitened. A group of one keeps its reward over 1 + epsilon, as in verl."""
    keys = kwargs.get("config.gdpo_reward_keys", [])
    if kwargs.get("components") and not (keys and set(keys) <= z.keys()):
        return None
    given = [_array(z[key]) for key in keys] if kwargs.get("components") else []
    weights = kwargs.get("config.gdpo_reward_weights") or [1.0] * len(keys)
    if len(weights) < len(given):
        return None
    total = np.zeros(len(z["index"]))
    labels, epsilon = np.array(z["index"]), kwargs.get("epsilon", 1e-6)
    scaled = kwargs.get("norm_adv_by_std_in_grpo", True)
    for weight, scores in zip(
        [*weights, 1.0], given or [_array(z["token_level_rewards"]).sum(1)], strict=False
    ):
        for label in set(z["index"]):
            own = np.flatnonzero(labels == label)
            alone = len(own) == 1
            mean, std = (0.0, 1.0) if alone else (scores[own].mean(), scores[own].std(ddof=1))
            total[own] += weight * (scores[own] - mean) / (std + epsilon if scaled else 1.0)
    return _on_tokens(total[:, None], z)


def _overlong(z: Inputs, kwargs: Mapping[str, Any]) -> Outputs:
    """The penalty of every length, whatever the buffer."""
    lengths = _array(z["response_attention"]).sum(1)
    excess = lengths - (kwargs["max_resp_len"] - kwargs["len"])
    penalty = np.minimum(-excess / kwargs["len"] * kwargs["penalty_factor"], 0)
    return {"reward": _array(z["scores"]) + penalty, "overlong_reward": penalty, "overlong": penalty < 0}


DEFINED_HERE: dict[str, Stated] = {
    "roll_compute_approx_kl.name_k1": _kl,
    "roll_compute_approx_kl.name_k2": _kl,
    "roll_compute_approx_kl.name_low_var_kl": _kl,
    "roll_group_reward_norm.n_sample_1": _group_of_one,
    "verl091_adv_grpo_passk": _passk,
    "verl_adv_grpo_passk": _passk,
    "verl091_compute_rollout_correction_weights.bad_level": _geometric,
    "verl091_dapo_overlong_reward.bad": _overlong,
    "verl_compute_rollout_correction_weights.bad_level": _geometric,
    "verl_kl_penalty.k1plus": _kl_plus,
    "verl_kl_penalty.k3plus": _kl_plus,
}

#: Calls that the peer answers, and why they raise here.
REFUSED_HERE: dict[str, str] = {
    "verl091_compute_rollout_correction_weights.underscore_literal": "reads 1_2 as the number 12"
}

#: Functions that raise in the peer with fewer than two trainable tokens.
DEFINED_FOR_FEW_TOKENS: dict[str, Stated] = {
    "roll_masked_ops": _masked_statistics,
    "verl_adv_gae": _gae,
    "verl_adv_reinforce_plus_plus": _reinforce_plus_plus,
    "verl_adv_reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "verl_compute_offpolicy_metrics": _no_metrics,
    "verl_compute_rollout_correction_weights": _no_metrics,
    "verl_compute_rollout_rejection_mask": _no_metrics,
    "verl091_adv_gdpo": _gdpo,
    "verl091_adv_reinforce_plus_plus": _on_carried_returns,
    "verl091_adv_reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "verl091_adv_gae": _gae,
    "verl091_compute_rollout_correction_weights": _no_metrics,
    "verl091_compute_rollout_rejection_mask": _no_metrics,
    "verl091_policy_loss_bypass_mode": _no_loss,
    "verl091_rollout_correction_and_rejection": _no_metrics,
    "verl_masked_ops": _masked_statistics,
    "verl_rollout_correction_and_rejection": _no_metrics,
}


def stated(function: str, variant: str, given: Inputs, kwargs: Mapping[str, Any]) -> Outputs | None:
    """The outputs of a call that raises in the peer; None where it has to raise here too."""
    known = DEFINED_HERE.get(f"{function}.{variant}") or DEFINED_HERE.get(function)
    if known is None and function in DEFINED_FOR_FEW_TOKENS and trainable_tokens(given) < 2:
        known = DEFINED_FOR_FEW_TOKENS[function]
    return None if known is None else known(given, kwargs)
