"""How much a rollout counts by its length, its difficulty and its truncation."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .arguments import Count, Flags, Rows


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
