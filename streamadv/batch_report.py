"""What is told of a batch when it is delivered: what was passed over for it, and the trainer's metrics."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from . import metrics
from .batches import LoggedGroup
from .microbatch import Batch

#: Reasons and sources told apart; further sources are "other".
MAX_NAMES: Final = 256


class PassedOver:
    """What was dropped at naming since the last batch, in figures: a trainer may wait long while everything is."""

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()
        self._trajectories: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def append(self, dropped: tuple[str, LoggedGroup]) -> None:
        """Count a group with the reason."""
        reason, group = dropped
        name = f"dropped/{reason}/{group.data_source or 'unknown'}"
        name = name if name in self._groups or len(self._groups) < MAX_NAMES else f"dropped/{reason}/other"
        self._groups[name] += 1
        self._trajectories[name] += len(group.members)
        self._tokens[name] += sum(sum(member.row_trainable) for member in group.members)

    def __len__(self) -> int:
        """Groups."""
        return self._groups.total()

    def clear(self) -> None:
        """It is told."""
        for counts in (self._groups, self._trajectories, self._tokens):
            counts.clear()

    def figures(self) -> dict[str, float]:
        """Groups, and mean length of their trajectories, by reason and source."""
        found = {f"{name}/groups": float(count) for name, count in self._groups.items()}
        means = {name: self._tokens[name] / count for name, count in self._trajectories.items() if count}
        return found | {f"{name}/response_length/mean": mean for name, mean in means.items()}


def passed_over(dropped: PassedOver, batch: Batch) -> dict[str, float]:
    """What was dropped at naming since the batch before, by reason and source, and how its length compares."""
    found = dropped.figures()
    if batch.num_trajectories:
        found["response_length/mean"] = batch.num_tokens / batch.num_trajectories
    return found


def observe(batch: Batch, wait_s: float) -> None:
    """Staleness is split into versions that passed while the rollout ran, and while it was queued."""
    in_flight = [None if r.versions is None else r.versions[1] - r.versions[0] for r in batch.references]
    metrics.training_metrics(batch.metrics)
    metrics.batch_delivered(
        version=batch.version,
        staleness=batch.staleness,
        in_flight_lag=in_flight,
        in_queue_lag=[
            None if lag is None or total is None else max(0, total - lag)
            for total, lag in zip(batch.staleness, in_flight, strict=True)
        ],
        num_tokens=batch.num_tokens,
        num_trajectories=batch.num_trajectories,
        wait_s=wait_s,
        e2e_s=[time.time() - logged for logged in batch.logged_s],
    )
