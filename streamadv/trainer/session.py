"""One rank's trainer sessions, and what its training loop reports through them: trained, and in a checkpoint.

A thread sends the rank's heartbeat, however long a step takes.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Literal

from .. import clock, doors
from ..batch.leader import Leader
from ..batch.progress import Progress
from ..batch.record import BatchRecord, NamingSettings
from ..batch.recovery import take_over, undo_from
from ..batch.session import JOB_ID, Follower, NotHeldError, Session, count_queue, find_job, join, random_job
from ..errors import EpochFencedError, SettingError
from ..messages import brief, log_fields
from ..metrics.instruments import KL_ESTIMATES
from ..run import Run, open_run
from ..run.heartbeats import BEAT_S, REPORT, Doing, RankReport
from ..run.manifest import RunSettings
from ..store.connection import Connection
from ..store.replies import as_count
from ..store.retry import RETRYABLE, SERVER_ERRORS
from .microbatch import Batch
from .plan import Rank

logger = logging.getLogger(__name__)

Mark = Literal["auto", "explicit"]
Commit = Literal["each_batch", "manual"]

#: Seconds between two looks at whether the server has the manifest that this job knows.
REFRESH_S: Final = 1.0


class Sessions:
    """The trainer sessions of one rank, one after another; all go on from the same `progress`.

    A session is begun when it is first needed, and again when a server was replaced. Rank 0 takes the run; a rank above
    0 joins, and its calls raise NotHeldError until rank 0 has taken it. All calls raise EpochFencedError when a newer
    trainer has taken over. No call is made to a server before the first session, and none is tried again here.
    """

    def __init__(
        self,
        connection: Connection,
        run: str,
        settings: RunSettings | None,
        naming: NamingSettings,
        rank: Rank,
        job: str | None,
        progress: Progress,
        mark: Mark,
        commit: Commit,
    ) -> None:
        self.naming = naming
        self.progress = progress
        if job is not None and not JOB_ID.fullmatch(job):
            raise SettingError(f"job is {brief(job)}: use 1 to 200 printable characters without spaces")
        progress.job = job or ""
        self.run_name, self.rank = run, rank
        self._connection = connection
        self._run_settings = settings
        self.marks_itself = mark == "auto"  # whether the next batch marks the one before
        self._commits = commit == "each_batch"
        #: Of this queue among those of its run, rank and process.
        self.number = count_queue(run, rank.number) if rank.world_size > 1 else 0
        self.in_hand: Batch | None = None  # delivered last; only where the next one marks it
        #: Set when a batch was marked; who waits for that clears it first.
        self.news = doors.Event()
        self._run: Run | None = None
        self._session: Leader | Follower | None = None
        self._is_stale = False  # its servers were replaced
        self._heartbeat = Heartbeat(rank, progress)
        self._is_checked = False  # the server has accepted this process once
        self._warns_of_history = False  # at the first batch, unless a checkpoint is loaded before

    # The session

    def current(self) -> Leader | Follower:
        """The session, whatever servers it began on."""
        return self._session or self._begin()

    def checked(self) -> Leader | Follower:
        """The session on the servers as they are now.

        After a restart or failover that is a new one, which repeats what the servers may have lost: see "Going back in
        time" in docs/reference/guarantees.md.
        """
        if self._run is not None:
            self._run.refresh_if_changed(REFRESH_S)
        if self._session is not None and not self._is_stale and not self._session.has_same_servers():
            self.progress.servers_replaced()
            self._is_stale = True
        was_stale = self._is_stale
        session = self._begin() if was_stale else self.current()
        if was_stale and session.leads:  # a newer trainer has not taken over: that has raised
            logger.warning(
                "trainer: the server is not the one it was: what it may have lost was repeated",
                extra=self._log_fields("session_stale"),
            )
        waiting = (b.record for k, b in self.progress.batches.items() if k >= self.progress.delivered)
        others = [record.k for record in waiting if not record.is_for(self.naming)]
        if session.leads and others:
            undo_from(session.run, self.progress, min(others))
            self._session = None
            session = self._begin()
        if self._warns_of_history:
            self._warns_of_history = False
            self._warn_of_history()
        return session

    def at_hand(self) -> Leader | Follower:
        """As `checked`, but ranks above 0 do not wait for rank 0, which may wait for them."""
        if self.rank.number == 0:
            return self.checked()
        with suppress(NotHeldError, *RETRYABLE):
            return self.checked()
        return self.current()

    def opened_run(self) -> Run:
        """The run, whoever has it."""
        # Credentials are checked once: later a refusal can be transient, as a restarting server loads its users late.
        if not self._is_checked:
            self._connection.check()
            self._is_checked = True
        if self._run is None:
            self._run = open_run(self._connection, self.run_name, self._run_settings)
        else:
            self._run.refresh()  # writes the manifest again if the server has lost it
        return self._run

    def stored_versions(self) -> tuple[int, int]:
        """Version and committed version of the run; it is not taken."""
        run = self.opened_run()
        version, committed = run.connection.scripts.hmget(run.keys.home.session, ["version", "committed"])
        return as_count(version), as_count(committed)

    def end(self) -> None:
        """Begin anew at the next call: the progress was set back to a checkpoint."""
        self._log_drops()
        self._session, self._warns_of_history = None, False

    def close(self) -> None:
        """Say that this rank leaves the run."""
        self._warn_of_uncommitted()
        self._log_drops()
        self._heartbeat.close()

    def _log_drops(self) -> None:
        if self._session is not None:
            self._session.dropped.lines.log(now=True)

    def _begin(self) -> Leader | Follower:
        run = self.opened_run()
        session: Leader | Follower
        if not self.progress.job:
            job = find_job(self.number) if self.rank.world_size > 1 else None
            if job is None and self.rank.number > 0:
                raise SettingError(
                    f"job is not given on rank {self.rank.number} of {self.rank.world_size}: pass the same job= on "
                    "every rank, another one at each start, or use torchrun, SLURM or torch.distributed"
                )
            self.progress.job = job or random_job()
        if self.rank.number == 0:
            begins = self.progress.began is None
            session = take_over(run, self.naming, self.progress)
            self._warns_of_history |= begins and self.progress.version > 0
        else:
            session = join(run, self.naming, self.progress)
        self._session, self._is_stale = session, False
        self._heartbeat.start(session)
        return session

    # What the training loop reports

    def finish_batch(self) -> Leader | Follower:
        """The loop asks for another batch: mark and commit the one before where that is the mode."""
        batch = self.in_hand
        if batch is not None and batch.version >= self.progress.version:
            self.note_trained(batch)
        session = self.checked()
        if isinstance(session, Leader) and batch is not None and batch.version in self.progress.batches:
            if session.published_version <= batch.version:
                session.publish_version(self.progress.batches[batch.version].record, self._commits)
            if self._commits:
                session.commit(self.progress.version)
        self.in_hand = None
        return session

    def open(self, weights: str | None) -> None:
        """As `TrainerQueue.open`, once."""
        session = self.at_hand()
        if weights is not None:
            self.progress.publish_weights(self.progress.version, weights)
            if isinstance(session, Leader):
                session.publish_version(None)

    def finish(self) -> None:
        """As `TrainerQueue.finish`, once."""
        session = self.at_hand()
        if isinstance(session, Leader) and self._commits:
            session.commit(self.progress.version)
        self.progress.finished = True
        if isinstance(session, Leader):
            session.finish()
        self.news.set()

    def note_trained(self, batch: Batch) -> BatchRecord:
        """Note it in the progress, before any server is told.

        Not to be repeated: a session that commits the batch forgets it.
        """
        session = self.current()
        named = self.progress.batches.get(batch.version)
        if named is None or named.record.id != batch.id:
            raise SettingError(f"batch {batch.version} is not one this queue has delivered and not committed")
        if batch.version > self.progress.version:
            raise SettingError(
                f"batch {batch.version} is marked as trained before batch {self.progress.version}: mark in order"
            )
        session.note_trained(named.record, batch.kl, batch.num_trajectories)
        named.figures = {name: batch.metrics[name] for name in KL_ESTIMATES if name in batch.metrics}
        return named.record

    def trained(self, batch: Batch, weights: str | None, noted: list[BatchRecord]) -> None:
        """As `TrainerQueue.trained`. noted: gets the record, so that a repeated call finds it there."""
        if not noted:
            noted.append(self.note_trained(batch))
        [record] = noted
        if weights is not None:
            self.progress.publish_weights(record.k + 1, weights)
        session = self.at_hand()
        commits = self._commits and not self.marks_itself
        if isinstance(session, Leader):
            session.publish_version(record, commits)
            if commits:
                session.commit(self.progress.version)
        self.news.set()

    def save_prompts(self) -> None:
        """Rank 0 notes in the progress what the run has of its prompts, for the next checkpoint."""
        session = self.current()
        if isinstance(session, Leader):
            session.prompts.save(self.progress)

    def commit(self, state: Mapping[str, Any]) -> None:
        """As `TrainerQueue.commit`, once."""
        session = self.at_hand()
        if state["version"] > self.progress.version:
            raise SettingError(
                f"state has version {state['version']}, this queue is at {self.progress.version}: load it first"
            )
        if isinstance(session, Leader):
            session.commit(state["version"])

    # What it warns of

    def _warn_of_history(self) -> None:
        """A run with history and no checkpoint loaded: the weights may not be those that the run has trained."""
        version = self.progress.version
        logger.log(
            logging.INFO if self.naming.max_staleness is None else logging.WARNING,
            "run %s was trained to version %d before, and no checkpoint is loaded: these weights count as version %d, "
            "and are trained on what the policy before has played. If they are not that policy's, call queue.resume("
            "the folder of its checkpoints), give another run=, or `streamadv runs delete --run %s`",
            self.run_name,
            version,
            version,
            self.run_name,
            extra=self._log_fields("run_with_history"),
        )

    def warn_of_batch_in_hand(self) -> None:
        """The batch in hand is in no checkpoint before the loop says that it was trained."""
        batch = self.in_hand
        if batch is not None and batch.version >= self.progress.version:
            text = (
                "checkpoint %d does not count batch %d as trained, which this queue has delivered: if the weights have "
                "it, call queue.trained(batch) before the checkpoint, or it is trained on again after a restart"
            )
            fields = self._log_fields("batch_in_hand", batch=batch.version)
            logger.warning(text, self.progress.version, batch.version, extra=fields)

    def _warn_of_uncommitted(self) -> None:
        """The queue is closed with batches that are in no checkpoint."""
        count = self.progress.version - self.progress.committed
        if self.rank.number == 0 and count and not self._commits:
            text = (
                "run %s: %d batches are trained and in no checkpoint, and the queue is closed: the next trainer gets "
                "them again. Save one after the loop: with queue.checkpoint(folder) as path: ..."
            )
            fields = self._log_fields("closed_uncommitted", count=count)
            logger.warning(text, self.run_name, count, extra=fields)

    def _log_fields(self, event: str, **fields: Any) -> dict[str, object]:
        return log_fields(event, run=self.run_name, role="trainer", **fields)


# The heartbeat

#: Seconds between two checks for a change.
LOOK_S: Final = 1.0
#: Seconds that `close` waits for a heartbeat under way.
CLOSE_S: Final = 1.0


class Heartbeat:
    """Beats from `start` until `close`, or until nobody has this object any more.

    It only reads the progress, and writes nothing else of the session. A newer trainer's run is left alone.
    """

    def __init__(self, rank: Rank, progress: Progress) -> None:
        self._rank = rank
        self._progress = progress
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._closed = doors.Event()
        self._beat_at = -math.inf
        self._told: tuple[int, int, int] | None = None  # how far the rank was at that time

    def start(self, session: Session) -> None:
        """Beat in this session from now on."""
        self._session = session
        if self._thread is None and not self._closed.is_set():
            arguments = (weakref.ref(self), self._closed)
            self._thread = doors.Thread(target=_beat, args=arguments, name="streamadv-heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say that this rank leaves, and stop. Does not wait for a server that is away."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            self._thread = None
            self.beat("left")

    def beat_if_due(self) -> None:
        """One heartbeat, if the last one is long ago or something has changed since."""
        now, where = clock.now(), (self._progress.delivered, self._progress.version, self._progress.epoch)
        if now - self._beat_at >= BEAT_S or where != self._told:
            self._beat_at, self._told = now, where
            self.beat()

    def beat(self, doing: Doing | None = None) -> None:
        """One heartbeat. While the server is away, or another trainer has the run, nothing is written."""
        session, progress = self._session, self._progress
        if session is None or not progress.epoch:
            return
        at = progress.delivered_at
        report = RankReport(
            self._rank.world_size,
            doing or ("trains" if progress.delivered > progress.version else "waits"),
            progress.delivered - 1 if progress.has_delivered else None,
            None if at is None else round(clock.now() - at, 1),
        )
        with suppress(*SERVER_ERRORS, EpochFencedError):  # the training loop meets the same and says so
            session.run.home.call("attend", [progress.fence, self._rank.number, REPORT.dump_json(report)])


def _beat(heartbeat: weakref.ref[Heartbeat], closed: threading.Event) -> None:
    while (alive := heartbeat()) is not None:
        alive.beat_if_due()
        del alive
        if closed.wait(LOOK_S):
            return
