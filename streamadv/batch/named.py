"""A named batch, and what one rank knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..grouping.groups_log import LoggedGroup, Pointer
from .commit import CommitArguments, StoredResult
from .record import BatchRecord, Death


@dataclass(slots=True)
class NamedBatch:
    """Record and dead letters hold whatever a server loses; the rest is true of the servers of one trainer session."""

    record: BatchRecord
    #: Groups that became dead letters since the batch was named, by id.
    dead: dict[str, Death] = field(default_factory=dict)
    #: Whether `name_ahead` has seen to it that all its shards know it, see `work.apply`.
    is_applied: bool = False
    #: Groups by id, as they were read from the log, until the batch is trained.
    groups: dict[str, LoggedGroup] = field(default_factory=dict)
    #: What commit needs of them, once the batch is trained.
    commit_arguments: dict[str, CommitArguments] = field(default_factory=dict)
    #: Entries of the results logs that are its own, as far as they were read: all of them from delivery on. None: an
    #: earlier session may have delivered it, and this one need not read them all.
    results: list[StoredResult] | None = field(default_factory=list)
    #: Metrics of the batch that its kept groups have beside their record.
    figures: dict[str, float] = field(default_factory=dict)
    #: On rank 0, from delivery on: trace contexts of its groups, by id, and when it was delivered (`tracing.now`).
    traces: dict[str, bytes] = field(default_factory=dict)
    delivered_ns: int = 0

    @property
    def living(self) -> list[Pointer]:
        """Its groups that are not dead letters, in the batch's order."""
        return [pointer for pointer in self.record.groups if pointer.group_id not in self.dead]

    def on_other_servers(self) -> NamedBatch:
        """The part that holds in a session on other servers."""
        return NamedBatch(
            self.record, self.dead, results=None, traces=self.traces, delivered_ns=self.delivered_ns
        )
