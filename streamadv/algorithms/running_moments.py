"""Moments of all rewards so far, merged batch by batch (Chan, Golub, LeVeque 1979)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .segments import moments, whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared deviations. Immutable: a batch record carries a snapshot.

    The trainer merges a batch once, when it names the batch, so a redelivered batch does not count twice. Raises
    ArgumentError for numbers that are not finite, or a negative count or sum of squares.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    def __post_init__(self) -> None:
        if not (
            self.count >= 0 and self.squares >= 0 and math.isfinite(self.count + self.mean + self.squares)
        ):
            raise ArgumentError(
                f"moments count {self.count}, mean {self.mean}, squares {self.squares}: finite numbers are needed, "
                "count and squares of 0 or more"
            )

    @classmethod
    def of(cls, values: Tensor) -> RunningMoments:
        """The moments of `values` [K] alone."""
        if not len(values):
            return cls()
        stats = moments(values, whole(values))
        squares = stats.std.square() * (stats.size - 1)
        return cls(len(values), stats.mean[0].item(), squares[0].item())

    def merged(self, other: RunningMoments) -> RunningMoments:
        """The moments of both samples together."""
        if not other.count:
            return self
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        squares = self.squares + other.squares + delta**2 * self.count * other.count / count
        return RunningMoments(count, mean, squares)

    def updated(self, values: Tensor) -> RunningMoments:
        """The moments with `values` [K] added."""
        return self.merged(RunningMoments.of(values))

    @property
    def var(self) -> float:
        """Population variance; 1 while the count is 0."""
        return self.squares / self.count if self.count else 1.0

    @property
    def std(self) -> float:
        """Sample standard deviation, ddof 1; 1 while the count is 0, infinite (no scale) after one value."""
        if self.count > 1:
            return math.sqrt(self.squares / (self.count - 1))
        return math.inf if self.count else 1.0
