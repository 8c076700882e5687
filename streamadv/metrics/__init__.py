"""Metrics of a process: what the stages report here is served at `/metrics` for Prometheus.

In reading order: these functions, which stages call; `instruments` (the declarations); `exposition` (how the numbers
leave the process). Work items and batches are reported whole, as arrays. Any thread may call. torch is not imported.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import instruments
from .exposition import StatusReader, serve_metrics
from .instruments import KEPT, REGISTRY, child

__all__ = [
    "KEPT",
    "REGISTRY",
    "backpressure",
    "batch_delivered",
    "blocked_when",
    "entries",
    "group_ended",
    "group_recreated",
    "no_progress",
    "producer_pushed",
    "register_ledger",
    "retried",
    "serve",
    "timed",
    "training_metrics",
    "unscorable",
    "work_item_computed",
]

#: Numbers of a work item or batch: an array, a list or one number. None stands for unknown and is left out.
Values = NDArray[Any] | Sequence[float | None] | Sequence[int | None] | float | None
Event = Literal["delivered", "acked", "reclaimed", "duplicate"]


def timed(stage: str, step: str) -> AbstractContextManager[Any]:
    """Measure a block as `step` of `stage`, also when it raises. Not for reads that block."""
    timer: AbstractContextManager[Any] = child(instruments.STAGE_DURATION, stage, step).time()
    return timer


def entries(stage: str, event: Event, n: int = 1) -> None:
    """`n` stream entries were delivered, acked, reclaimed, or finished by somebody else before (duplicate)."""
    child(instruments.EVENTS[event], stage).inc(n)
    if event == "acked" and n:
        _succeeded(stage)


def retried(stage: str, reason: str) -> None:
    """The server failed and is tried again; `reason` is one of RETRY_REASONS."""
    child(instruments.CONNECTION_ERRORS, stage, reason).inc()


def blocked_when(reason: str, is_blocked: Callable[[], bool]) -> None:
    """Show at each scrape whether somebody in this process waits for `reason`, one of `store.reasons.REASONS`."""
    child(instruments.BLOCKED, reason).set_function(lambda: float(is_blocked()))


def unscorable(stage: str, kind: str) -> None:
    """A scorer gave a trajectory up; `kind` is one of UNSCORABLE_KINDS."""
    child(instruments.UNSCORABLE, stage, kind).inc()


def group_recreated(stage: str) -> None:
    """A consumer group was missing (NOGROUP) and has been made again."""
    child(instruments.NOGROUP, stage).inc()


def group_ended(outcome: str, data_source: str | None = None) -> None:
    """A group ended, see OUTCOMES. With `data_source` it counts in the kept/produced ratio of that source.

    An outcome of AT_NAMING befalls a group that was counted before: its source's numbers stay. Those of evaluation
    groups are not for training.
    """
    child(instruments.GROUPS, outcome if outcome in instruments.OUTCOMES else "other").inc()
    if data_source is not None and outcome not in (*instruments.AT_NAMING, instruments.EVALUATED):
        source = _bounded_source(data_source)
        child(instruments.GROUPS_PRODUCED, source).inc()
        # By 0 too: a source that keeps nothing must show.
        child(instruments.GROUPS_KEPT, source).inc(int(outcome in KEPT))


def producer_pushed(codes: Iterable[str]) -> None:
    """What became of the records of one push: the codes of a PushResult."""
    for code, n in Tally(codes).items():
        child(instruments.PUSHED, code if code in instruments.PUSH_CODES else "other").inc(n)
    _succeeded("producer")


def backpressure(seconds: float) -> None:
    """A producer waited so long for admission. Call after each pause, so that a long wait shows."""
    instruments.BACKPRESSURE.inc(seconds)


def work_item_computed(
    rewards: Values,
    advantages: Values,
    response_tokens: Values,
    turns: Values,
    truncated: Values,
    group_reward_std: Values,
    group_completion_s: Values,
    metrics: Mapping[str, float],
    is_weights: Values = None,
    stage: str = "advantage",
) -> None:
    """A work item has been computed, by an advantage worker or (`stage`) the trainer.

    rewards, response_tokens, turns, truncated (0 or 1): of each trajectory. advantages: at the estimator's
    level, trainable tokens only. group_reward_std, group_completion_s (seconds from opening to end): of each
    group. metrics: the chain's, see `training_metrics`. is_weights: importance weights of rows or trainable
    tokens.
    """
    reward = _finite(rewards, "reward")
    instruments.REWARD.observe(reward)
    instruments.REWARD_POSITIVE.inc(float(reward[reward > 0].sum()))
    instruments.REWARD_NEGATIVE.inc(float(-reward[reward < 0].sum()))
    instruments.ADVANTAGE.observe(_finite(advantages, "advantage"))
    instruments.RESPONSE_TOKENS.observe(_known(response_tokens))
    instruments.TURNS_TAKEN.observe(_known(turns))
    instruments.TRUNCATED.inc(float(_known(truncated).sum()))
    instruments.GROUP_REWARD_STD.observe(_known(group_reward_std))
    instruments.GROUP_COMPLETION.observe(_known(group_completion_s))
    training_metrics(metrics, stage)
    weights = _finite(is_weights, "is_weight")
    if len(weights):
        instruments.IS_WEIGHT.observe(weights)
        squares = float((weights * weights).mean())
        child(instruments.IS_ESS, stage).set(float(weights.mean()) ** 2 / squares if squares else 0.0)


def training_metrics(metrics: Mapping[str, float], stage: str = "trainer") -> None:
    """Numbers under verl's and ROLL's names, of a chain or a training loop; TRAINING_GAUGES says which show."""
    for name, value in metrics.items():
        if name in instruments.TRAINING_GAUGES:
            gauge, labels = instruments.TRAINING_GAUGES[name]
            child(gauge, stage, *labels).set(value)


def batch_delivered(
    version: int,
    staleness: Values,
    in_flight_lag: Values,
    in_queue_lag: Values,
    num_tokens: int,
    num_trajectories: int,
    wait_s: float,
    e2e_s: Values,
) -> None:
    """A batch goes to the training loop. On rank 0 only: the numbers are those of the whole batch.

    staleness, in_flight_lag, in_queue_lag (versions), e2e_s (seconds from the end of its group): of each
    trajectory, None where it has no version or time. wait_s: seconds that the loop waited for this batch.
    """
    instruments.BATCH_VERSION.set(version)
    instruments.POLICY_LAG.observe(_known(staleness))
    instruments.POLICY_LAG_IN_FLIGHT.observe(_known(in_flight_lag))
    instruments.POLICY_LAG_IN_QUEUE.observe(_known(in_queue_lag))
    instruments.DELIVERED_BATCHES.inc()
    instruments.DELIVERED_TOKENS.inc(num_tokens)
    instruments.DELIVERED_TRAJECTORIES.inc(num_trajectories)
    instruments.TRAINER_WAIT.inc(wait_s)
    instruments.E2E.observe(_known(e2e_s))
    _succeeded("trainer")


def no_progress(seconds: float) -> None:
    """The trainer has waited so long for a batch; 0 when one is there."""
    instruments.NO_PROGRESS.set(seconds)


def register_ledger(read_status: StatusReader | None) -> None:
    """Export the run's ledger, streams and memory, read with `read_status()` once a scrape; None ends it.

    In one process of a run only (the grouper): each further one would show the same numbers again.
    """
    instruments.LEDGER.read_status = read_status


def serve(port: int, run: str | None = None, host: str = "127.0.0.1") -> int:
    """Serve `/metrics` at `host` until the process ends; returns the port (0 takes a free one).

    Whoever reaches it may read it: anything but loopback (0.0.0.0 is all addresses) belongs behind a firewall.
    `run` becomes a label of every series. Raises SettingError if port or host cannot be had.
    """
    return serve_metrics(REGISTRY, port, run, host)


def _known(values: Values) -> NDArray[np.float64]:
    """`values` flat, without those that are None, NaN or infinite."""
    flat = _flat(values)
    return flat[np.isfinite(flat)]


def _finite(values: Values, quantity: str) -> NDArray[np.float64]:
    """`_known`, for values that should all be numbers: what is left out counts as non-finite."""
    flat = _flat(values)
    kept = flat[np.isfinite(flat)]
    child(instruments.NONFINITE, quantity).inc(len(flat) - len(kept))
    return kept


def _flat(values: Values) -> NDArray[np.float64]:
    return np.empty(0) if values is None else np.asarray(values, dtype=np.float64).ravel()


def _succeeded(stage: str) -> None:
    child(instruments.LAST_SUCCESS, stage).set(time.time())


_sources: set[str] = set()
_sources_lock = threading.Lock()


def _bounded_source(data_source: str) -> str:
    with _sources_lock:
        if data_source not in _sources:
            if len(_sources) >= instruments.MAX_DATA_SOURCES:
                return "other"
            _sources.add(data_source)
    return data_source
