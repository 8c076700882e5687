"""The figures of a batch: `batch.metrics`, which a training loop logs, and the metrics of the process.

All functions here work on the arrays of a batch's layout, whatever the number of trajectories.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .. import doors, metrics
from ..algorithms.chain.sources import UNKNOWN
from ..grouping.layout import Layout
from ..metrics.instruments import EVALUATED, KEPT, MAX_DATA_SOURCES
from ..run import Run
from ..run.run import by_reason
from ..status.causes import LOST
from ..status.evaluations import Evaluation, read_evaluations
from ..status.model import Ledger
from ..store.retry import RETRYABLE
from .microbatch import Batch

#: Names of metrics that every logger takes: MLflow refuses other characters.
_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. :/]")
_TAG: Final = "training/off_policy"

Values = NDArray[Any]


@np.errstate(over="ignore", invalid="ignore")
def batch_figures(batch: Batch, wait_s: float, step_s: float | None) -> dict[str, float]:
    """Figures of the trajectories that are trained on, on all ranks together, the same on every rank; and of its time.

    wait_s: of this rank in `next_batch`. step_s: since the batch before was delivered; None for the first one.
    """
    members, k, figures = batch.layout.members, batch.version, {"timing_s/wait": wait_s}
    if step_s:
        figures |= {"timing_s/step": step_s, "trainer/idle_ratio": min(1.0, wait_s / step_s)}
    if not len(members):
        return figures
    table = members.table
    observed = table["tokens"] - table["trainable"]
    queued_s = np.maximum(0, doors.wall() - _logged_s(batch.layout)[np.unique(batch.layout.group)])
    figures |= {
        "timing_s/in_queue/mean": float(queued_s.mean()),
        "timing_s/in_queue/max": float(queued_s.max()),
        "perf/total_num_tokens": float(table["tokens"].sum()),
        **_summary("response_length", table["trainable"]),
        "response_length/clip_ratio": float(members.is_truncated.mean()),
        **_summary("prompt_length", observed),
        **{
            f"rewards/{name}/mean": float(np.nanmean(values))
            for name, values in members.rewards.items()
            if not np.isnan(values).all()
        },
        **_group_figures(batch.layout),
        **_source_figures(batch.layout),
    }
    if len(members.steps):
        figures |= _summary("num_turns", table["steps"])
    versions = table[members.has_version]
    if len(versions):
        figures |= _summary(f"{_TAG}/trajectory_staleness_worst", np.maximum(0, k - versions["oldest"]))
        figures |= _summary(f"{_TAG}/trajectory_staleness", np.maximum(0, k - versions["newest"]))
        figures |= _summary(f"{_TAG}/trajectory_spans", versions["newest"] - versions["oldest"] + 1)
    return figures


class RunFigures:
    """Figures of the whole run beside those of a batch: the ledger, evaluation, what ended since the batch before.

    Rank 0 has them; they come from counters that it reads with every batch anyway.
    """

    def __init__(self, run: Run, counters: Counter[str] | None) -> None:
        """counters: the run's when the trainer took it; None = the server was away."""
        self._run = run
        self._before = counters
        self._evals_ended = 0  # evaluation groups that had ended when all results were reported
        self._reported: dict[str, Evaluation] = {}  # by data source

    def figures(self, counters: Counter[str] | None) -> dict[str, float]:
        """The figures of the batch that is delivered now. counters: the run's now; {} while the server is away."""
        before, self._before = self._before, counters if counters is not None else self._before
        if counters is None:
            return {}
        ledger = Ledger.of(counters)
        figures: dict[str, float] = {
            "ledger/pushed": ledger.pushed,
            "ledger/trained": ledger.trained,
            "ledger/dropped": sum(ledger.dropped.values()),
            "ledger/dead": sum(ledger.dead.values()),
            "ledger/queued": ledger.queued,
            "ledger/in_flight": ledger.in_flight,
        }
        if counters[f"outcome:{EVALUATED}"] != self._evals_ended:
            figures |= self._evaluation(counters)
        return figures if before is None else figures | _flow(counters - before)

    def _evaluation(self, counters: Counter[str]) -> dict[str, float]:
        """What evaluation groups have shown, under verl's names: with one batch, and again if it changes.

        Of each data source the newest round or version, or the one before it while evaluation groups are open. While
        the server is away there is nothing new.
        """
        try:
            evaluations = read_evaluations(self._run)
        except RETRYABLE:
            return {}
        is_complete = counters["groups_eval"] <= 0
        by_source: dict[str, list[Evaluation]] = {}
        for evaluation in evaluations:
            if evaluation.mean is not None:
                by_source.setdefault(evaluation.data_source, []).append(evaluation)
        figures: dict[str, float] = {}
        for source, ascending in list(by_source.items())[:MAX_DATA_SOURCES]:
            complete = ascending if is_complete else ascending[:-1]
            if complete and complete[-1] != self._reported.get(source):
                self._reported[source] = complete[-1]
                figures |= _validation(complete[-1])
        if is_complete:
            self._evals_ended = counters[f"outcome:{EVALUATED}"]
        return figures


def _flow(news: Counter[str]) -> dict[str, float]:
    """What the counters have gained between two batches: groups by how they ended, trajectories by what became."""
    outcomes = by_reason(news, "outcome")
    kept = sum(outcomes.get(name, 0) for name in KEPT)
    lost = {kind: sum(outcomes.get(name, 0) for name in names) for kind, names in LOST.items()}
    ended = kept + lost["filtered"] + lost["ended_short"]
    flow: dict[str, float] = {
        "groups/kept": kept,
        **{f"groups/{kind}": count for kind, count in lost.items()},
        **{f"groups/outcome/{name}": count for name, count in outcomes.items()},
        "trajectories/pushed": news["pushed"],
        **{f"trajectories/dropped/{name}": count for name, count in by_reason(news, "dropped").items()},
        **{f"trajectories/dead/{name}": count for name, count in by_reason(news, "dead").items()},
    }
    return flow | ({"groups/kept_ratio": kept / ended} if ended else {})


def _validation(evaluation: Evaluation) -> dict[str, float]:
    source = evaluation.data_source or UNKNOWN
    oldest = None if evaluation.round is None else evaluation.oldest_version
    core = {"mean": evaluation.mean, "best/mean": evaluation.best}
    aux = {"std_error": evaluation.std_error, "min": evaluation.min, "max": evaluation.max}
    return {
        **{f"val-core/{source}/reward/{name}": value for name, value in core.items() if value is not None},
        **{f"val-aux/{source}/reward/{name}": value for name, value in aux.items() if value is not None},
        f"val-aux/{source}/trajectories": evaluation.trajectories,
        f"val-aux/{source}/failed": evaluation.failed,
        **({} if evaluation.version is None else {f"val-aux/{source}/version": evaluation.version}),
        **({} if oldest is None else {f"val-aux/{source}/oldest_version": oldest}),
    }


def named(figures: Mapping[str, float]) -> dict[str, float]:
    """Plain floats under names that every logger takes: another character of a data source becomes `_`.

    Left out is what is not finite: rewards near the limit of float64 overflow in a sum.
    """
    return {
        _NOT_IN_NAMES.sub("_", name): float(value) for name, value in figures.items() if math.isfinite(value)
    }


def observe(batch: Batch) -> None:
    """Metrics of the process.

    Staleness is split into versions that passed while the rollout was played, and while it was queued.
    """
    members = batch.layout.members
    staleness = members.staleness(batch.version)  # NaN without a version
    in_flight = np.where(np.isnan(staleness), np.nan, members.table["newest"] - members.table["oldest"])
    metrics.training_metrics(batch.metrics, batch.metric_weights)
    metrics.batch_delivered(
        version=batch.version,
        staleness=staleness,
        in_flight_lag=in_flight,
        in_queue_lag=np.maximum(0, staleness - in_flight),
        num_tokens=batch.num_tokens,
        e2e_s=doors.wall() - _logged_s(batch.layout)[batch.layout.group],
    )


def _logged_s(layout: Layout) -> NDArray[np.float64]:
    """[G]: when each group was complete, by the server's clock."""
    return np.array([group.logged_ms for group in layout.groups], np.float64) / 1000


def _summary(name: str, values: Values) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _group_figures(layout: Layout) -> dict[str, float]:
    """How far the pushed rewards of a group's members differ: groups in which they are equal teach nothing."""
    rewards = layout.members.table["reward"]
    first = np.flatnonzero(np.diff(layout.group, prepend=-1))
    sizes = np.diff(first, append=len(rewards))
    means = np.add.reduceat(rewards, first) / sizes
    squares = np.add.reduceat((rewards - np.repeat(means, sizes)) ** 2, first)
    is_flat = np.maximum.reduceat(rewards, first) == np.minimum.reduceat(rewards, first)
    return {
        "critic/score/std_mean": float(np.sqrt(squares / sizes).mean()),
        "critic/score/zero_std_ratio": float(is_flat.mean()),
    }


def _source_figures(layout: Layout) -> dict[str, float]:
    """By data source, if a group names one: `<source>/...`; sources beyond the first 32 by name are `other`."""
    sources = [group.data_source for group in layout.groups]
    if not any(sources):
        return {}
    names = sorted({source or UNKNOWN for source in sources})
    number_of = {name: min(number, MAX_DATA_SOURCES) for number, name in enumerate(names)}
    names = [*names[:MAX_DATA_SOURCES], "other"]
    of_group = np.array([number_of[source or UNKNOWN] for source in sources], np.int64)
    of_member = of_group[layout.group]
    table = layout.members.table
    counts = np.bincount(of_member, minlength=len(names))
    rewards = np.bincount(of_member, table["reward"], len(names))
    lengths = np.bincount(of_member, table["trainable"], len(names))
    figures: dict[str, float] = {}
    for number in np.flatnonzero(counts).tolist():
        figures |= {
            f"{names[number]}/critic/score/mean": float(rewards[number] / counts[number]),
            f"{names[number]}/response_length/mean": float(lengths[number] / counts[number]),
            f"{names[number]}/trajectories": float(counts[number]),
        }
    return figures
