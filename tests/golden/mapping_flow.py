"""ROLL's RLVR pipeline by domain: streamadv's padded functions in ROLL's order, one domain after another."""

from __future__ import annotations

from typing import Any

import torch

from streamadv import padded

from .compare import Function, Inputs


def _domain_flow(z: Inputs, kwargs: dict[str, Any]) -> dict[str, Any]:
    order = sorted(range(len(z["prompt_id"])), key=lambda row: int(z["prompt_id"][row]))
    domains = list(dict.fromkeys(str(z["domain"][row]) for row in order))
    coefficient = kwargs["kl"]["init_kl_coef"]
    rows_of = {domain: [row for row in order if str(z["domain"][row]) == domain] for domain in domains}
    outputs: dict[str, list[torch.Tensor]] = {}
    metrics: dict[str, float] = {}
    for domain, rows in rows_of.items():
        arrays = {name: z[name][rows] for name in z if name not in ("prompt_id", "domain", "variant")}
        result, of_domain, coefficient = _one_domain(arrays, kwargs, coefficient)
        for name, values in result.items():
            outputs.setdefault(name, []).append(values)
        metrics |= {f"{domain}/{name}": value for name, value in of_domain.items()}
    position = torch.tensor([row for rows in rows_of.values() for row in rows]).argsort()
    ordered = {name: torch.cat(parts)[position] for name, parts in outputs.items()}
    return {**ordered, "kl_coef_after": coefficient, "domain_order": domains, "metrics": metrics}


def _one_domain(
    arrays: dict[str, Any], kwargs: dict[str, Any], coefficient: float
) -> tuple[dict[str, torch.Tensor], dict[str, float], float]:
    """Outputs, metrics, and the coefficient after the controller's step."""
    estimator = kwargs.get("adv_estimator", "reinforce")
    mask, mask_metrics = padded.sample_level_mask(
        arrays["response_mask"],
        arrays["scores"],
        n_sample=kwargs["n_sample"],
        max_response_length=arrays["response_mask"].shape[1] - 1,
        use_difficulty_mask=kwargs.get("difficulty_mask", False),
        max_len_mask=kwargs.get("max_len_mask", False),
    )
    shaped, reward_metrics = padded.reward_postprocess(
        {"response_level_rewards": arrays["response_level_rewards"]},
        adv_estimator=estimator,
        **{name: kwargs.get(name) for name in ("norm_mean_type", "norm_std_type", "reward_clip", "n_sample")},
        peer_quirks="roll",
    )
    charged, kl_metrics = padded.compute_token_reward(
        {**arrays, **shaped},
        add_token_level_kl=kwargs.get("add_token_level_kl", False),
        kl_coef=coefficient,
        kl_penalty=kwargs.get("kl_penalty", "kl"),
        reward_clip=kwargs.get("reward_clip"),
        peer_quirks="roll",
    )
    final, advantage_metrics = padded.compute_advantage(
        {**arrays, **charged, "response_mask": mask},
        adv_estimator=estimator,
        gamma=kwargs.get("gamma", 1.0),
        lambd=kwargs.get("lambd", 0.95),
        **{name: kwargs.get(name, False) for name in ("whiten_rewards", "whiten_advantages")},
        advantage_clip=kwargs.get("advantage_clip"),
        peer_quirks="roll",
    )
    target = kwargs["kl"].get("target_kl")
    if target is not None:
        coefficient = padded.adapted_coefficient(
            *(coefficient, kl_metrics["critic/kl"], target, kwargs["kl"]["kl_horizon"], len(mask)),
            peer_quirks="roll",
        )
    outputs = {name: final[name] for name in ("advantages", "returns", "token_level_rewards")}
    outputs |= {
        "final_response_mask": mask[:, 1:],
        "response_level_rewards": shaped["response_level_rewards"],
    }
    return outputs, {**mask_metrics, **reward_metrics, **kl_metrics, **advantage_metrics}, coefficient


FLOWS: dict[str, Function] = {"roll2026_rlvr_domain_flow": _domain_flow}
