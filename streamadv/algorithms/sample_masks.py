"""Which rollouts are worth training on, and how much: masks and weights of whole rows, and length penalties."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ..errors import OptionError
from .arguments import Count, Flags, Labels, Length, Mask, Rows, Threshold
from .padded_rewards import Metrics, group_scores


def difficulty_mask(
    scores: Rows,
    *,
    n_sample: Count | None = None,
    index: Labels | None = None,
    low_threshold: Threshold = 0.1,
    high_threshold: Threshold = 0.95,
) -> Tensor:
    """[B] float32: 1 where the group's mean score lies strictly between the thresholds.

    A group of one says nothing about difficulty and is kept (so does ROLL for n_sample 1).
    """
    if n_sample is None and index is None:
        raise OptionError("n_sample and index are missing: the difficulty of a group needs one of them")
    if not low_threshold < high_threshold:
        raise OptionError(f"low_threshold {low_threshold} is not below high_threshold {high_threshold}")
    mean, size = group_scores(scores, n_sample, index)
    kept = (mean > low_threshold) & (mean < high_threshold)
    return (kept | (size < 2)).to(torch.float32)


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
    """`response_mask` [B, T] float32 without the rows a filter drops, and the share each filter keeps.

    max_len_mask drops rows that used up max_response_length; the difficulty mask see `difficulty_mask`;
    error_max_len_clip drops wrong answers of error_max_len_threshold tokens or more. A filter reads scores
    of 1 as right and of 0 as wrong; like ROLL it drops any other score.
    """
    rows = len(scores)
    lengths = (response_mask != 0).sum(1)
    everything = torch.ones(rows, device=response_mask.device)
    kept = {
        "max_len": (lengths != max_response_length).float() if max_len_mask else everything,
        "difficulty": difficulty_mask(
            scores,
            n_sample=n_sample,
            index=index,
            low_threshold=difficulty_low_threshold,
            high_threshold=difficulty_high_threshold,
        )
        if use_difficulty_mask
        else everything,
        "error_len": ((scores == 1) | ((scores == 0) & (lengths < error_max_len_threshold))).float()
        if error_max_len_clip
        else everything,
    }
    final = kept["max_len"] * kept["difficulty"] * kept["error_len"]
    metrics = {f"actor/{name}_mask_ratio": _mean(mask) for name, mask in kept.items()}
    metrics |= {
        "actor/final_mask_ratio": _mean(final),
        "actor/samples_total": float(rows),
        "actor/samples_used": final.sum().item(),
    }
    return response_mask * final[:, None], metrics


def sample_weights(response_mask: Mask, difficulty: Rows | None = None, *, by_length: bool = False) -> Tensor:
    """[B] float32 weights that sum to B: harder prompts and shorter responses count more.

    difficulty [B] in 0 .. 1: factor 0.5 + 1.5 d. by_length: factor 1.5 - (len - min) / (max - min), 1.5 for
    equal lengths. (ROLL's difficulty factor never takes effect through its own container.)
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


def difficulty_factor(difficulty: Tensor) -> Tensor:
    """[B]: 0.5 + 1.5 d, d held in 0 .. 1."""
    return 0.5 + 1.5 * difficulty.clamp(0, 1)


def length_factor(lengths: Tensor, counted: Tensor) -> Tensor:
    """[B]: 1.5 - (len - min) / (max - min) over the rows `counted`; 1.5 for equal lengths."""
    if not len(lengths):
        return lengths
    least = torch.where(counted > 0, lengths, torch.inf).amin()
    span = torch.where(counted > 0, lengths, -torch.inf).amax() - least
    return 1.5 - (lengths - least) / span.clamp(min=1e-8)


def overlong_penalty(
    rewards: Rows,
    lengths: Rows,
    *,
    max_length: Count,
    buffer: Count,
    factor: float = 1.0,
    capped: bool = True,
) -> Tensor:
    """Rewards [B] minus factor * (excess / buffer), excess = tokens past max_length - buffer (DAPO, eq. 13).

    capped: at most one `factor` (the paper, OpenRLHF); verl and AReaL let it grow.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0).to(rewards.dtype)
    if capped:
        excess = excess.clamp(max=buffer)
    return rewards - excess / buffer * factor


def truncation_penalty(
    rewards: Rows, truncated: Annotated[Tensor, Flags(("B",), counts=False)], coefficient: float
) -> Tensor:
    """Rewards [B] of `truncated` rows times coefficient, or replaced by it when negative (OpenRLHF)."""
    changed = torch.full_like(rewards, coefficient) if coefficient < 0 else rewards * coefficient
    return torch.where(truncated != 0, changed, rewards)


def _mean(values: Tensor) -> float:
    return values.mean().item() if len(values) else 1.0
