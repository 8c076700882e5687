"""The turns of a rollout: what the policy said, and what it read in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..trajectory.schema import Row, Trajectory


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `start` to `stop` of a row."""

    kind: Literal["prompt", "answer", "result"]
    label: str
    row: int
    start: int
    stop: int


def turns_of(trajectory: Trajectory, number: int, row: Row) -> Iterator[Turn]:
    """The turns of a row: each ends where `response_mask` changes."""
    edges = np.flatnonzero(np.diff(row.response_mask)) + 1
    rewards = {step.start: step.reward for step in trajectory.steps if step.row == number}
    agent = f" ({row.agent})" if row.agent else ""
    answers, where = 0, f"row {number}{agent}, " if len(trajectory.rows) > 1 else ""
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(row)], strict=True):
        if row.response_mask[start]:
            answers += 1
            reward = f", reward {rewards[start]:g}" if rewards.get(start) else ""
            yield Turn("answer", f"{where}answer {answers}{reward}", number, start, stop)
        elif start == 0:
            yield Turn("prompt", f"{where}prompt", number, start, stop)
        else:
            yield Turn("result", f"{where}result", number, start, stop)


def advantage_range(trajectory: Trajectory) -> tuple[float, float] | None:
    """The least and the greatest advantage of tokens that are trained on; None where none is known."""
    rows = [row for row in trajectory.rows if row.advantages is not None]
    values = [row.columns["advantages"][row.response_mask > 0] for row in rows]
    together = np.concatenate(values) if values else np.zeros(0)
    return (float(together.min()), float(together.max())) if len(together) else None
