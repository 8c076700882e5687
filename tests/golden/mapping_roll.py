"""ROLL's recorded functions in terms of streamadv's."""

from __future__ import annotations

import math
from typing import Any

import torch

from streamadv import padded
from streamadv.algorithms.scan import turn_mean
from streamadv.algorithms.segments import RunningMoments
from streamadv.padded.layout import padded_tokens

from .compare import Function, Inputs
from .mapping_verl import coefficients

Result = dict[str, Any]


def _advantage(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = dict(kwargs)
    pure, mixed = options.pop("is_pure_opd", False), options.pop("use_opd", False)
    recomputed = options.pop("enable_old_logprobs_recompute", False)
    coefficient, penalty = options.pop("opd_kl_coef", 1.0), options.pop("kl_penalty", "kl")
    batch = {**z, "rollout_log_probs": z["infer_logprobs"], "teacher_log_probs": z["ref_log_probs_default"]}
    result, metrics = padded.compute_advantage(
        batch,
        **options,
        distill_coef=coefficient if pure or mixed else 0.0,
        distill_only=pure,
        distill_penalty=penalty,
        distill_from="old_log_probs" if recomputed else "rollout_log_probs",
        peer_quirks="roll",
    )
    after = {"token_level_rewards_after": result["token_level_rewards"], "metrics": metrics}
    return {**result, **after}


def _teachers(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = dict(kwargs)
    pure, _ = options.pop("is_pure_opd", False), options.pop("use_opd", False)
    recomputed, routed = (
        options.pop("enable_old_logprobs_recompute", False),
        options.pop("teacher_masks", True),
    )
    teachers = {name: 1.0 if value is None else value for name, value in options.pop("opd_kl_coef").items()}
    penalty = options.pop("kl_penalty", "kl")
    batch = {**z, "rollout_log_probs": z["infer_logprobs"]}
    for name in teachers:
        batch[f"teacher_log_probs_{name}"] = z[f"ref_log_probs_{name}"]
        if routed:
            batch[f"teacher_rows_{name}"] = z[f"ref_log_probs_{name}_mask"]
    result, metrics = padded.compute_advantage(
        batch,
        **options,
        distill_teachers=teachers,
        distill_only=pure,
        distill_penalty=penalty,
        distill_from="old_log_probs" if recomputed else "rollout_log_probs",
        peer_quirks="roll",
    )
    return {**result, "metrics": metrics}


def _norm_types(options: dict[str, Any]) -> tuple[str | None, str | None, tuple[str | None, str | None]]:
    """ROLL's (mean, std, method's own), taken out of `options`: explicit types win over the method's."""
    own = METHODS[options.pop("method", "identity")]
    given = options.pop("norm_mean_type", None), options.pop("norm_std_type", None)
    return given[0] or own[0], given[1] or own[1], own


def _agentic_reward_norm(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = dict(kwargs)
    grouping = options.pop("grouping", "batch")
    labels = None if grouping == "batch" else z[grouping]
    mean, std, _ = _norm_types(options)
    rewards = padded.agentic_reward_norm(
        z["scores"], labels, norm_mean_type=mean, norm_std_type=std, **options, peer_quirks="roll"
    )
    return {"rewards": rewards}


def _token_reward(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = dict(kwargs)
    control = options.pop("controller")
    first = control.get("init_kl_coef", control.get("kl_coef"))
    if z["ref_log_probs"] is None:
        options.pop("ref_log_probs")
        first = 0.0  # ROLL: without a reference KL and coefficient are 0
    batch, metrics = padded.compute_token_reward(
        z,
        add_token_level_kl=options.pop("add_token_level_kl", True),
        kl_coef=first,
        **options,
        peer_quirks="roll",
    )
    after = control.get("init_kl_coef", control.get("kl_coef"))
    if control["type"] == "adaptive":
        after = padded.adapted_coefficient(
            after,
            metrics["critic/kl"],
            control["target"],
            control["horizon"],
            len(z["response_mask"]),
            peer_quirks="roll",
        )
    return {"token_level_rewards": batch["token_level_rewards"], "kl_coef_after": after, "metrics": metrics}


def _agentic_return(z: Inputs, kwargs: dict[str, Any]) -> Result:
    mask = z["mask"] if kwargs["mask"] else None
    advantages, returns = padded.compute_agentic_reinforce_return(
        z["token_level_rewards"], mask, kwargs["gamma"]
    )
    return {"advantages": advantages, "returns": returns}


def _approx_kl(z: Inputs, kwargs: dict[str, Any]) -> Result:
    name = kwargs["kl_penalty"]
    if name == "full":
        kl = padded.full_kl(z["log_probs_vocab"], z["log_probs_base_vocab"])
    else:
        kl = padded.approx_kl(z["log_probs"], z["log_probs_base"], name)
    return {"kl": kl * z["action_mask"] if kwargs.get("masked") else kl}


def _discounted_returns(z: Inputs, kwargs: dict[str, Any]) -> Result:
    returns = padded.compute_discounted_returns(
        z["step_scores"], z["traj_id"], z["step"], kwargs.get("gamma", 1.0)
    )
    return {"step_rewards": returns}


METHODS: dict[str, tuple[str | None, str | None]] = {
    "identity": (None, None),
    "mean": ("group", None),
    "mean_std": ("group", "group"),
    "asym_clip": ("group", "group"),
}


def _response_level_rewards(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = dict(kwargs)
    mean, std, step = _norm_types(options)  # step: normalised by the method whatever the types
    grouping = options.pop("grouping", "batch")
    labels = None if grouping == "batch" else z[grouping]
    batch, metrics = padded.compute_response_level_rewards(
        z,
        **options,
        traj_group_id=labels,
        state_hash=z["state_hash"],
        norm_mean_type=mean,
        norm_std_type=std,
        step_norm_mean_type=step[0],
        step_norm_std_type=step[1],
        peer_quirks="roll",
    )
    return {**batch, "state_group_id": z["state_hash"], "metrics": metrics}


def _sample_weights(z: Inputs, kwargs: dict[str, Any]) -> Result:
    # A difficulty stored as objects is silently ignored by ROLL.
    by_difficulty = kwargs["difficulty_loss_weight"] and kwargs["difficulty_dtype"] != "object"
    difficulty = z["difficulty"] if by_difficulty else None
    weights = padded.sample_weights(z["response_mask"], difficulty, by_length=kwargs["length_loss_weight"])
    return {"weights": weights}


def _segment_mean(z: Inputs, kwargs: dict[str, Any]) -> Result:
    tokens = padded_tokens(z["mask"])
    mean = turn_mean(z["tensor"].reshape(-1), tokens)
    return {"result": mean.view(z["mask"].shape)}


def _difficulty_mask(z: Inputs, kwargs: dict[str, Any]) -> Result:
    return {"mask": padded.difficulty_mask(z["scores"], **kwargs)}


def _expand(z: Inputs, kwargs: dict[str, Any]) -> Result:
    rewards = padded.expand_to_token_level(
        z["response_level_rewards"], z["attention_mask"], z["position_ids"]
    )
    return {"token_level_rewards": rewards}


def _sample_level_mask(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = dict(kwargs)
    options["use_difficulty_mask"] = options.pop("difficulty_mask", False)
    mask, metrics = padded.sample_level_mask(
        z["response_mask"], z["scores"], max_response_length=int(z["max_response_length"]), **options
    )
    return {"final_response_mask": mask[:, 1:], "metrics": metrics}


def _group_reward_norm(z: Inputs, kwargs: dict[str, Any]) -> Result:
    std = None if not kwargs.get("div_std", True) else "batch" if kwargs.get("div_std_global") else "group"
    size = kwargs["n_sample"]
    centred = padded.reward_norm(z["rewards"], norm_mean_type="group", norm_std_type=None, n_sample=size)
    # The std over the batch is that of the centred values.
    quirks: Any = "roll" if size > 1 else None  # ROLL refuses groups of one
    scaled = padded.reward_norm(
        centred, norm_mean_type=None, norm_std_type=std, n_sample=size, peer_quirks=quirks
    )
    return {"rewards": scaled}


def _kl_controller(z: Inputs, kwargs: dict[str, Any]) -> Result:
    if "init_kl_coef" not in kwargs:
        return {"values": coefficients(z, kwargs["kl_coef"], "fixed", 1.0, 1.0)}
    return {"values": coefficients(z, kwargs["init_kl_coef"], None, kwargs["target"], kwargs["horizon"])}


def _masked_ops(z: Inputs, kwargs: dict[str, Any]) -> Result:
    x = z["x"]
    mask = z["mask"]
    if "loss_agg_mode" in kwargs:
        weights = z["weights"] if kwargs.get("weights") else None
        counts = {
            "batch_num_tokens": kwargs.get("batch_num_tokens"),
            "global_batch_size": kwargs.get("global_valid_samples"),
        }
        mode = kwargs["loss_agg_mode"]
        return {"value": padded.agg_loss(x, mask, mode, weights, **counts, peer_quirks="roll")}
    if "unbiased" in kwargs:
        return {"value": padded.masked_var(x, mask, kwargs["unbiased"])}
    if "shift_mean" in kwargs or kwargs.get("mask") == "all zeros":
        return {"value": padded.masked_whiten(x, mask, kwargs.get("shift_mean", True))}
    if "eps" in kwargs:
        return {"value": padded.masked_normalize(x, mask, kwargs["eps"], peer_quirks="roll")}
    if "clip_max" in kwargs:
        return {"value": padded.clip_fraction(x, **kwargs)}
    dim = kwargs.get("dim")
    operation = padded.masked_sum if z["variant"].startswith("sum") else padded.masked_mean
    return {"value": operation(x, z["mask"], dim)}


def _reward_norm(z: Inputs, kwargs: dict[str, Any]) -> Result:
    running = RunningMoments()
    if "running" in (kwargs["norm_mean_type"], kwargs["norm_std_type"]):
        for name in ("history_0", "history_1", "rewards"):
            if z.get(name) is not None:
                running = running.updated(z[name])
    rewards = padded.reward_norm(z["rewards"], **kwargs, running=running, peer_quirks="roll")
    seen = {"mean": running.mean, "var": running.var, "std": running.std, "count": running.count}
    return {"rewards": rewards, **{f"moments_{name}": value for name, value in seen.items()}}


def _reward_postprocess(z: Inputs, kwargs: dict[str, Any]) -> Result:
    batch = {"response_level_rewards": z["rewards"]}
    result, metrics = padded.reward_postprocess(batch, **kwargs, peer_quirks="roll")
    return {"rewards": result["response_level_rewards"], "metrics": metrics}


def _running_moments(z: Inputs, kwargs: dict[str, Any]) -> Result:
    running = RunningMoments()
    trace: dict[str, list[float]] = {
        name: [] for name in ("mean", "var", "std", "count", "batch_mean", "batch_std")
    }
    for values in torch.split(z["values"], z["lengths"].tolist()):
        running, own = running.updated(values), RunningMoments.of(values)
        for name in ("mean", "var", "std", "count"):
            trace[name].append(getattr(running, name))
        trace["batch_mean"].append(own.mean)
        trace["batch_std"].append(own.std if own.count > 1 else math.nan)  # R6: ROLL's is NaN
    return trace


def _bounds(item: dict[str, Any], name: str, default: bool, low: float, high: float) -> Any:
    if not item.get(f"{name}_enabled", default):
        return None, None
    return item.get(f"{name}_low", low), item.get(f"{name}_high", high)


def _train_infer(z: Inputs, kwargs: dict[str, Any]) -> Result:
    weight = kwargs["is_weight"]
    filters = [
        padded.RatioFilter(
            item.get("agg_type", "token"),
            *_bounds(item, "ratio", True, 0.8, 1.2),
            *_bounds(item, "diff", False, -0.2, 0.2),
        )
        for item in kwargs["filters"]
        if item.get("enabled", False)
    ]
    weights, mask, metrics = padded.compute_train_infer_correction(
        z["old_log_probs"],
        z["infer_log_probs"],
        z["response_mask"],
        weight_level=weight.get("weight_type", "token") if weight.get("enabled", False) else None,
        upper_bound=weight.get("upper_bound", 1.2),
        filters=filters,
        global_valid_samples=kwargs.get("global_valid_samples"),
        global_valid_tokens=kwargs.get("global_valid_tokens"),
        peer_quirks="roll",
    )
    return {"is_weight": weights, "filter_mask": mask, "metrics": metrics}


ROLL: dict[str, Function] = {
    "roll2026_opd_multi_teacher": _teachers,
    "roll2026_opd_multi_teacher_agentic": _teachers,
    "roll_agentic_compute_advantage": _advantage,
    "roll_agentic_reward_norm": _agentic_reward_norm,
    "roll_apply_kl_penalty": _token_reward,
    "roll_compute_advantage": _advantage,
    "roll_compute_agentic_reinforce_return": _agentic_return,
    "roll_compute_approx_kl": _approx_kl,
    "roll_compute_discounted_returns": _discounted_returns,
    "roll_compute_response_level_rewards": _response_level_rewards,
    "roll_compute_sample_weights": _sample_weights,
    "roll_compute_segment_masked_mean": _segment_mean,
    "roll_compute_token_reward": _token_reward,
    "roll_compute_train_infer_correction": _train_infer,
    "roll_difficulty_mask": _difficulty_mask,
    "roll_expand_to_token_level": _expand,
    "roll_get_sample_level_mask": _sample_level_mask,
    "roll_group_reward_norm": _group_reward_norm,
    "roll_kl_controller": _kl_controller,
    "roll_masked_ops": _masked_ops,
    "roll_reward_norm": _reward_norm,
    "roll_reward_postprocess": _reward_postprocess,
    "roll_running_moments": _running_moments,
}
