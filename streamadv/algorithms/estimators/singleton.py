"""Groups of one: a rollout without siblings that count has nothing to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...extras import torch

if TYPE_CHECKING:
    from torch import Tensor

#: The advantage in a group of one: 0 (no signal), or its reward (verl).
Singleton = Literal["zero", "raw"]


def settle_singletons(size: Tensor, advantages: Tensor, raw: Tensor, singleton: Singleton) -> Tensor:
    """[M]: `advantages` [M], replaced by 0 or `raw` [M] in groups of fewer than two counted members (`size` [M])."""
    return torch.where(size < 2, raw if singleton == "raw" else 0.0, advantages)
