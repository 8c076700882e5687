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
    "sapo": "seq-mean-token-mean",
    "vespo": "token-mean",
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


def _verl(
    function: Callable[..., losses.Loss], mode: str, *, names: Mapping[str, str] | None = None,
    fixed_mode: str | None = None, all_rows: bool = False, **defaults: Any,
) -> Function:  # fmt: skip
    """names: of verl's options, and ours. fixed_mode: verl ignores loss_agg_mode. all_rows: without tokens too."""

    def call(z: Inputs, kwargs: dict[str, Any]) -> Result:
        mask = z["response_mask"].bool() if kwargs.get("bool_mask") else z["response_mask"]
        options: dict[str, Any] = dict(defaults)
        for name in (name for name in defaults if name.endswith(("low", "high"))):
            value = kwargs.get(f"config.clip_ratio_{name.removeprefix('clip_')}", 0.2)
            options[name] = kwargs["config.clip_ratio"] if value is None else value
        for theirs, ours in (names or {}).items():
            options[ours] = kwargs.get(theirs, options.get(ours))
            if ours == "coefficient" and options[ours] is None:
                options[ours] = 1.0
            if options[ours] is None:
                raise OptionError(f"{theirs} is missing")
        if "band_low" in options:
            options["band"] = options.pop("band_low"), options.pop("band_high")
        if "dual_clip" in options:
            options["dual_clip"] = kwargs.get("config.clip_ratio_c", options["dual_clip"])

        def computed(inputs: Mapping[str, Tensor], suffix: str = "") -> Result:
            log_prob = inputs["log_prob"].requires_grad_()
            if kwargs.get("rollout_is_weights"):
                options["weights"] = inputs["rollout_is_weights"]
            if "torch_seed" in kwargs:
                torch.manual_seed(kwargs["torch_seed"])
            tokens, metrics = function(
                log_prob, inputs["old_log_prob"], inputs["advantages"], mask, **options
            )
            if all_rows:
                loss = losses.aggregate(tokens, mask, fixed_mode, num_rows=len(mask))  # type: ignore[arg-type]
            else:
                loss = _aggregated(tokens, mask, fixed_mode or kwargs.get("loss_agg_mode", mode), kwargs)
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
    if kwargs["loss_type"] == "sapo" and kwargs.get("importance_sampling_level") == "sequence":
        raise NotOfferedError("SAPO of a row's ratio")
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
    if kind == "sapo":
        function = losses.sapo
        ours = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}
        options = {name: kwargs[theirs] for name, theirs in ours.items() if theirs in kwargs} | {
            name: options[name] for name in options if name == "weights"
        }
    elif kind == "vespo":
        function = losses.vespo
        options.pop("clip_low"), options.pop("clip_high")
        options |= _vespo_options(kwargs, "vespo_")
    elif kind == "cispo":
        function, options["clip_low"], options["clip_high"] = losses.cispo, 1.0, high - 1
    elif kwargs.get("importance_sampling_level") == "sequence":
        function = losses.gspo
    else:
        # delta bounds r from above for A > 0 too; for A < 0 where the clip does not.
        options["clip_high"] = high if delta is None else min(high, delta - 1)
        options["dual_clip"] = None if delta is None else max(delta, 1 + high)
    tokens, _ = function(log_probs, old, token_advantages.expand_as(mask), mask, **options)
    if kwargs.get("top_entropy_quantile", 1.0) < 1:
        tokens = tokens * (
            losses.high_entropy_mask(z["entropies"], mask, kwargs["top_entropy_quantile"]) != 0
        )
    if kwargs.get("beta"):
        away = z["ref_per_token_logps"] - log_probs  # approx_kl's k3 is held below 10, TRL's is not
        kl = torch.expm1(away) - away
        tokens = tokens + kwargs["beta"] * (
            kl * (log_probs - old).exp() if kwargs.get("use_bias_correction_kl") else kl
        )
    training, steps = kwargs.get("training", True), kwargs.get("current_gradient_accumulation_steps", 1)
    num_tokens = kwargs.get("num_items_in_batch", int(mask.sum()))
    if training:
        num_tokens = num_tokens * steps / kwargs.get("steps_per_generation", 1)
    mode, counts = TRL_MODES.get(kind, kind), {"num_rows": len(mask) * (steps if training else 1)}
    if kind in ("dapo", "cispo", "vespo"):
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


def _vespo_options(kwargs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    k, lambdas = (
        tuple(
            kwargs.get(f"{prefix}{name}_{side}", default)
            for side, default in zip(("pos", "neg"), defaults, strict=True)
        )
        for name, defaults in (("k", (2.0, 3.0)), ("lambda", (3.0, 2.0)))
    )
    return {"k": k, "lambdas": lambdas}


def _gamma_weights(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """phi is the gradient over minus the advantage, of which the sign counts; 1 in a row without tokens."""
    mask = z["completion_mask"] * z["tool_mask"]
    log_probs = z["per_token_logps"].requires_grad_()
    advantages = torch.where(z["advantages"][:, None] >= 0, 1.0, -1.0).expand_as(mask)
    weights = kwargs.get("importance_sampling_ratio")
    tokens, _ = losses.vespo(
        log_probs, z["old_per_token_logps"], advantages, torch.ones_like(mask) if weights else mask,
        **_vespo_options(kwargs), weights=z[weights] if weights else None,
    )  # fmt: skip
    if weights:
        raise NotOfferedError("TRL sums the importance ratios of masked tokens, which have 1 in its trainer")
    tokens.sum().backward()
    assert log_probs.grad is not None
    phi = torch.where(mask != 0, -log_probs.grad / advantages, torch.nan).nanmean(1, keepdim=True)
    known = ~phi.isnan()
    return {"phi": torch.where(known, phi, 1.0)}


def _trl_rows(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """GMPO and RLOO: losses of rows, all of which count."""
    log_probs, is_gmpo = z["per_token_logps"].requires_grad_(), "gmpo" in z["function"]
    mask = z["completion_mask"] * z["tool_mask"] if is_gmpo else z["completion_mask"]
    old = log_probs.detach() if z["old_per_token_logps"] is None else z["old_per_token_logps"]
    function = losses.gmpo if is_gmpo else losses.row_clip
    narrowed = mask
    if kwargs.get("top_entropy_quantile"):
        narrowed = losses.high_entropy_mask(z["entropies"], mask, kwargs["top_entropy_quantile"])
    tokens, _ = function(
        log_probs, old, z["advantages"][:, None].expand_as(mask), narrowed,
        clip_low=kwargs["epsilon_low"], clip_high=kwargs["epsilon_high"],
    )  # fmt: skip
    rows = len(mask) * kwargs.get("current_gradient_accumulation_steps", 1)
    loss = losses.aggregate(tokens, narrowed, "seq-mean-token-mean", num_rows=rows)
    if is_gmpo:  # a row without tokens has the ratio 1 there
        empty = (narrowed != 0).sum(1) == 0
        loss = loss - z["advantages"][empty].sum() / rows
    if kwargs.get("beta"):
        away = z["ref_per_token_logps"] - log_probs
        loss = loss + kwargs["beta"] * losses.aggregate(
            torch.expm1(away) - away, mask, "seq-mean-token-mean", num_rows=rows
        )
    loss.backward()
    return {"loss": loss, "grad_per_token_logps": log_probs.grad}


def _entropy_mask(z: Inputs, kwargs: dict[str, Any]) -> Result:
    mask = z["completion_mask"] * z["tool_mask"]
    return {"mask": losses.high_entropy_mask(z["entropies"], mask, 1 - kwargs["threshold"]) != 0}


def _entropy(z: Inputs, kwargs: dict[str, Any]) -> Result:
    logits = z["logits"].requires_grad_()
    entropies = losses.entropy(logits)
    loss = losses.aggregate(entropies, z["response_mask"], kwargs.get("loss_agg_mode", "token-mean"))
    loss.backward()
    found = {
        "entropy": entropies,
        "sum_pi_squared": losses.sum_pi_squared(logits),
        "grad_logits": logits.grad,
    }
    return {"loss": loss, **found}


def _value_loss(z: Inputs, kwargs: dict[str, Any]) -> Result:
    vpreds, is_roll = z["vpreds"].requires_grad_(), z["response_mask"].shape != z["vpreds"].shape
    mask = z["response_mask"][:, 1:] if is_roll else z["response_mask"]
    clip = kwargs.get("value_clip") if is_roll else kwargs["cliprange_value"]
    tokens, metrics = losses.value_clip(vpreds, z["values"], z["returns"], mask, clip=clip)
    if is_roll:
        loss = losses.aggregate(tokens, mask, "seq-mean-token-mean", num_rows=len(mask))
    else:
        loss = _aggregated(tokens, mask, kwargs.get("loss_agg_mode", "token-mean"), kwargs)
    loss.backward()
    return {"loss": loss, "grad_vpreds": vpreds.grad, "clipfrac": metrics["critic/vf_clipfrac"]}


def _ppo_loss(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """verl's actor: the policy's loss, less the entropy's, plus the KL's, each added up alike."""
    log_prob, mask, mode = (
        z["log_prob"].requires_grad_(),
        z["response_mask"],
        kwargs.get("config.loss_agg_mode", "token-mean"),
    )
    function = {"gspo": losses.gspo, "cispo": losses.cispo}.get(
        kwargs.get("config.policy_loss.loss_mode", ""), losses.ppo_clip
    )
    options = {"clip_low": 0.2, "clip_high": 0.2}
    if kwargs.get("rollout_is_weights"):
        options["weights"] = z["rollout_is_weights"]
    tokens, _ = function(log_prob, z["old_log_prob"], z["advantages"], mask, **options)
    result: Result = {}
    loss = _aggregated(tokens, mask, mode, kwargs)
    if kwargs.get("entropy"):
        entropies = z["entropy"].requires_grad_()
        loss = loss - kwargs.get("config.entropy_coeff", 0.0) * _aggregated(entropies, mask, mode, kwargs)
    if kwargs.get("config.use_kl_loss"):
        kl = padded.approx_kl(log_prob, z["ref_log_prob"], kwargs.get("config.kl_loss_type", "low_var_kl"))
        loss = loss + kwargs.get("config.kl_loss_coef", 0.001) * _aggregated(kl, mask, mode, kwargs)
    loss.backward()
    if kwargs.get("entropy"):
        result["grad_entropy"] = entropies.grad
    return {**result, "loss": loss, "grad_log_prob": log_prob.grad}


def _distillation(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """One teacher's estimate, as advantages or as the loss itself, with the task's loss or alone."""
    own = {name.removeprefix("config.distillation."): value for name, value in kwargs.items()}
    if own.get("policy_loss_mode", "vanilla") != "vanilla":
        raise OptionError("another policy loss")
    log_prob, old, mask = z["log_prob"].requires_grad_(), z["old_log_prob"], z["response_mask"]
    penalty, mode = own.get("loss_mode", "k3"), kwargs.get("config.loss_agg_mode", "token-mean")
    weights = z["rollout_is_weights"] if kwargs.get("rollout_is_weights") else None
    tokens, _ = losses.distill(
        log_prob, z["teacher_log_prob"], mask, penalty=penalty, bound=own.get("loss_max_clamp", 10.0)
    )
    if own.get("use_policy_gradient", True):
        clips = {f"clip_{side}": own.get(f"clip_ratio_{side}", 0.2) for side in ("low", "high")}
        tokens, _ = losses.ppo_clip(log_prob, old, -tokens.detach(), mask, weights=weights, **clips)
    elif penalty == "k1":
        raise OptionError("k1 as a loss has no gradient in the mean")
    loss = _aggregated(tokens, mask, mode, kwargs)
    if own.get("use_task_rewards", True):
        task, _ = losses.ppo_clip(log_prob, old, z["advantages"], mask, weights=weights)
        loss = _aggregated(task, mask, mode, kwargs) + own.get("distillation_loss_coef", 1.0) * loss
    loss.backward()
    return {"loss": loss, "grad_log_prob": log_prob.grad}


def _top_k(z: Inputs, kwargs: dict[str, Any]) -> Result:
    logits, mask = z["student_logits"].requires_grad_(), torch.ones(len(z["student_logits"]))
    tokens, _ = losses.distill_top_k(
        logits,
        z["teacher_topk_log_probs"],
        z["teacher_topk_ids"],
        mask,
        least=kwargs.get("log_prob_min_clamp", -10.0),
    )
    tokens.sum().backward()
    return {"distillation_losses": tokens, "grad_student_logits": logits.grad}


def _divergence(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """ROLL's over the whole vocabulary; a token that the teacher rules out counts 0 there."""
    kind = kwargs["kd_objective"]
    if kind not in ("forward_kl", "reverse_kl"):
        raise NotOfferedError(
            "skewed and adaptive divergences; Jensen-Shannon there adds 1e-9 to probabilities"
        )
    logits, out = z["logits"].requires_grad_(), z["teacher_inf_mask"] != 0
    tokens, _ = losses.distill_top_k(
        logits, z["teacher_log_probs"].masked_fill(out, -torch.inf if kind == "forward_kl" else 0.0),
        torch.arange(logits.shape[-1]).expand_as(logits), torch.ones(len(logits)), least=None,
        beta=float(kind == "reverse_kl"), temperature=kwargs.get("kd_temperature", 1.0),
    )  # fmt: skip
    if kind == "reverse_kl" and out.any():
        logs = (logits / kwargs.get("kd_temperature", 1.0)).log_softmax(-1)
        tokens = tokens - torch.where(out, logs.exp() * logs, 0.0).sum(-1)
    tokens.sum().backward()
    return {"kld": tokens, "grad_logits": logits.grad}


def _roll_pg(z: Inputs, kwargs: dict[str, Any]) -> Result:
    """ROLL's policy-gradient variants. Its token-mean sums what is masked, so every token has a loss here."""
    own = {name.removeprefix("actor_train."): value for name, value in kwargs.items()}
    if set(own) & {"final_response_mask", "train_infer.is_weight", "ratio_type", "difficulty_loss_weight"}:
        raise NotOfferedError("weights of rows and filters of a whole worker; ratios of segments")
    if own.get("rows_share_traj"):
        raise OptionError("ROLL's metrics need a score for each row")
    log_probs, mask = z["log_probs"].requires_grad_(), z["response_mask"][:, 1:]
    given = (log_probs, z["old_log_probs"], z["advantages"], torch.ones_like(mask))
    kind, low, high = (
        own.get("pg_variant", "vanilla"),
        own.get("cispo_epsilon_low", 0.1),
        own.get("cispo_epsilon_high", 0.1),
    )
    calls: dict[str, Callable[[], losses.Loss]] = {
        "vanilla": lambda: losses.reinforce(*given),
        "ppo": lambda: losses.ppo_clip(*given, dual_clip=1.4 if own.get("dual_clip_loss") else None),
        "tis": lambda: losses.cispo(
            *given, clip_low=1 - own.get("tis_lower_bound", 0.0), clip_high=own.get("tis_upper_bound", 1.0) - 1
        ),
        "topr": lambda: losses.topr(
            *given, scores=z["scores"][:, None], positive_weight=own.get("topr_positive_weight", 1.0),
            negative_weight=own.get("topr_negative_weight", 1.0),
        ),
        "cispo": lambda: losses.cispo(
            *given, clip_low=low, clip_high=high, unified_mask=own.get("cispo_use_unified_mask", False)
        ),
        "kimi15": lambda: losses.dro(*given, beta=own.get("kimi15_tau", 0.1)),
    }  # fmt: skip
    if kind not in calls:
        raise OptionError(f"pg_variant is {kind!r}")
    kwargs = {"global_valid_samples": int((mask != 0).any(1).sum()), **kwargs}
    loss = _roll_agg(calls[kind]()[0], mask, kwargs)
    if kwargs.get("use_kl_loss"):
        kl = padded.approx_kl(log_probs, z["ref_log_probs"], "k3")
        loss = loss + kwargs["kl_loss_coef"] * _roll_agg(kl, mask, kwargs)
    result: Result = {}
    if kwargs.get("entropy_loss_coef"):
        entropies = z["entropy"].requires_grad_()
        loss = loss - kwargs["entropy_loss_coef"] * _roll_agg(entropies, mask, kwargs)
    loss.backward()
    if kwargs.get("entropy_loss_coef"):
        result["grad_entropy"] = entropies.grad
    return {**result, "loss": loss, "grad_log_probs": log_probs.grad}


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


DPPO = {"low": 0.2, "high": 0.2, "ratio_bound": 3.0, "names": {"config.clip_ratio_c": "ratio_bound"}}
CLIP_COV = {"clip_cov_ratio": "share", "clip_cov_lb": "band_low", "clip_cov_ub": "band_high"}
KL_COV = {"kl_cov_ratio": "share", "ppo_kl_coef": "coefficient"}

LOSSES: dict[str, Function] = {
    "roll2026_distill_divergence": _divergence,
    "roll2026_policy_loss_agentic_pg": _roll_pg,
    "roll2026_policy_loss_rlvr_pg": _roll_pg,
    "roll2026_value_loss": _value_loss,
    "trl116_gamma_weights": _gamma_weights,
    "trl116_gmpo_loss": lambda z, kwargs: _trl_rows({**z, "function": "gmpo"}, kwargs),
    "trl116_high_entropy_mask": _entropy_mask,
    "trl116_rloo_loss": lambda z, kwargs: _trl_rows({**z, "function": "rloo"}, kwargs),
    "verl091_distillation_loss": _distillation,
    "verl091_entropy_loss": _entropy,
    "verl091_forward_kl_topk": _top_k,
    "verl091_policy_loss_clip_cov": _verl(
        losses.clip_cov,
        "token-mean",
        clip_low=0.2,
        clip_high=0.2,
        share=2e-4,
        band_low=1.0,
        band_high=5.0,
        names={f"config.policy_loss.{theirs}": ours for theirs, ours in CLIP_COV.items()},
    ),
    "verl091_policy_loss_dppo_kl": _verl(losses.dppo, "token-mean", divergence="kl", **DPPO),
    "verl091_policy_loss_dppo_tv": _verl(losses.dppo, "token-mean", divergence="tv", **DPPO),
    "verl091_policy_loss_dro": _verl(losses.dro, "token-mean", names={"config.policy_loss.dro_beta": "beta"}),
    "verl091_policy_loss_geo_mean": _verl(
        losses.gmpo,
        "token-mean",
        fixed_mode="seq-mean-token-mean",
        all_rows=True,
        clip_low=0.2,
        clip_high=0.2,
    ),
    "verl091_policy_loss_kl_cov": _verl(
        losses.kl_cov,
        "token-mean",
        share=2e-4,
        coefficient=0.1,
        names={f"config.policy_loss.{theirs}": ours for theirs, ours in KL_COV.items()},
    ),
    "verl091_policy_loss_sapo": _verl(
        losses.sapo,
        "token-mean",
        fixed_mode="seq-mean-token-mean",
        tau_positive=1.0,
        tau_negative=1.05,
        names={"config.tau_pos": "tau_positive", "config.tau_neg": "tau_negative"},
    ),
    "verl091_ppo_loss": _ppo_loss,
    "verl091_value_loss": _value_loss,
    "roll2026_agg_loss": _roll_agg_loss,
    "roll2026_policy_loss_base": _roll_base,
    "trl116_grpo_loss": _trl_grpo,
    "verl091_agg_loss": _agg_loss,
    "verl091_policy_loss_bypass_mode": _bypass_mode,
    "verl091_policy_loss_cispo": _verl(losses.cispo, "token-mean", clip_low=0.2, clip_high=0.2),
    "verl091_policy_loss_gpg": _verl(losses.reinforce, "token-mean"),
    "verl091_policy_loss_gspo": _verl(losses.gspo, "seq-mean-token-mean", clip_low=0.2, clip_high=0.2),
    "verl091_policy_loss_reinforce": _verl(losses.reinforce, "seq-mean-token-sum"),
    "verl091_policy_loss_vanilla": _verl(
        losses.ppo_clip, "token-mean", clip_low=0.2, clip_high=0.2, dual_clip=3.0
    ),
}
