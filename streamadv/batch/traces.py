"""Traces of named batches: each batch has its own trace, and each of its steps is also in the traces of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import tracing
from ..grouping.groups_log import LoggedGroup
from ..run import Run
from .progress import NamedBatch
from .record import BatchRecord


def begin(run: Run, k: int, groups: Sequence[LoggedGroup], since: int) -> str | None:
    """The `traceparent` of batch k, which is named now, with links to the traces of its groups; None without any."""
    traces = tracing.traces_of(groups)
    return tracing.record_batch(tracing.NAME, run.name, k, since, None, traces) if traces else None


def named(run: Run, record: BatchRecord, groups: Sequence[LoggedGroup], since: int) -> None:
    """Rank 0 has named the batch."""
    traces = tracing.traces_of(groups)
    tracing.record(tracing.NAME, run.name, traces, since, k=record.k, batch=record.trace)


def dropped(run: Run, k: int, unfit: Sequence[tuple[LoggedGroup, str]], since: int) -> None:
    """Rank 0 has dropped groups, for these reasons, while it named batch k."""
    failed = {
        group.group_id: reason.replace("dead:", "dead: ")
        if reason.startswith("dead:")
        else f"dropped: {reason}"
        for group, reason in unfit
    }
    traces = tracing.traces_of(group for group, _ in unfit)
    tracing.record(tracing.NAME, run.name, traces, since, k=k, failed=failed)


def unreadable(
    run: Run, record: BatchRecord, groups: Sequence[LoggedGroup], deaths: Mapping[str, object]
) -> None:
    """Groups of a batch become dead letters, because their rank cannot read them."""
    traces = tracing.traces_of(group for group in groups if group.group_id in deaths)
    failed = dict.fromkeys(traces, "dead: undecodable")
    tracing.record(
        tracing.DELIVER, run.name, traces, tracing.now(), k=record.k, batch=record.trace, failed=failed
    )


def delivered(run: Run, batch: NamedBatch, groups: Sequence[LoggedGroup], since: int, leads: bool) -> None:
    """One rank gives the batch to its training loop. leads: on rank 0, which keeps the traces until the commit."""
    record = batch.record
    tracing.record_batch(tracing.DELIVER, run.name, record.k, since, record.trace)
    if leads:
        batch.traces, batch.delivered_ns = tracing.traces_of(groups), tracing.now()
        tracing.record(tracing.DELIVER, run.name, batch.traces, since, k=record.k, batch=record.trace)


def trained(run: Run, batch: NamedBatch) -> None:
    """The training loop has trained on the batch since rank 0 gave it to it."""
    _on_rank_0(tracing.TRAIN, run, batch, batch.delivered_ns or tracing.now())


def committed(run: Run, batch: NamedBatch, since: int) -> None:
    """Rank 0 has committed the batch: these traces end."""
    _on_rank_0(tracing.COMMIT, run, batch, since)


def _on_rank_0(step: tracing.Step, run: Run, batch: NamedBatch, since: int) -> None:
    record = batch.record
    tracing.record_batch(step, run.name, record.k, since, record.trace)
    tracing.record(step, run.name, batch.traces, since, k=record.k, batch=record.trace)
