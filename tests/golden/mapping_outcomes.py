"""Recorded outcome estimators of PipelineRL, prime-rl and TRL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamadv import padded
from streamadv.algorithms.segments import moments

from .compare import Function, Inputs

Result = dict[str, Any]


def _pipelinerl(z: Inputs, kwargs: dict[str, Any]) -> Result:
    advantages = padded.compute_step_grpo_advantage(
        z["rewards"],
        z["group_id"],
        z["step_index"],
        baseline="others",
        norm_by_std=kwargs["divide_advantage_by_std"],
        epsilon=1e-4,
    )
    rollouts = list(zip(z["group_id"], z["rollout_index"].tolist(), strict=True))
    tokens: dict[str, dict[Any, float]] = {}
    for (group, rollout), count in zip(rollouts, z["num_tokens"].tolist(), strict=True):
        own = tokens.setdefault(group, {})
        own[rollout] = own.get(rollout, 0.0) + count
    means = [sum(tokens[group].values()) / len(tokens[group]) for group, _ in rollouts]
    return {"advantages": advantages, "group_tokens": means}


def _primerl(z: Inputs, kwargs: dict[str, Any]) -> Result:
    rewards, group = z["rewards"], ["one"] * len(z["rewards"])
    if "episode_agents" in kwargs:
        advantages = padded.compute_hierarchical_grpo_advantage(
            rewards, group, z["agent"], z["episode"], kwargs["episode_agents"]
        )
        return {"advantages": advantages}
    if "decay" in kwargs:
        return {"advantages": padded.compute_rae_advantage(rewards, z["agent"], None, kwargs["decay"])[0]}
    if z["variant"].startswith("max_rl"):
        mask = torch.ones(len(rewards), 1)
        pair = padded.compute_maxrl_outcome_advantage(rewards[:, None], mask, group, 0.0)
        return {"advantages": pair[0][:, 0]}
    weights = [kwargs.get(f"num_{name}_weight", 0.0) for name in ("output_tokens", "input_tokens", "turns")]
    costs = [z["output_tokens"], z["total_tokens"] - z["output_tokens"], z["turns"]]
    shaped = padded.cost_penalty(rewards, group, costs, weights)
    return {"advantages": padded.reward_norm(shaped, norm_mean_type="group", norm_std_type=None, index=group)}


def _blocks(count: int, size: int) -> list[int]:
    return [row // size for row in range(count)]


def _summed(z: Inputs) -> Tensor:
    """[B]: weighted sum of the verdicts there are, NaN for a row without any."""
    given = z["rewards_per_func"]
    total = (given.double() * z["reward_weights"]).nansum(1)
    return torch.where(given.isnan().all(1), torch.nan, total)


def _trl_grpo(z: Inputs, kwargs: dict[str, Any]) -> Result:
    given, size = z["rewards_per_func"], kwargs["num_generations"]
    index = _blocks(len(given), size)
    offsets = torch.arange(0, len(given) + 1, size)
    if kwargs["multi_objective_aggregation"] == "normalize_then_sum":
        advantages = padded.compute_normalize_then_sum_advantage(given, index, z["reward_weights"])
        return {"advantages": advantages, "std_rewards": _gdpo_std(z, index)}
    rewards = _summed(z)
    known = ~rewards.isnan()
    scale = {"none": None}.get(kwargs["scale_rewards"], kwargs["scale_rewards"])
    chosen = padded.reward_norm(
        rewards[known],
        norm_mean_type="group",
        norm_std_type=scale,  # type: ignore[arg-type]
        index=[label for label, is_known in zip(index, known.tolist(), strict=True) if is_known],
        epsilon=1e-4,
    )
    advantages = torch.zeros(len(rewards)).masked_scatter(known, chosen)
    whole = torch.tensor([0, len(rewards)]) if scale == "batch" else offsets
    stats = moments(rewards, whole, known.double())
    none = 0.0 if len(rewards) == 1 or (size == 1 and scale != "batch") else torch.nan
    std = torch.where(stats.size > 1, stats.std, none)
    return {"advantages": advantages, "std_rewards": std}


def _trl116_grpo(z: Inputs, kwargs: dict[str, Any]) -> Result:
    options = {**kwargs, "multi_objective_aggregation": kwargs["aggregation"]}
    return _trl_grpo({**z, "rewards_per_func": z["rewards_per_func_nan"]}, options)


def _gdpo_std(z: Inputs, index: list[int]) -> Tensor:
    """[B]: std over the batch of the summed z-scores, which only TRL's log shows."""
    given = z["rewards_per_func"]
    total = torch.zeros(len(given), dtype=torch.float64)
    for values, weight in zip(given.T, z["reward_weights"].tolist(), strict=True):
        known = ~values.isnan()
        labels = [label for label, is_known in zip(index, known.tolist(), strict=True) if is_known]
        scaled = padded.reward_norm(
            values[known], norm_mean_type="group", norm_std_type="group", index=labels, epsilon=1e-4
        )
        total += weight * torch.zeros(len(given)).masked_scatter(known, scaled)
    stats = moments(total, torch.tensor([0, len(total)]), (~given.isnan().all(1)).double())
    alone = 0.0 if len(total) == 1 else torch.nan
    return torch.where(stats.size > 1, stats.std, alone)


def _trl_rloo(z: Inputs, kwargs: dict[str, Any]) -> Result:
    rewards, size = _summed(z), kwargs["num_generations"]
    if kwargs["reward_clip_range"] is not None:
        rewards = rewards.clamp(*kwargs["reward_clip_range"])
    if kwargs["beta"]:
        kl = padded.approx_kl(z["old_per_token_logps"], z["ref_per_token_logps"], "k1")
        rewards = rewards - kwargs["beta"] * padded.masked_sum(kl, z["completion_mask"], 1)
    known = ~rewards.isnan()
    index = [label for label, yes in zip(_blocks(len(rewards), size), known.tolist(), strict=True) if yes]
    chosen, _ = padded.compute_rloo_outcome_advantage(
        rewards[known][:, None], torch.ones(int(known.sum()), 1), index
    )
    values = chosen[:, 0]
    if kwargs["normalize_advantages"]:
        together = torch.tensor([index.count(label) > 1 for label in index], dtype=torch.bool)
        scaled = padded.reward_norm(
            values[together], norm_mean_type="batch", norm_std_type="batch", n_sample=1, epsilon=1e-4
        )
        values = torch.zeros_like(values).masked_scatter(together, scaled)
    return {"advantages": torch.zeros(len(rewards)).masked_scatter(known, values)}


OUTCOMES: dict[str, Function] = {
    "pipelinerl_advantages": _pipelinerl,
    "primerl_advantages": _primerl,
    "trl116_grpo_advantages": _trl116_grpo,
    "trl_grpo_advantages": _trl_grpo,
    "trl_rloo_advantages": _trl_rloo,
}
