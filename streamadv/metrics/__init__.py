"""Metrics of a process: stages report here, and `/metrics` serves the numbers to Prometheus.

In reading order: the functions of this module, which stages call; `instruments` (the declarations, in sets by stage)
over `collectors`; `endpoints` (the HTTP server). Stages report work items and batches whole, as arrays. Any thread
may call. This room does not import torch.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..doors import renewed_at_fork
from . import instruments
from .collectors import Blockers, child
from .endpoints import NotReady, serve_metrics
from .instruments import KEPT, REGISTRY, Kind, begin_stage

__all__ = [
    "KEPT", "REGISTRY", "EndedGroup", "Kind", "Sample", "batch_delivered", "begin_stage", "blocked_as",
    "entries", "group_recreated", "groups_ended", "importance_weights", "retried", "serve",
    "succeeded", "timed", "training_metrics", "wait", "work_item_computed",
]  # fmt: skip

#: Numbers of a work item or batch: an array, a list or one number. None stands for unknown and is left out.
Values = NDArray[Any] | Sequence[float | None] | Sequence[int | None] | float | None


class Sample(NamedTuple):
    """Some of many numbers, each of which stands for `weight` of them."""

    values: Values
    weight: int = 1


Event = Literal["delivered", "acked", "reclaimed", "duplicate"]
#: Mean and standard deviation of the importance weights of a batch.
IS_MEAN: Final = "rollout_corr/rollout_is_mean"
IS_STD: Final = "rollout_corr/rollout_is_std"
#: Ended groups are counted when they are so many, or when they are asked for.
GROUPS_TOGETHER: Final = 256
#: Outcomes of groups that count in no numbers of their source.
_NOT_COUNTED: Final = frozenset((*instruments.AT_NAMING, instruments.EVALUATED))


def wait(stage: str) -> AbstractContextManager[None]:
    """Around a wait of this stage: for admission, for a batch, for entries. It counts while it lasts."""
    return instruments.WAITS.wait(stage)


def timed(stage: str, step: str) -> AbstractContextManager[Any]:
    """Measure a block as `step` of `stage`, also when it raises. Not for reads that block."""
    timer: AbstractContextManager[Any] = child(instruments.STAGE_DURATION, stage, step).time()
    return timer


def entries(stage: str, event: Event, n: int = 1) -> None:
    """`n` stream entries were delivered, acked, reclaimed, or finished by somebody else before (duplicate)."""
    child(instruments.EVENTS[event], stage).inc(n)
    if event == "acked" and n:
        succeeded(stage)


def succeeded(stage: str) -> None:
    """The stage has done some of its work: the server has taken a push, a batch is delivered."""
    child(instruments.LAST_SUCCESS, stage).set(time.time())


def retried(stage: str, reason: str) -> None:
    """The server failed and is tried again; `reason` is one of RETRY_REASONS."""
    child(instruments.CONNECTION_ERRORS, stage, reason).inc()


def blocked_as(blockers: Blockers) -> None:
    """Show at each scrape who waits for which reason. blockers: returns pairs of (who, reason), see `Blockers`."""
    instruments.BLOCKED.blockers = blockers


def group_recreated(stage: str) -> None:
    """A consumer group was missing (NOGROUP) and has been made again."""
    child(instruments.NOGROUP, stage).inc()


class EndedGroup(NamedTuple):
    """How a group ended, see OUTCOMES. With `data_source` it counts in the kept/produced ratio of that source."""

    outcome: str
    data_source: str | None = None
    rewards: Sequence[float] = ()  # of its trajectories that have one


def groups_ended(groups: Sequence[EndedGroup]) -> None:
    """Groups ended. Many are counted together, which takes hardly longer than one: at the latest by the next scrape.

    Groups dropped at naming (AT_NAMING) were counted already, so their source is not counted again. Nor are evaluation
    groups, which are not for training.
    """
    with _ended_lock:
        _ended.extend(groups)
        is_enough = len(_ended) >= GROUPS_TOGETHER
    if is_enough:
        _count_ended()


def _count_ended() -> None:
    with _ended_lock:
        groups = _ended.copy()
        _ended.clear()
    for outcome, n in Tally(group.outcome for group in groups).items():
        child(instruments.GROUPS, outcome if outcome in instruments.OUTCOMES else "other").inc(n)
    counted: dict[tuple[str | None, bool], list[list[float]]] = {}  # rewards by source, and whether kept
    for outcome, data_source, rewards in groups:
        if outcome not in _NOT_COUNTED:
            source = None if data_source is None else _bounded_source(data_source)
            known = [reward for reward in rewards if math.isfinite(reward)]
            counted.setdefault((source, outcome in KEPT), []).append(known)
    for (source, is_kept), of_groups in counted.items():
        if source is not None:
            child(instruments.GROUPS_PRODUCED, source).inc(len(of_groups))
            # By 0 too: a source that keeps nothing must show.
            child(instruments.GROUPS_KEPT, source).inc(len(of_groups) if is_kept else 0)
        _group_rewards([rewards for rewards in of_groups if rewards], source or "", is_kept)


@np.errstate(over="ignore", invalid="ignore")  # rewards near the limit of float64: such a sum is left out
def _group_rewards(of_groups: Sequence[Sequence[float]], source: str, is_kept: bool) -> None:
    if not of_groups:
        return
    kept = "yes" if is_kept else "no"
    rewards = np.array([reward for group in of_groups for reward in group])
    instruments.REWARD.observe(rewards)
    child(instruments.REWARDS, source, kept).inc(len(rewards))
    _add_signed(instruments.REWARDS_SUM, (source, kept), rewards)
    sizes = np.array([len(group) for group in of_groups])
    first = np.cumsum(sizes) - sizes
    deviations = rewards - np.repeat(np.add.reduceat(rewards, first) / sizes, sizes)
    squares = np.add.reduceat(deviations * deviations, first)[sizes > 1]
    instruments.GROUP_REWARD_STD.observe(_known(np.sqrt(squares / (sizes[sizes > 1] - 1))))


def rollout_replayed(seconds: float) -> None:
    """A rollout has failed after so many seconds of play, and is played again."""
    instruments.REPLAYED.inc()
    instruments.REPLAYED_SECONDS.inc(max(0.0, seconds))


def work_item_computed(
    advantages: Values | Sample,
    response_tokens: Values,
    turns: Values,
    truncated: Values,
    group_completion_s: Values,
    is_weights: Values | Sample = None,
) -> None:
    """An advantage worker has computed a work item.

    response_tokens, turns, truncated (0 or 1): of each trajectory. advantages: at the estimator's level, trainable
    tokens only. group_completion_s: of each group, seconds from opening to end. is_weights: importance weights of rows
    or trainable tokens.
    """
    instruments.ADVANTAGE.observe(*_finite(advantages, "advantage"))
    instruments.RESPONSE_TOKENS.observe(_known(response_tokens))
    instruments.TURNS_TAKEN.observe(_known(turns))
    instruments.TRUNCATED.inc(float(_known(truncated).sum()))
    instruments.GROUP_COMPLETION.observe(_known(group_completion_s))
    importance_weights(is_weights)


def importance_weights(weights: Values | Sample) -> None:
    """Importance weights of rows or trainable tokens, from the process that has computed them."""
    instruments.IS_WEIGHT.observe(*_finite(weights, "is_weight"))


def training_metrics(metrics: Mapping[str, float], weights: Mapping[str, float] | float = 1.0) -> None:
    """Numbers under verl's and ROLL's names: means of a batch, of a chain or a training loop.

    KL_ESTIMATES, CLIP_SHARES, the mean and deviation of importance weights and `critic/kl_coef` have metrics here;
    other names have none. weights: how many tokens, rows or trajectories are behind each mean, or behind all of them.
    """
    for name, value in metrics.items():
        weight = weights.get(name, 1.0) if isinstance(weights, Mapping) else weights
        if not (math.isfinite(value) and math.isfinite(weight) and weight > 0):
            continue
        if name in instruments.KL_ESTIMATES:
            estimate = instruments.KL_ESTIMATES[name]
            _add_signed(instruments.KL_SUM, (estimate,), np.array([value * weight]))
            child(instruments.KL_WEIGHT, estimate).inc(weight)
        elif name in instruments.CLIP_SHARES:
            what = instruments.CLIP_SHARES[name]
            child(instruments.CLIPPED, what).inc(max(0.0, value) * weight)
            child(instruments.CLIP_CANDIDATES, what).inc(weight)
        elif name == "critic/kl_coef":
            instruments.KL_COEFFICIENT.set(value)
            REGISTRY.add(instruments.KL_COEFFICIENT)
        elif name == IS_MEAN:
            deviation = metrics.get(IS_STD, 0.0)
            instruments.IS_WEIGHTS_SUM.inc(max(0.0, value) * weight)
            instruments.IS_WEIGHTS_SQUARES.inc((value * value + deviation * deviation) * weight)
            instruments.IS_WEIGHTS.inc(weight)


def batch_delivered(
    version: int,
    staleness: Values,
    in_flight_lag: Values,
    in_queue_lag: Values,
    num_tokens: int,
    e2e_s: Values,
) -> None:
    """A batch goes to the training loop. On rank 0 only: the numbers are those of the whole batch.

    staleness, in_flight_lag, in_queue_lag (versions), e2e_s (seconds from the end of its group): of each
    trajectory, None where it has no version or time.
    """
    instruments.BATCH_VERSION.set(version)
    REGISTRY.add(instruments.BATCH_VERSION)
    instruments.POLICY_LAG.observe(_known(staleness))
    instruments.POLICY_LAG_IN_FLIGHT.observe(_known(in_flight_lag))
    instruments.POLICY_LAG_IN_QUEUE.observe(_known(in_queue_lag))
    instruments.DELIVERED_TOKENS.inc(num_tokens)
    instruments.E2E.observe(_known(e2e_s))
    succeeded("trainer")


def serve(
    port: int, run: str | None = None, host: str = "127.0.0.1", not_ready: NotReady | None = None
) -> int:
    """Serve `/metrics`, `/livez` and `/readyz` at `host` until the process ends; returns the port (0 takes a free one).

    Whoever reaches it may read it: anything but loopback (0.0.0.0 is all addresses) belongs behind a firewall.
    `run` becomes a label of every series. not_ready: says why the process cannot do its work now, None if it can; then
    `/readyz` answers 503 with that text. `/livez` asks nothing. Raises SettingError if port or host cannot be had.
    """
    return serve_metrics(REGISTRY, port, run, host, not_ready or (lambda: None))


def _add_signed(counter: Any, labels: tuple[str, ...], values: NDArray[np.float64]) -> None:
    """Add the values above 0 and those below it, without their sign, to two children of a counter."""
    for sign, part in zip(instruments.SIGNS, (values[values > 0], -values[values < 0]), strict=True):
        total = float(part.sum())
        child(counter, *labels, sign).inc(total if math.isfinite(total) else 0.0)


def _known(values: Values) -> NDArray[np.float64]:
    """`values` flat, without those that are None, NaN or infinite."""
    flat = np.empty(0) if values is None else np.asarray(values, dtype=np.float64).ravel()
    return flat[np.isfinite(flat)]


def _finite(values: Values | Sample, quantity: str) -> tuple[NDArray[np.float64], int]:
    """`_known` and the weight, for values that should all be numbers: what is left out counts as non-finite."""
    sample = values if isinstance(values, Sample) else Sample(values)
    kept = _known(sample.values)
    given = 0 if sample.values is None else np.asarray(sample.values, dtype=np.float64).size
    child(instruments.NONFINITE, quantity).inc(sample.weight * (given - len(kept)))
    return kept, sample.weight


_ended: list[EndedGroup] = []  # and not counted yet
_ended_lock = renewed_at_fork(threading.Lock())
REGISTRY.settlers.append(_count_ended)
_sources: set[str] = set()
_sources_lock = renewed_at_fork(threading.Lock())


def _bounded_source(data_source: str) -> str:
    with _sources_lock:
        if data_source not in _sources:
            if len(_sources) >= instruments.MAX_DATA_SOURCES:
                return "other"
            _sources.add(data_source)
    return data_source
