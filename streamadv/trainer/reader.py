"""Reading batches: what one rank does from the record of a batch to the batch as its training loop gets it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch

from ..advantage.results import Result, assign, misfit
from ..batch.record import BatchRecord, Death
from ..batch.session import Session
from ..batch.work import WorkItem, work_items
from ..errors import BatchLostError, UndecodableGroupError
from ..grouping.groups_log import read_groups
from ..store.retry import RETRYABLE
from .delivery import Fetched, deliver
from .fetch import ReadAhead
from .late_columns import LateColumn
from .microbatch import Batch
from .report import passed_over
from .results_log import ResultsLogs

logger = logging.getLogger(__name__)

STAGE: Final = "trainer"


class BatchReader:
    """What one rank has read of results and payloads of batches that are not delivered yet."""

    def __init__(
        self, rank: int, world_size: int, device: torch.device, late: Mapping[str, LateColumn]
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._device = device
        self._late = late
        self._ready = ResultsLogs()
        self.ahead: ReadAhead | None = None  # of the batch to be delivered next

    def restart(self) -> None:
        """A new session has begun: read the logs from their start."""
        self._ready = ResultsLogs()

    def wait(self, session: Session, block_ms: int, max_groups: int | None, stop: threading.Event) -> None:
        """As `ResultsLogs.wait`."""
        self._ready.wait(session, block_ms, max_groups, stop)

    def collect(self, session: Session) -> Batch | None:
        """The next batch if all its results are there. Raises BatchLostError if the server no longer has its groups."""
        record = session.find(session.progress.delivered)
        if record is None:
            return None
        self.read_ahead(session, record)
        items = work_items(record)
        self._ready.read(session)
        results = self._ready.results_of(record, items)
        if results is None:
            return None
        try:
            batch = self._deliver(session, record, items, results)
        except BatchLostError:
            if session.has_same_servers():
                raise
            return None  # lost a moment ago, with the last moments of a server: to be recovered from
        if batch is None:
            return None
        batch.metrics.update(passed_over(session.passed_over, batch))
        session.passed_over.clear()
        self._ready.forget(record)
        self.stop()
        session.progress.deliver(record)
        return batch

    def read_ahead(self, session: Session, record: BatchRecord | None) -> None:
        """Have the payloads fetched while results, or the trainer, are waited for. Errors are met again then."""
        if record is not None and (self.ahead is None or self.ahead.batch != record.id):
            self.stop()
            with suppress(BatchLostError, *RETRYABLE):
                groups = session.read_groups(record, ())
                self.ahead = ReadAhead(
                    session.run,
                    record,
                    groups,
                    rank=self._rank,
                    world_size=self._world_size,
                    device=self._device,
                )

    def stop(self) -> None:
        """Fetch nothing ahead."""
        if self.ahead is not None:
            self.ahead.stop()
        self.ahead = None

    def _deliver(
        self, session: Session, record: BatchRecord, items: Sequence[WorkItem], results: Sequence[Result]
    ) -> Batch | None:
        """This rank's part of the batch without the groups that turn out to be dead.

        A rank among several leaves out the trajectories only: the others do not know, and keep to the plan.

        None when results are not what their work item gives (they are forgotten), or a server is another one now.
        """
        deaths = {group_id: death for result in results for group_id, death in result.header.dead.items()}
        while True:
            dead, left_out = session.bury(record, deaths)
            groups = session.read_groups(record, dead)
            by_id = {group.group_id: group for group in groups}
            for item, result in zip(items, results, strict=True):
                problem = misfit(result, item, by_id)
                if problem is not None:
                    logger.error("%s: results of batch %d are not used: %s", STAGE, record.k, problem)
                    self._ready.refuse(record, item)
                    return None
            try:
                return deliver(
                    session.run,
                    record,
                    groups,
                    assign(items, {result.header.unit: result for result in results}, groups),
                    results,
                    rank=self._rank,
                    world_size=self._world_size,
                    device=self._device,
                    late=self._late,
                    ahead=Fetched({}) if self.ahead is None else self.ahead.result(),
                    left_out=left_out,
                )
            except UndecodableGroupError as error:
                if not session.has_same_servers():
                    return None  # as in `collect`: no fault of the data
                logger.error("%s: %s", STAGE, error)
                ids = {group_id for group_id, _ in error.problems}
                found = [pointer for pointer in record.groups if pointer.group_id in ids]
                read_groups(session.run, found)  # lost with their payloads: BatchLostError
                if self._world_size > 1:
                    if not session.leave_out(record, error.problems):
                        return None
                    continue
                for (group_id, _), text in error.problems.items():
                    deaths.setdefault(group_id, Death("undecodable", text))
