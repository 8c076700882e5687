"""The results logs of a run's shards, as one rank reads them: each entry once, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from ..advantage.results import Result, parse_result
from ..batch.selection import BATCH_ID
from ..batch.work import WorkItem
from ..errors import WireError
from ..messages import brief
from ..run import Run


class Stray(NamedTuple):
    """An entry that holds no results of a batch of the run."""

    shard: int
    entry: str
    batch: str  # id, where it holds results of a batch that was committed or undone before they came
    problem: str | None  # why it holds no results at all


class ResultsLog:
    """The results that one rank has read and not delivered. A new trainer session begins with a new one."""

    def __init__(self) -> None:
        #: Last entry read of each shard.
        self.cursors: dict[int, str] = {}
        # By batch, in the order of the logs. `publish.lua` publishes one result of each work item: foreign processes
        # have written any others.
        self._results: dict[str, list[Result]] = defaultdict(list)

    def read(self, run: Run, batches: Container[str] | None) -> list[Stray]:
        """Read all new entries; keeps the results and returns the strays.

        batches: ids of the run's batches. None, on a rank that does not know them, takes results of any batch.
        """
        pipe = run.connection.scripts.pipeline(transaction=False)
        for shard, keys in enumerate(run.keys.shards):
            pipe.xrange(keys.results, f"({self.cursors.get(shard, '0-0')}", "+")
        logs: Any = pipe.execute()  # all of them first: a server that is away in between must not lose strays
        strays = []
        for shard, keys in enumerate(run.keys.shards):
            for entry_id, fields in logs[shard]:
                entry = self.cursors[shard] = entry_id.decode()
                try:
                    result = parse_result(keys, fields)
                    if batches is None or result.batch in batches:
                        self._results[result.batch].append(result)
                        continue
                    if not BATCH_ID.fullmatch(result.batch):
                        raise WireError(f"batch {brief(result.batch)} is none of this run")
                except WireError as error:
                    strays.append(Stray(shard, entry, "", str(error)))
                else:
                    strays.append(Stray(shard, entry, result.batch, None))
        return strays

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
