"""What a chain gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..packed import Level

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainResult:
    """The result of a chain. `advantages` is None after the first part of a chain cut before its estimator."""

    level: Level
    advantages: Tensor | None  # [R], [S] or [N] float32
    returns: Tensor | None  # same shape; None where they equal the advantages
    rewards: Tensor  # [M] float64, as shaped so far
    step_rewards: Tensor  # [S] float64
    columns: Mapping[str, Tensor]  # made or changed by a step, [N]
    metrics: Mapping[str, float]
    weights: Mapping[str, float]  # what each metric is a mean over; see merge_metrics
