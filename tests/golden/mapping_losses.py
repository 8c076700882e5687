"""Recorded losses and their gradients in terms of `streamadv.losses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from streamadv import losses, padded
from streamadv.errors import OptionError

from .compare import Function, Inputs, NotOfferedError

Result = dict[str, Any]
TOKENS = ("log_prob", "old_log_prob", "advantages", "rollout_is_weights")
TRL_MODES = {
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
}
COUNTS = {
    "dp_size": "world_size",
    "batch_num_tokens": "num_tokens",
    "global_batch_size": "num_rows",
    "loss_scale_factor": "loss_scale_factor",
}


def _aggregated(loss: Tensor, mask: Tensor, mode: str, kwargs: Mapping[str, Any]) -> Tensor:
    counts = {ours: kwargs[theirs] for theirs, ours in COUNTS.items() if theirs in kwargs}
    total = losses.aggregate(loss, mask, mode, **counts)  # type: ignore[arg-type]
    if mode == "token-sum" or (mask != 0).any():
        return total
    assert total == 0
    return total + torch.nan  # the peer divides by nothing


def _verl(function: Callable[..., losses.Loss], mode: str, **defaults: float) -> Function:
    def call(z: Inputs, kwargs: dict[str, Any]) -> Result:
        mask = z["response_mask"].bool() if kwargs.get("bool_mask") else z["response_mask"]
        options: dict[str, Any] = dict(defaults)
        for side in ("low", "high") if defaults else ():
            value = kwargs.get(f"config.clip_ratio_{side}", 0.2)
            options[f"clip_{side}"] = kwargs["config.clip_ratio"] if value is None else value
        if "dual_clip" in options:
            options["dual_clip"] = kwargs.get("config.clip_ratio_c", options["dual_clip"])

        def computed(inputs: Mapping[str, Tensor], suffix: str = "") -> Result:
            log_prob = inputs["log_prob"].requires_grad_()
            if kwargs.get("rollout_is_weights"):
                options["weights"] = inputs["rollout_is_weights"]
            tokens, metrics = function(
                log_prob, inputs["old_log_prob"], inputs["advantages"], mask, **options
            )
            loss = _aggregated(tokens, mask, kwargs.get("loss_agg_mode", mode), kwargs)
            loss.backward()
            assert log_prob.grad is not None
            return {
                f"loss{suffix}": loss,
                f"grad_log_prob{suffix}": log_prob.grad.float(),
                "metrics": metrics,
            }

        inputs = {name: z[name] for name in TOKENS}
        if "dtype" not in kwargs:
            return computed(inputs)
        inputs = {name: values.to(torch.bfloat16) for name, values in inputs.items()}
        rounded = {name: values.float() for name, values in inputs.items()}
        return {**computed(inputs), **computed(rounded, "_f32")}

    return call


def _bypass_mode(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """Rollout correction of the policy itself, whose mask and weights the loss takes: PPO clip without the weights."""
    prefix = "config.policy_loss.rollout_correction."
    options = {name.removeprefix(prefix): value for name, value in kwargs.items() if name.startswith(prefix)}
    kind = options.pop("loss_type", "ppo_clip")
    if kind not in ("ppo_clip", "reinforce"):
        raise OptionError(f"loss_type is {kind!r}")
    log_prob, old, mask = z["log_prob"].requires_grad_(), z["old_log_prob"], z["response_mask"]
    weights, passing, metrics = padded.compute_rollout_correction_and_rejection_mask(
        log_prob, old, mask, **{"rollout_is": "sequence", **options}, peer_quirks="verl"
    )
    if kind == "ppo_clip":
        tokens, more = losses.ppo_clip(log_prob, old, z["advantages"], passing)
    else:
        tokens, more = losses.reinforce(log_prob, old, z["advantages"], passing, weights=weights)
    loss = _aggregated(tokens, passing, kwargs.get("loss_agg_mode", "token-mean"), kwargs)
    if not mask.any():
        loss = losses.aggregate(tokens, mask)
    loss.backward()
    return {"loss": loss.detach(), "grad_log_prob": log_prob.grad, "metrics": {**metrics, **more}}


def _agg_loss(z: Inputs, kwargs: dict[str, Any]) -> Result:
    matrix = z["loss_mat"].requires_grad_()
    loss = _aggregated(matrix, z["loss_mask"], kwargs["loss_agg_mode"], kwargs)
    loss.backward()
    classic = padded.agg_loss(
        matrix,
        z["loss_mask"],
        kwargs["loss_agg_mode"],
        **{name: kwargs[name] for name in COUNTS if name in kwargs},
        peer_quirks="verl",
    )
    torch.testing.assert_close(classic, loss, equal_nan=True)
    return {"loss": loss, "grad_loss_mat": matrix.grad}


def _trl_grpo(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """Rows without tokens count in TRL's means over rows."""
    if kwargs["loss_type"] in ("sapo", "vespo"):
        raise NotOfferedError("soft gates of ratios are the trainer's")
    if kwargs.get("use_bias_correction_kl") or kwargs.get("top_entropy_quantile", 1.0) < 1:
        raise NotOfferedError("KL times the ratio and masks of entropy are the trainer's")
    log_probs = z["per_token_logps"].requires_grad_()
    old = log_probs.detach() if z["old_per_token_logps"] is None else z["old_per_token_logps"]
    mask = z["completion_mask"] * z["tool_mask"]
    token_advantages = z["advantages_token"] if kwargs.get("advantages_token") else z["advantages"][:, None]
    low, high = kwargs.get("epsilon_low", 0.2), kwargs.get("epsilon_high", 0.2)
    kind, delta = kwargs["loss_type"], kwargs.get("delta")
    options: dict[str, Any] = {"clip_low": low, "clip_high": high}
    weights = kwargs.get("importance_sampling_ratio")
    if weights:
        options["weights"] = z[weights].expand_as(mask)
    if kwargs.get("off_policy_mask_threshold") is not None:
        options["weights"] = options.get("weights", 1.0) * padded.off_policy_sequence_mask(
            token_advantages,
            log_probs,
            z["sampling_per_token_logps"],
            mask,
            kwargs["off_policy_mask_threshold"],
        )
    function: Callable[..., losses.Loss] = losses.ppo_clip
    if kind == "cispo":
        function, options["clip_low"], options["clip_high"] = losses.cispo, 1.0, high - 1
    elif kwargs.get("importance_sampling_level") == "sequence":
        function = losses.gspo
    else:
        # delta bounds r from above for A > 0 too; for A < 0 where the clip does not.
        options["clip_high"] = high if delta is None else min(high, delta - 1)
        options["dual_clip"] = None if delta is None else max(delta, 1 + high)
    tokens, _ = function(log_probs, old, token_advantages.expand_as(mask), mask, **options)
    if kwargs.get("beta"):
        away = z["ref_per_token_logps"] - log_probs  # approx_kl's k3 is held below 10, TRL's is not
        tokens = tokens + kwargs["beta"] * (torch.expm1(away) - away)
    training, steps = kwargs.get("training", True), kwargs.get("current_gradient_accumulation_steps", 1)
    num_tokens = kwargs.get("num_items_in_batch", int(mask.sum()))
    if training:
        num_tokens = num_tokens * steps / kwargs.get("steps_per_generation", 1)
    mode, counts = TRL_MODES.get(kind, kind), {"num_rows": len(mask) * (steps if training else 1)}
    if kind in ("dapo", "cispo"):
        counts["num_tokens"] = num_tokens
    if kind == "dr_grpo":
        counts["loss_scale_factor"] = kwargs.get("max_completion_length", mask.shape[1])
    loss = losses.aggregate(tokens, mask, mode, **counts)  # type: ignore[arg-type]
    if kwargs.get("entropy_coef"):
        entropies = z["entropies"].requires_grad_()
        loss = loss - kwargs["entropy_coef"] * losses.aggregate(entropies, mask)
    loss.backward()
    result = {"loss": loss, "grad_per_token_logps": log_probs.grad}
    if kwargs.get("entropy_coef"):
        result["grad_entropies"] = entropies.grad
    return result


def _roll_agg(loss: Tensor, mask: Tensor, kwargs: Mapping[str, Any], weights: Tensor | None = None) -> Tensor:
    return padded.agg_loss(
        loss,
        mask,
        kwargs.get("loss_agg_mode", "seq-mean-token-mean"),
        weights,
        batch_num_tokens=kwargs.get("batch_num_tokens"),
        global_batch_size=kwargs.get("global_valid_samples"),
        peer_quirks="roll",
    )


def _roll_agg_loss(z: Inputs, kwargs: dict[str, Any]) -> Result:
    matrix = z["loss_mat"].requires_grad_()
    loss = _roll_agg(matrix, z["loss_mask"], kwargs, z["weights"] if kwargs.get("weights") else None)
    loss.backward()
    return {"loss": loss, "grad_loss_mat": matrix.grad}


def _roll_base(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """ROLL's token-mean sums what is masked, so every token has a loss here."""
    log_probs, mask = z["log_probs"].requires_grad_(), z["response_mask"][:, 1:]
    clip = kwargs.get("pg_clip", 0.2)
    in_range = kwargs.get("use_pg_clip_range")
    tokens, _ = losses.ppo_clip(
        log_probs,
        z["old_log_probs"],
        z["advantages"],
        torch.ones_like(mask),
        clip_low=kwargs.get("pg_clip_low", 0.2) if in_range else clip,
        clip_high=kwargs.get("pg_clip_high", 0.2) if in_range else clip,
        dual_clip=1 + 2 * clip if kwargs.get("dual_clip_loss") else None,
    )
    loss = _roll_agg(tokens, mask, kwargs)
    if kwargs.get("use_kl_loss"):
        kl = padded.approx_kl(log_probs, z["ref_log_probs"], "k3")
        loss = loss + kwargs["kl_loss_coef"] * _roll_agg(kl, mask, kwargs)
    result: Result = {}
    if kwargs.get("entropy_loss_coef"):
        entropy = z["entropy"].requires_grad_()
        loss = loss - kwargs["entropy_loss_coef"] * _roll_agg(entropy, mask, kwargs)
    loss.backward()
    if kwargs.get("entropy_loss_coef"):
        result["grad_entropy"] = entropy.grad
    return {**result, "loss": loss, "grad_log_probs": log_probs.grad}


LOSSES: dict[str, Function] = {
    "roll2026_agg_loss": _roll_agg_loss,
    "roll2026_policy_loss_base": _roll_base,
    "trl116_grpo_loss": _trl_grpo,
    "verl091_agg_loss": _agg_loss,
    "verl091_policy_loss_bypass_mode": _bypass_mode,
    "verl091_policy_loss_cispo": _verl(losses.cispo, "token-mean", clip_low=0.2, clip_high=0.2),
    "verl091_policy_loss_gpg": _verl(losses.reinforce, "token-mean"),
    "verl091_policy_loss_gspo": _verl(losses.gspo, "seq-mean-token-mean", clip_low=0.2, clip_high=0.2),
    "verl091_policy_loss_reinforce": _verl(losses.reinforce, "seq-mean-token-sum"),
    "verl091_policy_loss_vanilla": _verl(losses.ppo_clip, "token-mean", dual_clip=3.0),
}
