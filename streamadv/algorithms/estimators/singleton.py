"""A rollout whose group has no other counted member has nothing to be compared with."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..packed import PackedBatch

Singleton = Literal["zero", "raw"]  # its advantage: 0 (no signal), or its reward (verl)


def settle_singletons(
    batch: PackedBatch, size: Tensor, advantages: Tensor, raw: Tensor, singleton: Singleton
) -> Tensor:
    """[M]: `advantages`, in groups of fewer than two counted members ([G] `size`) 0 or `raw`."""
    alone = size[batch.trajectory_group] < 2
    return torch.where(alone, raw if singleton == "raw" else 0.0, advantages)
