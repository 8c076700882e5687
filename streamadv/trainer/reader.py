"""From the record of the next batch to the batch itself, on one rank: collects results, reads payloads, delivers."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Final

from .. import tracing
from ..advantage.results import BatchResults, Result, counts_of, misfit
from ..batch import traces
from ..batch.exclusion import leave_out
from ..batch.record import BatchRecord, Death
from ..batch.session import Session
from ..batch.work import WorkItem, work_items
from ..errors import BatchLostError, UndecodableGroupError
from ..grouping.groups_log import Pointer, read_groups
from ..grouping.layout import Layout
from ..messages import log_fields
from ..store.retry import RETRYABLE
from .delivery import ComputedBatch, deliver
from .fetch import ReadAhead
from .late_columns import LateColumn
from .memory import ColumnMemory
from .microbatch import Batch
from .plan import Rank
from .report import batch_figures, named
from .results_log import ResultsLog

logger = logging.getLogger(__name__)

STAGE: Final = "trainer"


class BatchReader:
    """What one rank has read, in one session, of batches that are not delivered: results, payloads of the next one."""

    def __init__(self, session: Session, rank: Rank, late: Mapping[str, LateColumn]) -> None:
        self.session = session
        self._rank = rank
        self._late = late
        self.log = ResultsLog(session)
        self.ahead: ReadAhead | None = None  # of the batch to be delivered next
        self.ready: tuple[BatchRecord, Batch] | None = None  # to be delivered next, once all of it is here
        self._layout = Layout.of([])  # made last
        self._memory = ColumnMemory(rank.device)

    def collect(self) -> Batch | None:
        """The next batch, the same until `hand_out`. None while it is not named, or some of its results are missing.

        Raises BatchLostError if the server no longer has its groups, UndecodableGroupError if some cannot be read:
        pass that to `exclude` and call again. Also LateColumnError and SettingError.
        """
        session = self.session
        record = session.find(session.progress.delivered)
        if self.ready is not None and record in (
            None,
            self.ready[0],
        ):  # rank 0 may have committed it meanwhile
            return self.ready[1]
        if record is None:
            self.log.remove_strays()
            return None
        self.read_ahead(record)
        computed = self._computed(record)
        if computed is None:
            return None
        fetched = self.ahead.result() if self.ahead else None
        since = tracing.now()
        try:
            batch = deliver(session.run, computed, self._rank, self._late, self._memory, fetched)
        except UndecodableGroupError as error:
            read_groups(session.run, _pointers(record, error))  # BatchLostError: they are gone, not broken
            raise
        figures = {**batch_figures(batch), **session.dropped.figures(), **batch.metrics}
        batch.metrics.clear()
        batch.metrics.update(named(figures))
        of_batch = session.progress.batch(record)
        traces.delivered(session.run, of_batch, computed.layout.groups, since, session.leads)
        self.ready = record, batch
        return batch

    def hand_out(self) -> None:
        """The training loop gets the batch that is ready."""
        assert self.ready is not None
        record, _ = self.ready
        self.session.progress.deliver(record)
        self.ready = None
        self.session.dropped.clear()
        self.log.forget(record.id)
        self.stop()

    def exclude(self, error: UndecodableGroupError) -> bool:
        """Exclude what `collect` could not read from the next batch: its groups become dead letters.

        A rank among several only leaves out its trajectories, because the other ranks keep to their plan. False if the
        batch was lost or committed meanwhile.
        """
        session = self.session
        record = session.find(session.progress.delivered)
        if record is None:
            return False
        logger.error("%s: %s", STAGE, error, extra=self._log_fields("group_unreadable", record))
        if self._rank.world_size > 1:
            return leave_out(session.run, record, error.problems, session.epoch)
        deaths: dict[str, Death] = {}
        for (group_id, _), text in error.problems.items():
            deaths.setdefault(group_id, Death("undecodable", text))
        traces.unreadable(session.run, record, self._layout.groups, deaths)
        session.dead_letter(record, deaths)
        return True

    def read_ahead(self, record: BatchRecord | None) -> None:
        """Have a batch's payloads fetched while something is waited for. `collect` meets errors again."""
        if record is not None and (self.ahead is None or self.ahead.batch != record.id):
            self.stop()
            with suppress(BatchLostError, *RETRYABLE):
                layout = self._lay_out(record, ())
                self.ahead = ReadAhead(self.session.run, record, layout, self._rank, self._memory)

    def stop(self) -> None:
        """Fetch nothing ahead."""
        if self.ahead is not None:
            self.ahead.stop()
        self.ahead = None

    def _computed(self, record: BatchRecord) -> ComputedBatch | None:
        """The batch with its results, without dead groups. None while some results have not been published."""
        items = work_items(record)
        if self.log.results_of(record.id, items) is None:
            self.log.read()
        self.log.remove_strays()
        while (results := self.log.results_of(record.id, items)) is not None:
            deaths = {group_id: death for result in results for group_id, death in result.header.dead.items()}
            dead, left_out = self.session.dead_letter(record, deaths)
            layout = self._lay_out(record, dead)
            foreign = _first_misfit(items, results, layout)
            if foreign is None:
                return ComputedBatch(record, layout, BatchResults(results, layout), left_out)
            result, problem = foreign
            fields = self._log_fields("results_unusable", record)
            logger.error("%s: results of batch %d are not used: %s", STAGE, record.k, problem, extra=fields)
            self.log.remove(result)
        return None

    def _lay_out(self, record: BatchRecord, dead: Container[str]) -> Layout:
        """The groups of a batch without the dead ones."""
        groups = self.session.read_groups(record, dead)
        if self._layout.groups != groups:
            self._layout = Layout.of(groups)
        return self._layout

    def _log_fields(self, event: str, record: BatchRecord) -> dict[str, object]:
        return log_fields(event, run=self.session.run.name, role=STAGE, batch=record.k)


def _first_misfit(
    items: Sequence[WorkItem], results: Sequence[Result], layout: Layout
) -> tuple[Result, str] | None:
    """A result that is not of its work item, and why; None if all fit. Only foreign processes publish such."""
    counts = {count.group_id: count for count in counts_of(layout)}
    for item, result in zip(items, results, strict=True):
        problem = misfit(result, item, counts)
        if problem is not None:
            return result, problem
    return None


def _pointers(record: BatchRecord, error: UndecodableGroupError) -> list[Pointer]:
    group_ids = {group_id for group_id, _ in error.problems}
    return [pointer for pointer in record.groups if pointer.group_id in group_ids]
