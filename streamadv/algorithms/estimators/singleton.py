"""Groups of one: a rollout without siblings that count has nothing to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...extras import torch
from ..packed import PackedBatch

if TYPE_CHECKING:
    from torch import Tensor

#: The advantage in a group of one: 0 (no signal), or its reward (verl).
Singleton = Literal["zero", "raw"]


def settle_singletons(
    batch: PackedBatch, size: Tensor, advantages: Tensor, raw: Tensor, singleton: Singleton
) -> Tensor:
    """[M]: `advantages` [M], replaced by 0 or `raw` [M] in groups with fewer than two counted members (`size` [G])."""
    alone = size[batch.trajectory_group] < 2
    return torch.where(alone, raw if singleton == "raw" else 0.0, advantages)
