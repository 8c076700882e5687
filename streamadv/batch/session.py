"""A trainer session: one rank's part in its job's ownership of a run, on the servers as they are.

A session ends when a session that was founded later owns the run. After a server was replaced, which may have lost
recent writes, each rank begins its session again (`recovery.take_over`, `follower.join`) from its `Progress`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import tracing
from ..algorithms.chain.config import ChainConfig
from ..run import Run
from .carryover import coefficients_after
from .exclusion import DroppedGroups, Exclusions, dead_letter_groups, read_exclusions
from .progress import NamedBatch, Progress
from .record import BatchRecord, Death, NamingSettings


class Session:
    """What rank 0 (`leader.Leader`) and the other ranks (`follower.Follower`) have in common."""

    leads = False  # whether this is rank 0

    def __init__(
        self, run: Run, settings: NamingSettings, progress: Progress, server_ids: Sequence[str | None]
    ) -> None:
        """server_ids: of the run, asked before anything else of the session was read or written."""
        self.run = run
        self.progress = progress
        #: Groups dropped while batches were named, until somebody reports and clears them.
        self.dropped = DroppedGroups(run.name)
        self._settings = settings
        self._server_ids = server_ids
        self._chain = ChainConfig.model_validate(settings.chain)
        progress.kl = progress.kl or {}

    @property
    def batches(self) -> dict[int, NamedBatch]:
        """Named batches that are not committed, by k: see `Progress`."""
        return self.progress.batches

    def _ask(self, add: Callable[[Any], object]) -> Sequence[Any] | None:
        """Replies to the reads that `add` puts into a pipeline; None if a shard is not on the server it was on."""
        pipe = self.run.connection.scripts.pipeline(transaction=False)
        add(pipe)
        server_ids, replies = self.run.server_ids_with(pipe)
        return replies if server_ids == self._server_ids else None

    # A named batch

    def dead_letter(self, record: BatchRecord, deaths: Mapping[str, Death]) -> Exclusions:
        """Groups of a batch that cannot be computed become dead letters, which rank 0 writes.

        Returns all that is excluded from the batch.
        """
        dead, left_out = read_exclusions(self.run, record.id, record.groups)
        if self.leads:
            unwritten = {group_id: deaths[group_id] for group_id in deaths.keys() - dead}
            dead_letter_groups(self.run, record, unwritten, self.progress.fence)
        deaths_so_far = self.progress.batch(record).dead
        written_by_others = dead - deaths_so_far.keys()
        deaths_so_far.update(dict.fromkeys(written_by_others, Death("undecodable", "")) | dict(deaths))
        return Exclusions(set(deaths_so_far), left_out)

    def note_trained(self, record: BatchRecord, kl: float | None = None, trajectories: int = 0) -> None:
        """The batch is in the weights, so many trajectories with this mean KL, whatever the server knows."""
        if record.k >= self.progress.version:
            progress, prefetch = self.progress, self._settings.prefetch
            progress.kl = coefficients_after(
                self._chain, prefetch, progress.kl or {}, record.k, kl, trajectories
            )
            progress.train(record)
            batch = self.progress.batch(record)
            if self.leads:
                batch.record_spans(tracing.TRAIN, self.run.name, batch.delivered_ns or tracing.now())
            else:
                batch.groups.clear()
