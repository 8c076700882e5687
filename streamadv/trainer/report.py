"""Metrics of a delivered batch, and of the groups dropped while it was selected."""

from __future__ import annotations

import time

import numpy as np

from .. import metrics
from ..batch.dropped import DroppedGroups
from .microbatch import Batch


def selection_metrics(dropped: DroppedGroups, batch: Batch) -> dict[str, float]:
    """For `batch.metrics`: groups dropped since the batch before, by reason and source, with their mean length.

    The batch's own mean length stands beside it: filters and staleness may prefer short trajectories.
    """
    values = dropped.figures()
    if batch.num_trajectories:
        values["response_length/mean"] = batch.num_tokens / batch.num_trajectories
    return values


def observe(batch: Batch, wait_s: float) -> None:
    """Metrics of the process. wait_s: seconds that the training loop waited for the batch.

    Staleness is split into versions that passed while the rollout was played, and while it was queued.
    """
    members = batch.layout.members
    staleness = members.staleness(batch.version)  # NaN without a version
    in_flight = np.where(np.isnan(staleness), np.nan, members.table["newest"] - members.table["oldest"])
    logged_s = np.array([group.logged_ms for group in batch.layout.groups]) / 1000
    metrics.training_metrics(batch.metrics)
    metrics.batch_delivered(
        version=batch.version,
        staleness=staleness,
        in_flight_lag=in_flight,
        in_queue_lag=np.maximum(0, staleness - in_flight),
        num_tokens=batch.num_tokens,
        num_trajectories=batch.num_trajectories,
        wait_s=wait_s,
        e2e_s=time.time() - logged_s[batch.layout.group],
    )
