"""How a rollout's length, difficulty and truncation change its reward or its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ..extras import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import Count, Flags, Rows


def difficulty_factor(difficulty: Tensor) -> Tensor:
    """[B]: 0.5 + 1.5 d, with `difficulty` d [B] held in 0 .. 1."""
    return 0.5 + 1.5 * difficulty.clamp(0, 1)


def length_factor(lengths: Tensor, counted: Tensor) -> Tensor:
    """[B]: 1.5 - (len - min) / (max - min), min and max over rows where `counted` [B] > 0; 1.5 if all are equal."""
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
    """[B]: rewards minus factor * excess / buffer, excess = max(0, length - (max_length - buffer)).

    DAPO (arXiv:2503.14476, eq. 13). rewards and lengths [B], lengths in trainable tokens. capped: at most one `factor`
    (the paper, OpenRLHF); verl and AReaL let it grow.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0).to(rewards.dtype)
    if capped:
        excess = excess.clamp(max=buffer)
    return rewards - excess / buffer * factor


def truncation_penalty(
    rewards: Rows, truncated: Annotated[Tensor, Flags(("B",), counts=False)], coefficient: float
) -> Tensor:
    """[B]: rewards of `truncated` rows times coefficient, or replaced by a negative coefficient (OpenRLHF)."""
    changed = torch.full_like(rewards, coefficient) if coefficient < 0 else rewards * coefficient
    return torch.where(truncated != 0, changed, rewards)
