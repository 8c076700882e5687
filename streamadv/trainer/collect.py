"""From the record of the next batch to the batch itself, on one rank: reads results and payloads, delivers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Final

from .. import tracing
from ..advantage.results import BatchResults, Result, counts_of, misfit, parse_result
from ..batch import recovery
from ..batch.ends import leave_out, stored_result
from ..batch.leader import Leader
from ..batch.record import BatchRecord, Death, WorkItem, work_items
from ..batch.selection import BATCH_ID
from ..batch.session import Follower
from ..errors import BatchLostError, UndecodableGroupError, WireError
from ..grouping.groups_log import read_groups
from ..grouping.layout import Layout
from ..messages import brief, log_fields
from ..run.dead_letters import reject
from ..store.retry import RETRYABLE
from .delivery import ComputedBatch, deliver
from .fetch import ReadAhead
from .late_columns import LateColumn
from .microbatch import Batch
from .plan import Rank

logger = logging.getLogger(__name__)

STAGE: Final = "trainer"


class Collector:
    """What one rank has read, in one session, of batches that are not delivered: results, payloads of the next one."""

    def __init__(self, session: Leader | Follower, rank: Rank, late: Mapping[str, LateColumn]) -> None:
        self.session = session
        self._rank = rank
        self._late = late
        self.ahead: ReadAhead | None = None  # of the batch to be delivered next
        self.ready: tuple[BatchRecord, Batch] | None = None  # to be delivered next, once all of it is here
        self._layout = Layout.of([])  # made last
        #: Last entry read of each shard's results log: each is read once, in order.
        self.cursors = dict.fromkeys(range(len(session.run.keys.shards)), "0-0")
        # Not delivered yet, by batch, in the order of the logs. `publish.lua` publishes one result of each work item:
        # foreign processes have written any others.
        self.results: dict[str, list[Result]] = defaultdict(list)

    def collect(self) -> Batch | None:
        """The next batch without its unreadable groups, the same until it is handed out; None if there is none yet.

        The one place that decides what a missing or unreadable group means. Raises BatchLostError, LateColumnError and
        SettingError.
        """
        session, run = self.session, self.session.run
        while True:
            try:
                return self._deliver()
            except (BatchLostError, UndecodableGroupError) as error:
                # After data loss the next turn begins a session that repeats what is lost, see "Going back in time"
                # in docs/reference/guarantees.md: nothing may be dead-lettered for it.
                if not session.has_same_servers():
                    return None
                if isinstance(error, BatchLostError):
                    raise
                problems, text = error.problems, str(error)
            record = session.find(session.progress.delivered)
            if record is None:  # it was lost or committed meanwhile
                return None
            logger.error("%s: %s", STAGE, text, extra=self._log_fields("group_unreadable", record))
            if self._rank.world_size > 1:  # only its trajectories, because the other ranks keep to their plan
                if not leave_out(run, record, problems, session.progress.fence):
                    return None
                continue
            deaths: dict[str, Death] = {}
            for (group_id, _), problem in problems.items():
                deaths.setdefault(group_id, Death("undecodable", problem))
            failed, now = dict.fromkeys(deaths, "dead: undecodable"), tracing.now()
            tracing.record(tracing.DELIVER, run.name, deaths, now, k=record.k, failed=failed)
            session.dead_letter(record, deaths)

    def _deliver(self) -> Batch | None:
        """The next batch; None while it is not named, or some of its results are missing.

        Raises BatchLostError if the server no longer has its groups, UndecodableGroupError if some cannot be read.
        """
        session = self.session
        record = session.find(session.progress.delivered)
        # None: rank 0 may have committed it meanwhile.
        if self.ready is not None and record in (None, self.ready[0]):
            return self.ready[1]
        if record is None:
            return None
        self.read_ahead(record)
        computed = self._computed(record)
        if computed is None:
            return None
        if (ahead := self.ahead) is not None:  # `stop` may forget it meanwhile
            ahead.thread.join()
        fetched = None if ahead is None else ahead.fetched
        since = tracing.now()
        try:
            batch = deliver(session.run, computed, self._rank, self._late, fetched, session.progress.fence)
        except UndecodableGroupError as error:
            unreadable = {group_id for group_id, _ in error.problems}
            pointers = [pointer for pointer in record.groups if pointer.group_id in unreadable]
            read_groups(session.run, pointers)  # BatchLostError: they are gone, not broken
            raise
        session.progress.batch(record).delivered_ns = tracing.now()
        ids = [group.group_id for group in computed.layout.groups if session.leads]
        tracing.record(tracing.DELIVER, session.run.name, ids, since, k=record.k, batch=record.id)
        self.ready = record, batch
        return batch

    def read_ahead(self, record: BatchRecord | None) -> None:
        """Have a batch's payloads fetched while something is waited for. `collect` meets errors again."""
        if record is not None and (self.ahead is None or self.ahead.batch != record.id):
            self.stop()
            with suppress(BatchLostError, *RETRYABLE):
                layout = self._lay_out(record, ())
                self.ahead = ReadAhead(self.session.run, record, layout, self._rank)

    def stop(self) -> None:
        """Fetch nothing ahead."""
        if self.ahead is not None:
            self.ahead.stopped.set()
        self.ahead = None

    def _computed(self, record: BatchRecord) -> ComputedBatch | None:
        """The batch with its results, without dead groups. None while some results have not been published."""
        items = work_items(record)
        if self.results_of(record.id, items) is None:
            self.read()
        while (results := self.results_of(record.id, items)) is not None:
            deaths = {group_id: death for result in results for group_id, death in result.header.dead.items()}
            dead, left_out = self.session.dead_letter(record, deaths)
            layout = self._lay_out(record, dead)
            counts = {count.group_id: count for count in counts_of(layout)}
            # Only foreign processes publish what is not of its work item.
            for item, result in zip(items, results, strict=True):
                if (problem := misfit(result, item, counts)) is not None:
                    break
            else:
                return ComputedBatch(record, layout, BatchResults(results, layout), left_out)
            fields = self._log_fields("results_unusable", record)
            logger.error("%s: results of batch %d are not used: %s", STAGE, record.k, problem, extra=fields)
            self.results[record.id].remove(result)
        return None

    def _lay_out(self, record: BatchRecord, dead: Container[str]) -> Layout:
        """The groups of a batch without the dead ones, read from the log once.

        Raises BatchLostError if the server no longer has one.
        """
        read = self.session.progress.batch(record).groups
        living = [pointer for pointer in record.groups if pointer.group_id not in dead]
        unread = [pointer for pointer in living if pointer.group_id not in read]
        read.update((group.group_id, group) for group in read_groups(self.session.run, unread))
        groups = [read[pointer.group_id] for pointer in living]
        if self._layout.groups != groups:
            self._layout = Layout.of(groups)
        return self._layout

    def _log_fields(self, event: str, record: BatchRecord) -> dict[str, object]:
        return log_fields(event, run=self.session.run.name, role=STAGE, batch=record.k)

    # The results logs

    def read(self) -> None:
        """Keep the results that are new in the logs. Rank 0, which knows all batches, removes what is of none."""
        session, run = self.session, self.session.run
        pipe = run.connection.scripts.pipeline(transaction=False)
        for number, keys in enumerate(run.keys.shards):
            pipe.xrange(keys.results, f"({self.cursors[number]}", "+")
        for shard, entries in zip(run.shards, pipe.execute(), strict=True):
            for entry_id, fields in entries:
                named = list(session.progress.batches.values())  # at once: another thread may commit some
                try:
                    result = parse_result(shard.keys, fields)
                    batch = next((batch for batch in named if batch.record.id == result.batch), None)
                    if batch is not None and batch.results is not None:
                        batch.results.append(stored_result(shard, entry_id, fields))
                    if batch is not None or not session.leads:
                        self.results[result.batch].append(result)
                    elif not BATCH_ID.fullmatch(result.batch):
                        raise WireError(f"batch {brief(result.batch)} is none of this run")
                    elif session.has_same_servers():
                        # Published while the batch was committed or undone, after that had looked for results.
                        # On another server the next session decides: it may have lost the batch.
                        recovery.undo_in_shard(run, shard, result.batch, session.progress.fence)
                except WireError as error:
                    if session.leads and session.has_same_servers():
                        reject(shard, shard.keys.results, entry_id.decode(), str(error))
                self.cursors[shard.index] = entry_id.decode()  # the server may have gone away before

    def results_of(self, batch_id: str, items: Sequence[WorkItem]) -> list[Result] | None:
        """The first result of each work item of a batch; None while some have not been published."""
        first: dict[int, Result] = {}
        for result in self.results[batch_id]:
            first.setdefault(result.header.unit, result)
        if any(item.number not in first for item in items):
            return None
        return [first[item.number] for item in items]
