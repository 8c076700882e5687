"""Recorded losses and their gradients in terms of `streamadv.losses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from streamadv import losses

from .compare import Function, Inputs

Result = dict[str, Any]
TOKENS = ("log_prob", "old_log_prob", "advantages", "rollout_is_weights")
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


def _agg_loss(z: Inputs, kwargs: dict[str, Any]) -> Result:
    matrix = z["loss_mat"].requires_grad_()
    loss = _aggregated(matrix, z["loss_mask"], kwargs["loss_agg_mode"], kwargs)
    loss.backward()
    return {"loss": loss, "grad_loss_mat": matrix.grad}


LOSSES: dict[str, Function] = {
    "verl091_agg_loss": _agg_loss,
    "verl091_policy_loss_cispo": _verl(losses.cispo, "token-mean", clip_low=0.2, clip_high=0.2),
    "verl091_policy_loss_gpg": _verl(losses.reinforce, "token-mean"),
    "verl091_policy_loss_gspo": _verl(losses.gspo, "seq-mean-token-mean", clip_low=0.2, clip_high=0.2),
    "verl091_policy_loss_reinforce": _verl(losses.reinforce, "seq-mean-token-sum"),
    "verl091_policy_loss_vanilla": _verl(losses.ppo_clip, "token-mean", dual_clip=3.0),
}
