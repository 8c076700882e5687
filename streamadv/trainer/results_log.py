"""The results logs of a run as one rank follows them: results of work items, waited for and read once."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from redis.exceptions import ResponseError

from ..advantage.results import Result, parse_result
from ..batch import commit
from ..batch.record import BatchRecord
from ..batch.selection import BATCH_ID
from ..batch.session import Session
from ..batch.work import WorkItem
from ..errors import WireError
from ..messages import brief
from ..run.malformed import reject_logged

#: The groups log is left alone for so long while a whole batch is missing, less and less as it fills: not each group
#: that comes is worth three round trips. Results and the last group are never waited for.
REST_S: Final = 0.05


class ResultsLogs:
    """What has been read of them. Begun anew with every session."""

    def __init__(self) -> None:
        self._cursors: dict[int, str] = {}  # last entry read of each shard
        #: By batch and number of the work item; more than one for an item: copies, or foreign ones.
        self._results: dict[str, dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))

    def read(self, session: Session) -> None:
        """All that is new. Rank 0 removes what is no result of a batch of the run, and results that came too late."""
        run, known = session.run, {record.id for record in session.records.values()}
        for shard, keys in enumerate(run.keys.shards):
            after = self._cursors.get(shard, "0-0")
            entries: Any = run.connection.scripts.xrange(keys.results, f"({after}", "+")
            for entry, fields in entries:
                self._cursors[shard] = entry.decode()
                problem = None
                try:
                    result = parse_result(keys, fields)
                    if not session.leads or result.batch in known:
                        self._results[result.batch][result.header.unit].append(result)
                        continue
                    if not BATCH_ID.fullmatch(result.batch):
                        raise WireError(f"batch {brief(result.batch)} is none of this run")
                except WireError as error:
                    problem = str(error)
                if not session.has_same_servers():
                    return  # a shard that forgot a moment ago that the batch was undone: to be recovered from
                if problem is None:
                    # Published while the batch was committed or undone, behind the look at what there is to delete.
                    commit.undo(run, shard, result.batch, session.epoch)
                elif session.leads:
                    reject_logged(run, shard, keys.results, entry.decode(), problem, record=False)

    def results_of(self, record: BatchRecord, items: Sequence[WorkItem]) -> list[Result] | None:
        """One result for each work item of a batch, or None while some are not there."""
        found = self._results[record.id]
        if not all(found[item.number] for item in items):
            return None
        return [found[item.number][0] for item in items]

    def refuse(self, record: BatchRecord, item: WorkItem) -> None:
        """Forget what `results_of` has given for a work item: another one is to come."""
        del self._results[record.id][item.number][0]

    def forget(self, record: BatchRecord) -> None:
        """The batch is delivered."""
        del self._results[record.id]

    def wait(self, session: Session, block_ms: int, max_groups: int | None, stop: threading.Event) -> None:
        """Until a result or the groups for another batch are there, or the block is over."""
        shards = session.run.keys.shards
        share = max(1, block_ms // len(shards))
        started = time.monotonic()
        rest_until = started + REST_S * session.share_behind_next(max_groups)
        blocking = session.run.connection.blocking(share)
        for shard, keys in enumerate(shards):
            until = time.monotonic() + share / 1000
            while (left_ms := round((until - time.monotonic()) * 1000)) > 0:
                streams: dict[Any, Any] = {keys.results: self._cursors.get(shard, "0-0")}
                rest_ms = round((rest_until - time.monotonic()) * 1000) if session.waits_for_groups else 0
                if rest_ms > 0:
                    left_ms = min(left_ms, rest_ms)
                elif session.waits_for_groups:
                    streams[keys.groups] = session.seen[shard]
                reply: Any = None
                try:
                    reply = blocking.xread(streams, count=1, block=left_ms)
                except ResponseError as error:
                    if not str(error).startswith("UNBLOCKED"):  # a primary was demoted while this waited
                        raise
                if not reply:
                    if rest_ms > 0:
                        continue
                    break
                if keys.results.encode() in dict(reply) or session.could_name(max_groups):
                    return
                rest_until = time.monotonic() + REST_S * session.share_behind_next(max_groups)
        if time.monotonic() - started < block_ms / 2000:
            stop.wait(share / 1000)  # a server that does not block must not be asked in a loop
