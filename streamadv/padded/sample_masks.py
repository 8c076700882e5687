"""What to train on, and how much: masks and weights of rows, and data from older policies (AReaL, TRL, slime)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from ..algorithms.arguments import (
    AnyMask,
    Count,
    Elements,
    Labels,
    Length,
    Mask,
    Rows,
    Threshold,
    Tokens,
    Values,
    Versions,
)
from ..algorithms.rewards import difficulty_factor, length_factor
from ..algorithms.segments import segment_max, segment_min, spread
from ..errors import OptionError
from .entrance import checked, unchecked
from .layout import group_order, ungrouped
from .rewards import Metrics, group_scores


@checked
def difficulty_mask(
    scores: Rows,
    *,
    n_sample: Count | None = None,
    index: Labels | None = None,
    low_threshold: Threshold = 0.1,
    high_threshold: Threshold = 0.95,
) -> Tensor:
    """[B] float32: 1 where the group's mean score lies strictly between the thresholds.

    A group of one gets 1, because one score does not measure difficulty (ROLL: the same for n_sample 1).
    """
    if n_sample is None and index is None:
        raise OptionError("n_sample and index are missing: the difficulty of a group needs one of them")
    if not low_threshold < high_threshold:
        raise OptionError(f"low_threshold {low_threshold} is not below high_threshold {high_threshold}")
    mean, size = group_scores(scores, n_sample, index)
    between = (mean > low_threshold) & (mean < high_threshold)
    return (between | (size < 2)).to(torch.float32)


@checked
def dapo_filter_groups(rewards: Rows, index: Labels) -> Tensor:
    """[B] float32: 0 for the rows of a group in which all `rewards` [B] are equal, so that none teaches anything.

    DAPO's dynamic sampling, arXiv:2503.14476 section 3.2; verl's filter_groups, where `rewards` is the row's reward or
    another metric. A group of one gets 1, as in verl.
    """
    order, offsets = group_order(index, rewards.device)
    ordered = rewards[order]
    is_same = segment_max(ordered, offsets) == segment_min(ordered, offsets)
    kept = ~(is_same & (offsets.diff() > 1))
    return ungrouped(spread(kept.double(), offsets, len(rewards)), order)


@checked
def pf_ppo_weights(
    scores: Rows, reweight_method: Literal["pow", "max_min", "max_random"] = "pow", weight_pow: float = 2.0
) -> Tensor:
    """[B] float32: how likely PF-PPO draws a row when it samples the batch anew (arXiv:2409.06957; verl).

    pow: |score| ** weight_pow. max_min: 1 for rows with the batch's greatest or least score, else 0. max_random: 0.4
    for the greatest, else 0.1. Plus 1e-8. `torch.multinomial(weights, B, replacement=True, generator=...)` draws.
    """
    values = scores.to(torch.float32)
    if not len(values):
        return values
    if reweight_method == "pow":
        weights = values.abs().pow(weight_pow)
    elif reweight_method == "max_min":
        weights = ((values == values.max()) | (values == values.min())).to(torch.float32)
    else:
        weights = torch.where(values == values.max(), 0.4, 0.1)
    if not weights.isfinite().all():
        raise OptionError(f"weight_pow is {weight_pow}, which makes a weight infinite: take another")
    return weights + 1e-8


@checked
def sample_level_mask(
    response_mask: Mask,
    scores: Rows,
    *,
    max_response_length: Length,
    n_sample: Count | None = None,
    index: Labels | None = None,
    max_len_mask: bool = False,
    use_difficulty_mask: bool = False,
    difficulty_low_threshold: Threshold = 0.0,
    difficulty_high_threshold: Threshold = 1.0,
    error_max_len_clip: bool = False,
    error_max_len_threshold: Threshold = float("inf"),
) -> tuple[Tensor, Metrics]:
    """(`response_mask` [B, T] float32 without the rows that a filter drops, the share of rows per filter that stay).

    max_len_mask drops rows of max_response_length tokens; use_difficulty_mask applies `difficulty_mask`;
    error_max_len_clip drops wrong answers of error_max_len_threshold tokens or more. A score of 1 is right and 0 is
    wrong; error_max_len_clip drops any other score, as ROLL does.
    """
    rows = len(scores)
    lengths = (response_mask != 0).sum(1)
    all_rows = torch.ones(rows, device=response_mask.device)
    row_masks = dict.fromkeys(("max_len", "difficulty", "error_len"), all_rows)
    if max_len_mask:
        row_masks["max_len"] = (lengths != max_response_length).float()
    if use_difficulty_mask:
        row_masks["difficulty"] = unchecked(difficulty_mask)(
            scores,
            n_sample=n_sample,
            index=index,
            low_threshold=difficulty_low_threshold,
            high_threshold=difficulty_high_threshold,
        )
    if error_max_len_clip:
        is_short = lengths < error_max_len_threshold
        row_masks["error_len"] = ((scores == 1) | ((scores == 0) & is_short)).float()
    final = row_masks["max_len"] * row_masks["difficulty"] * row_masks["error_len"]
    metrics = {f"actor/{name}_mask_ratio": _mean(mask) for name, mask in row_masks.items()}
    metrics |= {
        "actor/final_mask_ratio": _mean(final),
        "actor/samples_total": float(rows),
        "actor/samples_used": final.sum().item(),
    }
    return response_mask * final[:, None], metrics


@checked
def sample_weights(response_mask: Mask, difficulty: Rows | None = None, *, by_length: bool = False) -> Tensor:
    """[B] float32 weights that sum to B: harder prompts and shorter responses count more.

    difficulty [B] in 0 .. 1: factor 0.5 + 1.5 d. by_length: factor 1.5 - (len - min) / (max - min), 1.5 for equal
    lengths. ROLL computes a difficulty factor that never takes effect.
    """
    lengths = (response_mask != 0).sum(1).to(torch.float64)
    weights = torch.ones_like(lengths)
    if difficulty is not None:
        weights = weights * difficulty_factor(difficulty.to(torch.float64))
    if by_length:
        weights = weights * length_factor(lengths, torch.ones_like(lengths))
    if difficulty is None and not by_length:
        return weights.to(torch.float32)
    return (weights * len(weights) / weights.sum().clamp(min=1e-8)).to(torch.float32)


@checked
def off_policy_sequence_mask(
    advantages: Annotated[Tensor, Values(("B", 1), ("B", "T"))],
    log_probs: Tokens,
    behaviour_log_probs: Tokens,
    mask: Mask,
    threshold: Threshold,
) -> Tensor:
    """[B, T] bool: False where the advantage is negative and the row's mean(behaviour - new) exceeds `threshold`.

    So the update does not push further down tokens that the policy has left (DeepSeek-V3.2, arXiv:2512.02556; TRL,
    slime). advantages [B, T] or [B, 1]; log-probs and mask [B, T].
    """
    counted = mask != 0
    drift = torch.where(counted, (behaviour_log_probs - log_probs).to(torch.float64), 0.0).sum(1)
    drift = drift / counted.sum(1).clamp(min=1)
    return ((advantages >= 0) | (drift <= threshold)[:, None]).expand_as(mask)


@checked
def proximal_log_probs(
    behaviour_log_probs: Elements,
    log_probs: Elements,
    versions: Versions,
    current_version: int,
    method: Literal["loglinear", "linear", "rollout"] = "loglinear",
) -> Tensor:
    """Log-probs of the policy one version back, interpolated between behaviour and current instead of computed (AReaL).

    alpha = (current_version - 1 - v) / (current_version - v), held in 0 .. 1; 0 where the version v is negative or not
    older. loglinear: (1 - alpha) * behaviour + alpha * current; linear: the same over probabilities; rollout:
    behaviour. All tensors have one shape.
    """
    if method == "rollout":
        return behaviour_log_probs
    age = (current_version - versions).to(torch.float64)
    alpha = torch.where((versions >= 0) & (age > 0), (age - 1) / age.clamp(min=1), 0.0).clamp(0, 1)
    old, new = behaviour_log_probs.to(torch.float64), log_probs.to(torch.float64)
    if method == "loglinear":
        return (old + alpha * (new - old)).to(torch.float32)
    return ((1 - alpha) * old.exp() + alpha * new.exp() + 1e-10).log().to(torch.float32)


@checked
def version_staleness(versions: Versions, mask: AnyMask, current_version: int) -> dict[str, float]:
    """Average, greatest and least age of trainable tokens, in policy versions; {} without any.

    staleness_theta counts from the policy being trained, staleness_proximal from the version before. Tokens with a
    negative version do not count.
    """
    counted = versions[(mask != 0) & (versions >= 0)].to(torch.float64)
    if not len(counted):
        return {}
    metrics = {
        "n_valid_generated_tokens": float(len(counted)),
        "v_theta": float(current_version),
        "v_proximal": float(current_version - 1),
    }
    for name, reference in (("proximal", current_version - 1), ("theta", current_version)):
        age = reference - counted
        metrics[f"sample_staleness_{name}_avg"] = age.mean().item()
        metrics[f"sample_staleness_{name}_max"] = age.max().item()
        metrics[f"sample_staleness_{name}_min"] = age.min().item()
    return metrics


def _mean(values: Tensor) -> float:
    return values.mean().item() if len(values) else 1.0
