"""What the training loop says of its batches: trained on, held in a saved checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Literal

from ..batch.progress import Progress
from ..batch.record import BatchRecord
from ..batch.session import Session
from ..errors import SettingError
from .microbatch import Batch
from .sessions import Sessions

Mark = Literal["auto", "explicit"]
Commit = Literal["each_batch", "manual"]


class Marks:
    """Marks batches of one rank as trained and commits them; nothing here waits or tries again."""

    def __init__(
        self, sessions: Sessions, progress: Progress, leads: bool, mark: Mark, commit: Commit
    ) -> None:
        self._sessions = sessions
        self._progress = progress
        self._leads = leads
        self._mark = mark
        self._commits = commit == "each_batch"
        self.current: Batch | None = None  # delivered last; only where the next one marks it
        #: Set when a batch was marked; who waits for that clears it first.
        self.news = threading.Event()

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
        session = self._writing_session()
        if weights is not None:
            self._progress.publish_weights(session.version, weights)
            session.publish_weights()

    def finish(self) -> None:
        """As `TrainerQueue.finish`, once."""
        session = self._writing_session()
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
        session = self._writing_session()
        commits = self._mark == "explicit" and self._commits
        session.publish_version(record, commits)
        if commits:
            session.commit(session.version)
        self.news.set()

    def commit(self, state: Mapping[str, Any]) -> None:
        """As `TrainerQueue.commit`, once."""
        session = self._writing_session()
        if state["version"] > session.version:
            raise SettingError(
                f"state has version {state['version']}, this queue is at {session.version}: load it first"
            )
        session.commit(state["version"])

    def _writing_session(self) -> Session:
        """The session to write with. Only rank 0 writes, to the servers as they are now."""
        return self._sessions.checked() if self._leads else self._sessions.current()
