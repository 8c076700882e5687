"""One rank's trainer session: begun when it is first needed, and again when a server was replaced."""

from __future__ import annotations

import logging
from typing import Final

from ..batch.follower import JobKey, join
from ..batch.job import check_job, count_queue, find_job, random_job
from ..batch.progress import Progress
from ..batch.recovery import take_over, undo_other_chains
from ..batch.session import Session
from ..batch.settings import NamingSettings
from ..errors import SettingError
from ..messages import log_fields
from ..run import Run, open_run
from ..run.manifest import RunSettings
from ..store.connection import Connection
from ..store.replies import as_count
from .heartbeat import Heartbeat
from .plan import Rank

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether the server has the manifest that this job knows.
REFRESH_S: Final = 1.0


class Sessions:
    """The trainer sessions of one rank, one after another; all go on from the same `progress`.

    Rank 0 takes the run; a rank above 0 joins, and its calls raise NotHeldError until rank 0 has taken it. All calls
    raise EpochFencedError when a newer trainer has taken over. No call is made to a server before the first session.
    """

    def __init__(
        self,
        connection: Connection,
        run: str,
        settings: RunSettings | None,
        naming: NamingSettings,
        rank: Rank,
        job: str | None,
        epoch: int | None,
        progress: Progress,
    ) -> None:
        self.naming = naming
        self.progress = progress
        self._connection = connection
        self._run_name, self._run_settings = run, settings
        self._rank = rank
        self._job = None if job is None else check_job(job)
        self._epoch = epoch
        #: Of this queue among those of its run, rank and process.
        self.number = count_queue(run, rank.number) if rank.world_size > 1 else 0
        self._run: Run | None = None
        self._session: Session | None = None
        self._is_stale = False  # its servers were replaced
        self._heartbeat = Heartbeat(rank, progress)
        self._is_checked = False  # the server has accepted this process once
        self._warns_of_history = False  # at the first batch, unless a checkpoint is loaded before

    def current(self) -> Session:
        """The session, whatever servers it began on."""
        return self._session or self._begin()

    def checked(self) -> Session:
        """The session on the servers as they are now.

        After a restart or failover that is a new one, which repeats what the servers may have lost: see "Going back in
        time" in docs/concepts/guarantees.md.
        """
        if self._run is not None:
            self._run.refresh_if_changed(REFRESH_S)
        if self._session is not None and not self._is_stale and not self._session.has_same_servers():
            self.progress.servers_replaced()
            self._is_stale = True
        was_stale = self._is_stale
        session = self._begin() if was_stale else self.current()
        if was_stale and self._rank.number == 0:  # a newer trainer has not taken over: that has raised
            logger.warning(
                "trainer: the server is not the one it was: what it may have lost was repeated",
                extra=log_fields("session_stale", run=self._run_name, role="trainer"),
            )
        if self._rank.number == 0 and undo_other_chains(session.run, self.naming, self.progress):
            self._session = None
            session = self._begin()
        if self._warns_of_history:
            self._warns_of_history = False
            self._warn_of_history()
        return session

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
        self._log_drops()
        self._heartbeat.close()

    def _log_drops(self) -> None:
        if self._session is not None:
            self._session.dropped.log(now=True)

    def _begin(self) -> Session:
        run = self.opened_run()
        session: Session
        if self._rank.number == 0:
            self.progress.job = self.progress.job or self._find_job() or random_job()
            begins = self.progress.began is None
            session = take_over(run, self.naming, self.progress)
            self._warns_of_history = self._warns_of_history or begins
        else:
            session = join(run, self.naming, self.progress, self._job_key())
        self._session, self._is_stale = session, False
        self._heartbeat.start(session)
        return session

    def _warn_of_history(self) -> None:
        """A run with history and no checkpoint loaded: the weights may not be those that the run has trained."""
        version = self.progress.version
        if not version:
            return
        logger.log(
            logging.INFO if self.naming.max_staleness is None else logging.WARNING,
            "run %s was trained to version %d before, and no checkpoint is loaded: these weights count as version %d, "
            "and are trained on what the policy before has played. If they are not that policy's, call queue.resume("
            "the folder of its checkpoints), give another run=, or `streamadv runs delete --run %s`",
            self._run_name,
            version,
            version,
            self._run_name,
            extra=log_fields("run_with_history", run=self._run_name, role="trainer"),
        )

    def opened_run(self) -> Run:
        """The run, whoever has it."""
        # Credentials are checked once: later a refusal can be transient, as a restarting server loads its users late.
        if not self._is_checked:
            self._connection.check()
            self._is_checked = True
        if self._run is None:
            self._run = open_run(self._connection, self._run_name, self._run_settings)
        else:
            self._run.refresh()  # writes the manifest again if the server has lost it
        return self._run

    def _find_job(self) -> str | None:
        if self._job is not None or self._rank.world_size == 1:
            return self._job
        return find_job(self.number)

    def _job_key(self) -> JobKey:
        """By what this rank above 0 finds its job. Raises SettingError when it has neither an id nor an epoch."""
        job = self._job if self._epoch is not None else self._find_job()
        if job is None and self._epoch is None:
            raise SettingError(
                f"job is not given on rank {self._rank.number} of {self._rank.world_size}: pass the same job= on "
                "every rank, another one at each start, or use torchrun, SLURM or torch.distributed"
            )
        return JobKey(job, self._epoch)
