"""Reads the results logs of a run's shards for one rank: each entry once, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..advantage.results import Result, parse_result
from ..batch import recovery
from ..batch.commit import stored_result
from ..batch.selection import BATCH_ID
from ..batch.session import Session
from ..batch.work import WorkItem
from ..errors import WireError
from ..messages import brief
from ..run.malformed import reject


class Stray(NamedTuple):
    """An entry that holds no results of a batch of the run."""

    shard: int
    entry: str
    batch: str  # id, where it holds results of a batch that was committed or undone before they came
    problem: str | None  # why it holds no results at all


class ResultsLog:
    """The results that one rank has read, in one session, and not delivered."""

    def __init__(self, session: Session) -> None:
        self._session = session
        #: Last entry read of each shard.
        self.cursors = dict.fromkeys(range(len(session.run.keys.shards)), "0-0")
        #: Read and not removed yet: the server may be away in between. Only rank 0 knows the batches, and removes any.
        self.strays: list[Stray] = []
        # By batch, in the order of the logs. `publish.lua` publishes one result of each work item: foreign processes
        # have written any others.
        self._results: dict[str, list[Result]] = defaultdict(list)

    def read(self) -> None:
        """Read all new entries."""
        run = self._session.run
        pipe = run.connection.scripts.pipeline(transaction=False)
        for shard, keys in enumerate(run.keys.shards):
            pipe.xrange(keys.results, f"({self.cursors[shard]}", "+")
        for shard, entries in enumerate(pipe.execute()):
            self.take(shard, entries)

    def take(self, shard: int, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """Keep the results of new entries of a shard, and on rank 0 note the strays."""
        session = self._session
        where = session.run.shard(shard)
        named = list(session.batches.values())  # at once: another thread may commit some
        batches = {batch.record.id: batch for batch in named}
        for entry_id, fields in entries:
            entry = entry_id.decode()
            try:
                result = parse_result(where.keys, fields)
                if result.batch in batches and (known := batches[result.batch].results) is not None:
                    known.append(stored_result(where, entry_id, fields))
                if not session.leads or result.batch in batches:
                    self._results[result.batch].append(result)
                elif BATCH_ID.fullmatch(result.batch):
                    self.strays.append(Stray(shard, entry, result.batch, None))
                else:
                    raise WireError(f"batch {brief(result.batch)} is none of this run")
            except WireError as error:
                if session.leads:
                    self.strays.append(Stray(shard, entry, "", str(error)))
            self.cursors[shard] = entry

    def remove_strays(self) -> None:
        """Remove strays from the logs.

        On a server that lost recent writes a stray may belong to a batch: the next session decides.
        """
        session = self._session
        if self.strays and session.has_same_servers():
            while self.strays:
                shard, entry, batch, problem = self.strays[-1]
                where = session.run.shard(shard)
                if problem is None:
                    # Published while the batch was committed or undone, after that had looked for results to delete.
                    recovery.undo_in_shard(session.run, where, batch, session.epoch)
                else:
                    reject(where, where.keys.results, entry, problem)
                self.strays.pop()

    def results_of(self, batch_id: str, items: Sequence[WorkItem]) -> list[Result] | None:
        """The first result of each work item of a batch; None while some have not been published."""
        first: dict[int, Result] = {}
        for result in self._results[batch_id]:
            first.setdefault(result.header.unit, result)
        if any(item.number not in first for item in items):
            return None
        return [first[item.number] for item in items]

    def remove(self, result: Result) -> None:
        """Forget one result: `results_of` returns the next one of that work item."""
        self._results[result.batch].remove(result)

    def forget(self, batch_id: str) -> None:
        """Forget the results of a delivered batch."""
        self._results.pop(batch_id, None)
