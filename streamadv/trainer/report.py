"""The figures of a batch: `batch.metrics`, which a training loop logs, and the metrics of the process.

All functions here work on the arrays of a batch's layout, whatever the number of trajectories.
"""

from __future__ import annotations

import re
from collections import Counter
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

#: What names of metrics may not have (a data source may), so that every logger takes them: MLflow refuses it.
NOT_IN_NAMES: Final = re.compile(r"[^\w\-. :/]")
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
    # When each group was complete, by the server's clock.
    logged_ms = np.array([group.logged_ms for group in batch.layout.groups], np.float64)
    queued_s = np.maximum(0, doors.wall() - logged_ms[np.unique(batch.layout.group)] / 1000)
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
        **_figures_of_groups(batch.layout),
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
        if before is None:
            return figures
        # What the counters have gained since the batch before: groups by how they ended, trajectories by what became.
        news = counters - before
        outcomes = by_reason(news, "outcome")
        kept = sum(outcomes.get(name, 0) for name in KEPT)
        lost = {kind: sum(outcomes.get(name, 0) for name in names) for kind, names in LOST.items()}
        figures |= {
            "groups/kept": kept,
            **{f"groups/{kind}": count for kind, count in lost.items()},
            **{f"groups/outcome/{name}": count for name, count in outcomes.items()},
            "trajectories/pushed": news["pushed"],
            **{f"trajectories/dropped/{name}": count for name, count in by_reason(news, "dropped").items()},
            **{f"trajectories/dead/{name}": count for name, count in by_reason(news, "dead").items()},
        }
        ended = kept + lost["filtered"] + lost["ended_short"]
        return figures | ({"groups/kept_ratio": kept / ended} if ended else {})

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
            if not complete or complete[-1] == self._reported.get(source):
                continue
            last = self._reported[source] = complete[-1]
            name = source or UNKNOWN
            found: dict[str, float | None] = {
                f"val-core/{name}/reward/mean": last.mean,
                f"val-core/{name}/reward/best/mean": last.best,
                f"val-aux/{name}/reward/std_error": last.std_error,
                f"val-aux/{name}/reward/min": last.min,
                f"val-aux/{name}/reward/max": last.max,
                f"val-aux/{name}/trajectories": last.trajectories,
                f"val-aux/{name}/failed": last.failed,
                f"val-aux/{name}/version": last.version,
                f"val-aux/{name}/oldest_version": None if last.round is None else last.oldest_version,
            }
            figures |= {name: value for name, value in found.items() if value is not None}
        if is_complete:
            self._evals_ended = counters[f"outcome:{EVALUATED}"]
        return figures


def observe(batch: Batch) -> None:
    """Metrics of the process.

    Staleness is split into versions that passed while the rollout was played, and while it was queued.
    """
    members = batch.layout.members
    staleness = members.staleness(batch.version)  # NaN without a version
    in_flight = np.where(np.isnan(staleness), np.nan, members.table["newest"] - members.table["oldest"])
    logged_ms = np.array([group.logged_ms for group in batch.layout.groups], np.float64)
    metrics.training_metrics(batch.metrics, batch.metric_weights)
    metrics.batch_delivered(
        version=batch.version,
        staleness=staleness,
        in_flight_lag=in_flight,
        in_queue_lag=np.maximum(0, staleness - in_flight),
        num_tokens=batch.num_tokens,
        e2e_s=doors.wall() - logged_ms[batch.layout.group] / 1000,
    )


def _summary(name: str, values: Values) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _figures_of_groups(layout: Layout) -> dict[str, float]:
    """How far rewards differ within groups, and figures by data source.

    Groups whose members have equal pushed rewards teach nothing. If a group names a source: `<source>/...`; sources
    beyond the first 32 by name are `other`.
    """
    table, first = layout.members.table, np.flatnonzero(np.diff(layout.group, prepend=-1))
    rewards = table["reward"]
    sizes = np.diff(first, append=len(rewards))
    means = np.add.reduceat(rewards, first) / sizes
    squares = np.add.reduceat((rewards - np.repeat(means, sizes)) ** 2, first)
    is_flat = np.maximum.reduceat(rewards, first) == np.minimum.reduceat(rewards, first)
    figures = {
        "critic/score/std_mean": float(np.sqrt(squares / sizes).mean()),
        "critic/score/zero_std_ratio": float(is_flat.mean()),
    }
    sources = [group.data_source for group in layout.groups]
    if not any(sources):
        return figures
    names = sorted({source or UNKNOWN for source in sources})
    number_of = {name: min(number, MAX_DATA_SOURCES) for number, name in enumerate(names)}
    names = [*names[:MAX_DATA_SOURCES], "other"]
    of_member = np.array([number_of[source or UNKNOWN] for source in sources], np.int64)[layout.group]
    counts, sums, tokens = (
        np.bincount(of_member, weights, len(names)) for weights in (None, rewards, table["trainable"])
    )
    for number in np.flatnonzero(counts).tolist():
        figures |= {
            f"{names[number]}/critic/score/mean": float(sums[number] / counts[number]),
            f"{names[number]}/response_length/mean": float(tokens[number] / counts[number]),
            f"{names[number]}/trajectories": float(counts[number]),
        }
    return figures
