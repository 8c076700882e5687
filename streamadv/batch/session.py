"""A trainer session: one rank's part in its job's ownership of a run, on the servers as they are.

A session ends when a session that was founded later owns the run. After a server was replaced, which may have lost
recent writes, each rank begins its session again (`recovery.take_over`, `follower.join`) from its `Progress`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from .. import clock
from ..algorithms.chain.config import ChainConfig
from ..grouping.groups_log import LoggedGroup, read_groups
from ..run import Run
from ..store.reasons import Reason
from . import traces
from .carryover import KLCoefficients
from .dropped import DroppedGroups
from .exclusion import Exclusions, dead_letter_groups, read_exclusions
from .named import NamedBatch
from .progress import Progress
from .record import BatchRecord, Death
from .settings import NamingSettings


class Session:
    """What rank 0 (`leader.Leader`) and the other ranks (`follower.Follower`) have in common."""

    #: Whether this is rank 0.
    leads: bool
    #: Whether the last look at the groups logs came to their end, so that nothing fit for a batch follows.
    has_scanned_logs = True

    def __init__(
        self, run: Run, settings: NamingSettings, progress: Progress, server_ids: Sequence[str | None]
    ) -> None:
        """server_ids: of the run, asked before anything else of the session was read or written."""
        self.run = run
        self.progress = progress
        self.published_version = 0  # version that rank 0 has written into the run; 0 on other ranks
        #: Groups dropped while batches were named, until somebody reports and clears them.
        self.dropped = DroppedGroups(run.name)
        #: Last entry of each shard's groups log that rank 0 has read.
        self.cursors: dict[int, str] = {}
        self._settings = settings
        self._server_ids = server_ids
        self._chain = ChainConfig.model_validate(settings.chain)
        self._kl = KLCoefficients(self._chain, settings.prefetch, progress.kl)
        progress.kl = self._kl.to_json()

    @property
    def version(self) -> int:
        return self.progress.version

    @property
    def epoch(self) -> int:
        return self.progress.epoch

    @property
    def batches(self) -> dict[int, NamedBatch]:
        """Named batches that are not committed, by k: see `Progress`."""
        return self.progress.batches

    def has_same_servers(self) -> bool:
        """Whether every shard is still on the server it was on, and says there what the session has written."""
        asked = clock.now()
        pipe = self.run.connection.scripts.pipeline(transaction=False)
        self._ask_who_has_it(pipe)
        server_ids, replies = self.run.server_ids_with(pipe)
        if server_ids != self._server_ids or not self._is_held(replies):
            return False
        self.progress.servers_confirmed(asked, self._has_caught_up())
        return True

    def _ask_who_has_it(self, pipe: Any) -> None:
        """Add to a pipeline the reads whose replies `_is_held` judges."""
        raise NotImplementedError

    def _is_held(self, replies: Sequence[Any]) -> bool:
        """Whether the servers that have answered know this session."""
        raise NotImplementedError

    def _has_caught_up(self) -> bool:
        return True

    # Naming, which rank 0 does for all: nothing on the other ranks

    def look_again(self) -> None:
        """Read on in the groups logs, though they had ended, when a batch is to be named."""

    def name_ahead(self, ended: bool, max_groups: int | None = None) -> bool:
        """Name every batch that may be named now, and make the shards know it. True if one is new to this session.

        ended: no more groups can come, so fewer make a batch. max_groups: of a batch (default batch_groups).
        """
        return False

    @property
    def waits_for_groups(self) -> bool:
        """Whether another batch may be named as soon as there are groups for it."""
        return False

    def could_name(self, max_groups: int | None = None) -> bool:
        """Look into the groups logs again: whether there are enough groups for another batch."""
        return False

    def missing_fraction(self, max_groups: int | None = None) -> float:
        """(groups needed - groups there - 1) / groups needed; negative if the next batch could be named now."""
        return 0.0

    def find(self, k: int) -> BatchRecord | None:
        """The record of batch k, if it has been named."""
        raise NotImplementedError

    def waits_for_marks(self, k: int) -> Reason | None:
        """Why batch k cannot be named before the training loop marks earlier ones as trained; None if it can."""
        return None

    def waits_for(self, k: int) -> Reason:
        """Why this rank has no batch k yet. Rank 0 has the watchdog for that."""
        raise NotImplementedError

    # A named batch

    def read_groups(self, record: BatchRecord, dead: Container[str]) -> list[LoggedGroup]:
        """The groups of a batch without the dead ones, in its order, read from the log once.

        Raises BatchLostError if the server no longer has one.
        """
        groups = self.progress.batch(record).groups
        living = [pointer for pointer in record.groups if pointer.group_id not in dead]
        unread = [pointer for pointer in living if pointer.group_id not in groups]
        groups.update((group.group_id, group) for group in read_groups(self.run, unread))
        return [groups[pointer.group_id] for pointer in living]

    def dead_letter(self, record: BatchRecord, deaths: Mapping[str, Death]) -> Exclusions:
        """Groups of a batch that cannot be computed become dead letters, which rank 0 writes.

        Returns all that is excluded from the batch.
        """
        dead, left_out = read_exclusions(self.run, record.id, record.groups)
        if self.leads:
            unwritten = {group_id: deaths[group_id] for group_id in deaths.keys() - dead}
            dead_letter_groups(self.run, record, unwritten, self.epoch)
        deaths_so_far = self.progress.batch(record).dead
        written_by_others = dead - deaths_so_far.keys()
        deaths_so_far.update(dict.fromkeys(written_by_others, Death("undecodable", "")) | dict(deaths))
        return Exclusions(set(deaths_so_far), left_out)

    # Its end

    def note_trained(self, record: BatchRecord, kl: float | None = None, trajectories: int = 0) -> None:
        """The batch is in the weights, so many trajectories with this mean KL, whatever the server knows."""
        if record.k >= self.version:
            self._kl.trained(record.k, kl, trajectories)
            self.progress.kl = self._kl.to_json()
            self.progress.train(record)
            if self.leads:
                traces.trained(self.run, self.progress.batch(record))

    def publish_version(self, record: BatchRecord, commits: bool = False) -> None:
        """Rank 0 writes into the run that the batch was trained.

        commits: that all up to it are in a saved checkpoint as well; `commit` does the rest.
        """
        raise NotImplementedError

    def publish_weights(self) -> None:
        """Rank 0 tells producers where the weights of the present version lie, as the progress has it."""

    def finish(self) -> None:
        """The trainer ends the run; rank 0 tells the producers."""
        self.progress.finished = True

    def commit(self, version: int) -> None:
        """Rank 0 commits every batch below `version`: they are in a saved checkpoint."""

    def save_prompts(self) -> None:
        """Rank 0 notes in the progress what the run has of its prompts, for the next checkpoint."""

    def has_ended(self, k: int) -> bool:
        """Whether no batch k can come."""
        raise NotImplementedError

    def publish_end(self, ends: int) -> None:
        """Rank 0 lets the other ranks end before the next batch as well, so many times in all."""
