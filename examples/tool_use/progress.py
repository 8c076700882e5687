"""How far a training run has come: its log, a line for each update, and when it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import streamadv as sa

#: Batches that the reward at which a run may end is the mean of: one batch has few questions.
WINDOW: Final = 10


class Progress:
    """Counts updates, trajectories, seconds of training and rewards; a run that is resumed goes on counting.

    It ends after so many updates or seconds, or once the mean reward of ten batches is `target`.
    """

    def __init__(self, log: Path, *, updates: int, seconds: float, target: float) -> None:
        self.version, self.samples, self.seconds = 0, 0, 0.0
        self.rewards: list[float] = []
        self._ends = (updates, seconds, target)
        self._log, self._started = log.open("a", buffering=1), time.monotonic()

    def note(self, batch: sa.Batch, figures: Mapping[str, float]) -> None:
        """An update was made on this batch."""
        self.version, self.samples = batch.version + 1, self.samples + batch.num_trajectories
        self.seconds = time.monotonic() - self._started
        self.rewards.append(batch.metrics["critic/score/mean"])
        line = {
            "version": self.version,
            "seconds": self.seconds,
            "samples": self.samples,
            "reward": self.rewards[-1],
            **figures,
            "staleness_mean": sum(batch.staleness) / len(batch.staleness),
            "staleness_max": max(batch.staleness),
            "dropped": batch.metrics.get("trajectories/dropped/stale", 0.0),
            "groups": sorted({reference.group_id for reference in batch.references}),
        }
        self._log.write(json.dumps(line) + "\n")
        if self.version % 10 == 0:
            text = f"reward {self.reward:.2f}, staleness at most {line['staleness_max']}"
            print(f"version {self.version}: {text}", flush=True)

    @property
    def reward(self) -> float:
        """The mean of the last batches."""
        recent = self.rewards[-WINDOW:]
        return sum(recent) / len(recent)

    @property
    def is_over(self) -> bool:
        updates, seconds, target = self._ends
        has_learnt = len(self.rewards) >= WINDOW and self.reward >= target
        return has_learnt or self.version >= updates or self.seconds >= seconds

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("version", "samples", "seconds", "rewards")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._started = time.monotonic() - self.seconds
