"""Recorded functions of other peers whose estimator or correction streamadv offers."""

from __future__ import annotations

from typing import Any

import torch

from streamadv import padded
from streamadv.algorithms.estimators.tokens import vtrace_errors
from streamadv.algorithms.off_policy import Rejection, importance_weights, reject, veto
from streamadv.padded.layout import padded_tokens

from .compare import Function, Inputs

Result = dict[str, Any]


def _areal_overlong(z: Inputs, kwargs: dict[str, Any]) -> Result:
    rewards = padded.overlong_penalty(
        z["rewards"],
        z["loss_mask"].sum(1),
        max_length=kwargs["max_response_length"],
        buffer=kwargs["overlong_tokens"],
        factor=kwargs["overlong_penalty_factor"],
        capped=False,
    )
    return {"rewards": rewards}


def _openrlhf_length(z: Inputs, kwargs: dict[str, Any]) -> Result:
    if "stop_properly_penalty_coef" in kwargs:
        coefficient = kwargs["stop_properly_penalty_coef"]
        return {"rewards": padded.truncation_penalty(z["rewards"], z["truncated"], coefficient)}
    rewards = padded.overlong_penalty(
        z["rewards"],
        z["response_length"],
        max_length=kwargs["max_new_tokens"],
        buffer=kwargs["overlong_buffer_len"],
        factor=kwargs["overlong_penalty_factor"],
    )
    return {"rewards": rewards}


def _m2po(z: Inputs, kwargs: dict[str, Any]) -> Result:
    log_ratio = z["prox_logp"] - z["old_logp"]
    return {"loss_mask": padded.m2po_mask(log_ratio, z["loss_mask"], kwargs["m2_threshold"])}


def _proximal(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return {"prox_logp": padded.proximal_log_probs(z["old_logp"], z["logprobs"], z["versions"], **kwargs)}


def _staleness(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return {"metrics": padded.version_staleness(z["versions"], z["mask"], **kwargs)}


def _skyrl(function: Any, **fixed: Any) -> Function:
    def call(z: Inputs, kwargs: dict[str, Any]) -> Result:
        advantages, returns = function(z["token_level_rewards"], z["response_mask"], z["index"], **fixed)
        return {"advantages": advantages, "returns": returns}

    return call


def _slime_returns(z: Inputs, kwargs: dict[str, Any]) -> Result:
    batch = {
        "token_level_rewards": z["rewards"],
        "values": z["values"],
        "response_mask": torch.ones_like(z["rewards"]),
    }
    if "discount" in kwargs:
        options = {"adv_estimator": "reinforce", "gamma": kwargs["discount"]}
    else:
        options = {"adv_estimator": "gae", "gamma": kwargs["gamma"], "lambd": kwargs["lambd"]}
    return padded.compute_advantage(batch, **options)[0]


def _vtrace(z: Inputs, kwargs: dict[str, Any]) -> Result:
    mask = z["sample_mask"] if kwargs.get("sample_mask") else torch.ones_like(z["r_t"])
    errors = vtrace_errors(
        *(z[name].reshape(-1).double() for name in ("r_t", "v_tm1", "v_t", "rho", "discount_t")),
        padded_tokens(mask),
        lam=kwargs["lambda_"],
        rho_clip=kwargs["clip_rho_threshold"],
        alpha=kwargs.get("alpha", 1.0),
    ).view(mask.shape)
    v, following = z["v_tm1"], z["v_t"]
    lam = kwargs["lambda_"]
    later = torch.cat([lam * (errors + v)[:, 1:] + (1 - lam) * v[:, 1:], following[:, -1:]], 1)
    target = z["r_t"] + z["discount_t"] * later
    rho = z["rho"].clamp(max=kwargs.get("clip_pg_rho_threshold", 1.0))
    return {"errors": errors, "pg_advantage": rho * (target - v), "q_estimate": target}


def _trl_mask(z: Inputs, kwargs: dict[str, Any]) -> Result:
    keep = padded.off_policy_sequence_mask(
        z["advantages"],
        z["per_token_logps"],
        z["sampling_per_token_logps"],
        z["mask"],
        kwargs["off_policy_threshold"],
    )
    return {"keep": keep[:, :1]}


def _trl116_mask(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """Without a sampling log-prob there is no evidence: the difference is 0."""
    sampling, current = z["sampling_per_token_logps_nan"], z["per_token_logps"]
    known = torch.where(sampling.isnan(), current, sampling)
    columns = {"sampling_per_token_logps": known, "mask": z["tool_mask"]}
    return _trl_mask({**z, **columns, "advantages": z["advantages"][:, None]}, kwargs)


def _trl116_ratio(z: Inputs, kwargs: dict[str, Any]) -> Result:
    sampling, old = z["sampling_per_token_logps_nan"], z["old_per_token_logps"]
    known = torch.where(sampling.isnan(), old, sampling)
    mask = z["completion_mask"] * z["tool_mask"]
    return _trl_ratio({**z, "sampling_per_token_logps": known, "completion_mask": mask}, kwargs)


def _slime_opsm(z: Inputs, kwargs: dict[str, Any]) -> Result:
    mask = z["loss_masks"]
    keep = padded.off_policy_sequence_mask(
        z["advantages"], z["log_probs"], z["old_log_probs"], mask, kwargs["delta"]
    )
    dropped = (keep == 0).sum(1)  # positions outside the mask count too
    dropped = dropped / mask.sum(1).clamp(min=1)
    return {"keep": keep, "clipfrac": dropped.sum()}


def _trl_ratio(z: Inputs, kwargs: dict[str, Any]) -> Result:
    level, _, mode = kwargs["mode"].partition("_")
    low = kwargs["clip_min"]
    tokens = padded_tokens(z["completion_mask"])
    log_ratio = z["old_per_token_logps"] - z["sampling_per_token_logps"]
    weights, _ = importance_weights(
        log_ratio.reshape(-1),
        tokens,
        level=level,
        mode="clip" if mode == "truncate" and low is not None else mode,
        upper=kwargs["clip_max"],
        lower=0.0 if low is None else low,
    )
    weights = weights.view(z["completion_mask"].shape)
    if level == "sequence":  # one number per row
        empty = z["completion_mask"].sum(1, keepdim=True) == 0
        return {"ratio": torch.where(empty, 1.0, weights.amax(1, keepdim=True))}
    return {"ratio": torch.where(z["completion_mask"] != 0, weights, 1.0)}


SLIME_KINDS: dict[str, Any] = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _inside(level: str, lower: float | None, upper: float) -> Rejection:
    """Ratios train / rollout inside lower .. upper; the bounds of a k1 rejection are on its inverse."""
    return Rejection(SLIME_KINDS[level], upper if lower is None else 1 / lower, 1 / upper)


def _slime_mis(z: Inputs, kwargs: dict[str, Any]) -> Result:
    within = torch.arange(z["loss_masks"].shape[1]) < z["lengths"][:, None]
    mask = z["loss_masks"] * within
    tokens = padded_tokens(mask)
    log_ratio = (z["train_log_probs"] - z["rollout_log_probs"]).reshape(-1)
    level, mode, upper = kwargs["tis_level"], kwargs["tis_mode"], kwargs["tis_upper_bound"]
    weights, _ = importance_weights(
        log_ratio,
        tokens,
        level=level,
        mode="truncate" if mode == "mask" else mode,
        upper=1e30 if mode == "mask" else upper,
        lower=kwargs["tis_lower_bound"],
        batch_normalize=kwargs["tis_batch_normalize"],
        rows=torch.tensor(len(mask)),
    )
    rejections = [_inside(level, kwargs["tis_lower_bound"], upper)] if mode == "mask" else []
    if kwargs["use_rs"]:
        rs_upper = kwargs["rs_upper_bound"] or upper
        rejections.append(_inside(kwargs["rs_level"], kwargs["rs_lower_bound"], rs_upper))
    kept, _ = reject(log_ratio, tokens, rejections)
    if kwargs["rs_veto_threshold"]:
        kept = kept & veto(log_ratio, tokens, kwargs["rs_veto_threshold"])
    shaped = (values.view(mask.shape) for values in (weights, kept))
    return dict(zip(("weights", "masks"), shaped, strict=True))


OTHERS: dict[str, Function] = {
    "areal_m2po_mask": _m2po,
    "areal_overlong_penalty": _areal_overlong,
    "areal_prox_logp_approximation": _proximal,
    "areal_version_staleness": _staleness,
    "openrlhf_length_penalty": _openrlhf_length,
    "rlax_vtrace": _vtrace,
    "skyrl_adv_maxrl": _skyrl(padded.compute_maxrl_outcome_advantage, negative_means=True, singleton="raw"),
    "skyrl_adv_rloo": _skyrl(padded.compute_rloo_outcome_advantage),
    "slime_discounted_returns": _slime_returns,
    "slime_mis_weights": _slime_mis,
    "slime_opsm_mask": _slime_opsm,
    "trl116_off_policy_mask": _trl116_mask,
    "trl116_vllm_is_ratio": _trl116_ratio,
    "trl_off_policy_mask": _trl_mask,
    "trl_vllm_is_ratio": _trl_ratio,
}
