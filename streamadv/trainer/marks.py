"""What the training loop reports about its batches: trained on, and held in a saved checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from .. import doors
from ..batch.hold import NotHeldError
from ..batch.progress import Progress
from ..batch.record import BatchRecord
from ..batch.session import Session
from ..errors import SettingError
from ..messages import log_fields
from ..store.retry import RETRYABLE
from .microbatch import Batch
from .sessions import Sessions

logger = logging.getLogger(__name__)

Mark = Literal["auto", "explicit"]
Commit = Literal["each_batch", "manual"]


class Marks:
    """Marks batches of one rank as trained and commits them; nothing here waits or tries again."""

    def __init__(
        self, run: str, sessions: Sessions, progress: Progress, leads: bool, mark: Mark, commit: Commit
    ) -> None:
        self._run_name = run
        self._sessions = sessions
        self._progress = progress
        self._leads = leads
        self._mark = mark
        self._commits = commit == "each_batch"
        self.current: Batch | None = None  # delivered last; only where the next one marks it
        #: Set when a batch was marked; who waits for that clears it first.
        self.news = doors.Event()

    def delivered(self, batch: Batch) -> None:
        """The training loop gets the batch."""
        self.current = batch if self._mark == "auto" else None

    def finish_current(self) -> Session:
        """The loop asks for another batch: mark and commit the one before where that is the mode."""
        batch = self.current
        if batch is not None and batch.version >= self._progress.version:
            self.note_trained(batch)
        session = self._sessions.checked()
        if batch is not None and batch.version in session.batches:
            if session.published_version <= batch.version:
                session.publish_version(session.batches[batch.version].record, self._commits)
            if self._commits:
                session.commit(session.version)
        self.current = None
        return session

    def open(self, weights: str | None) -> None:
        """As `TrainerQueue.open`, once."""
        session = self.session()
        if weights is not None:
            self._progress.publish_weights(session.version, weights)
            session.publish_weights()

    def finish(self) -> None:
        """As `TrainerQueue.finish`, once."""
        session = self.session()
        if self._commits:
            session.commit(session.version)
        session.finish()
        self.news.set()

    def note_trained(self, batch: Batch) -> BatchRecord:
        """The first part of `TrainerQueue.trained`: notes in the progress, before any server is told.

        Not to be repeated: a session that commits the batch forgets it.
        """
        session = self._sessions.current()
        named = session.batches.get(batch.version)
        if named is None or named.record.id != batch.id:
            raise SettingError(f"batch {batch.version} is not one this queue has delivered and not committed")
        if batch.version > session.version:
            raise SettingError(
                f"batch {batch.version} is marked as trained before batch {session.version}: mark in order"
            )
        session.note_trained(named.record, batch.kl, batch.num_trajectories)
        return named.record

    def publish_trained(self, record: BatchRecord, weights: str | None) -> None:
        """The second part, once."""
        if weights is not None:
            self._progress.publish_weights(record.k + 1, weights)
        session = self.session()
        commits = self._mark == "explicit" and self._commits
        session.publish_version(record, commits)
        if commits:
            session.commit(session.version)
        self.news.set()

    def commit(self, state: Mapping[str, Any]) -> None:
        """As `TrainerQueue.commit`, once."""
        session = self.session()
        if state["version"] > session.version:
            raise SettingError(
                f"state has version {state['version']}, this queue is at {session.version}: load it first"
            )
        session.commit(state["version"])

    def session(self) -> Session:
        """The session on the servers as they are. Ranks above 0 do not wait for rank 0, which may wait for them."""
        if self._leads:
            return self._sessions.checked()
        with suppress(NotHeldError, *RETRYABLE):
            return self._sessions.checked()
        return self._sessions.current()

    def warn_of_current(self) -> None:
        """The batch in hand is in no checkpoint before the loop says that it was trained."""
        batch = self.current
        if batch is not None and batch.version >= self._progress.version:
            text = (
                "checkpoint %d does not count batch %d as trained, which this queue has delivered: if the weights have "
                "it, call queue.trained(batch) before the checkpoint, or it is trained on again after a restart"
            )
            fields = log_fields("batch_in_hand", run=self._run_name, role="trainer", batch=batch.version)
            logger.warning(text, self._progress.version, batch.version, extra=fields)

    def warn_of_uncommitted(self) -> None:
        """The queue is closed with batches that are in no checkpoint."""
        progress = self._progress
        count = progress.version - progress.committed
        if self._leads and count and not self._commits:
            text = (
                "run %s: %d batches are trained and in no checkpoint, and the queue is closed: the next trainer gets "
                "them again. Save one after the loop: with queue.checkpoint(folder) as path: ..."
            )
            fields = log_fields("closed_uncommitted", run=self._run_name, role="trainer", count=count)
            logger.warning(text, self._run_name, count, extra=fields)
