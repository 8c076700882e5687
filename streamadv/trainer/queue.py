"""The trainer queue: what a training job iterates over, and what tells the pipeline what was trained.

It is a log read by rank, not a work queue: rank 0 names batches, every rank reads the same record and takes its
part of the same plan. The trainer's checkpoint decides what was trained: save `state_dict()` with the weights,
then `commit` it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from ..algorithms.chain import build_chain
from ..algorithms.chain.config import ChainConfig
from ..algorithms.device import Device, choose_device
from ..batch import record as batch_record
from ..batch.job import check_job, count_queue, find_job, random_job
from ..batch.lineage import Lineage
from ..batch.progress import DURABILITY_WINDOW_S, Progress
from ..batch.record import BatchRecord
from ..batch.selection import NamingSettings
from ..batch.session import Follower, NotHeldError, Session, Wanted
from ..errors import (
    BatchLostError,
    NoBatchError,
    ServerUnreachableError,
    SettingError,
    UndecodableGroupError,
)
from ..run import Run, open_run
from ..run.manifest import RunSettings
from ..status.watchdog import Limits, Watchdog
from ..store.connection import Connection
from ..store.retry import RETRYABLE, T, patiently
from .late_columns import LateColumn, check_late, pushed_columns
from .microbatch import Batch
from .patience import Patience
from .plan import Rank
from .reader import STAGE, BatchReader
from .report import observe

logger = logging.getLogger(__name__)

KEEP_UP_S = 1.0  # how often it looks whether the server has the manifest that this job knows
BLOCK_MS = 500


class TrainerQueue(IterableDataset[Batch]):
    """Iterate over it for batches: `for batch in queue: for mb in batch: ...`.

    rank, world_size: of this process; rank 0 leads. batch_groups: groups of a batch. prefetch: batches that are named
    and computed ahead. device: of the micro-batches. settings: of the run, see RunSettings.
    chain: preset name or configuration of the advantage chain. late: suppliers of columns made with the weights
    being trained, called on every micro-batch before the batch is yielded. pushed: late columns that producers
    push instead. min_groups: name a batch as soon as so many groups are there (default batch_groups).
    max_staleness: producers are admitted so far ahead, in batches (None = not paced). drop_after: groups staler
    than this are dropped when a batch is named (default 2 x max_staleness). tokens_per_micro_batch: None = each
    rank runs its part at once. commit: "each_batch" commits when the next batch is asked for; with "manual"
    nothing is committed but by `commit`. min_kept_ratio, max_filtered_batches: warn when filters keep fewer groups,
    raise StarvedError when so many batches' worth were filtered, stale, rolled back or dead since the last one (None =
    never). keep_rolled_back: train on groups played with versions above a loaded checkpoint's instead of dropping them.

    job: id of this start of the training job, the same on all its ranks and of no other start; by default that of
    torchrun or SLURM with the count of restarts, else one that the ranks find in torch.distributed's store. Rank 0
    writes it into the run, the others wait until the run carries it. epoch: `queue.epoch` of rank 0, by which other
    ranks may find their job instead. durability_window: seconds after which a server has its writes safe (Redis' AOF
    `everysec` and failovers: about 2); until then committed groups stay in `state_dict`.

    Raises SettingError for an argument out of range, LateColumnError and the errors of `next_batch` where it is used.
    """

    def __init__(
        self,
        connection: str | Connection,
        run: str = "default",
        *,
        rank: int = 0,
        world_size: int = 1,
        batch_groups: int = 64,
        min_groups: int | None = None,
        tokens_per_micro_batch: int | None = None,
        max_staleness: int | None = 4,
        drop_after: int | None = None,
        prefetch: int = 1,
        chain: str | ChainConfig | Mapping[str, Any] = "grpo",
        late: Mapping[str, LateColumn] | None = None,
        pushed: Sequence[str] = (),
        commit: Literal["each_batch", "manual"] = "each_batch",
        device: Device = "cpu",
        epoch: int | None = None,
        job: str | None = None,
        durability_window: float = DURABILITY_WINDOW_S,
        keep_rolled_back: bool = False,
        min_kept_ratio: float = 0.05,
        max_filtered_batches: int | None = 10,
        settings: RunSettings | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise SettingError(f"rank is {rank}, needs 0 <= rank < world_size ({world_size})")
        for name, value, least in (
            ("batch_groups", batch_groups, 1),
            ("min_groups", min_groups, 1),
            ("tokens_per_micro_batch", tokens_per_micro_batch, 1),
            ("max_staleness", max_staleness, 0),
            ("drop_after", drop_after, 0),
            ("prefetch", prefetch, 0),
            ("max_filtered_batches", max_filtered_batches, 1),
        ):
            if value is not None and value < least:
                raise SettingError(f"{name} is {value}, needs {least} or more")
        if commit not in ("each_batch", "manual"):
            raise SettingError(f"commit is {commit!r}, needs 'each_batch' or 'manual'")
        if not durability_window >= 0:
            raise SettingError(f"durability_window is {durability_window}, needs 0 or more seconds")
        late = dict(late or {})
        check_late(late)
        built = build_chain(chain)
        self._settings = NamingSettings(
            batch_groups=batch_groups,
            min_groups=min_groups or batch_groups,
            prefetch=prefetch,
            max_staleness=max_staleness,
            drop_after=2 * max_staleness if drop_after is None and max_staleness is not None else drop_after,
            keep_rolled_back=keep_rolled_back,
            needs=pushed_columns(built, late, pushed),
            chain=built.config.model_dump(mode="json"),
            late=tuple(sorted(late)),
            tokens_per_micro_batch=tokens_per_micro_batch,
        )
        self._connection = Connection(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        self._run_name, self._run_settings = run, settings
        self._rank, self._world_size = rank, world_size
        self._epoch = epoch
        self._job = None if job is None else check_job(job)
        self._number = count_queue(run, rank) if world_size > 1 else 0
        self._commit_mode = commit
        self._limits = Limits(batch_groups, min_kept_ratio, max_filtered_batches, min_groups)
        self._stop = threading.Event()
        self._watchdog: Watchdog | None = None
        self._run: Run | None = None
        self._session: Session | None = None
        self._is_stale = False  # the session: to be repeated on other servers
        self._greeted = False
        self._progress = Progress(durability_window)
        self._current: Batch | None = None
        self._reader = BatchReader(Rank(rank, world_size, choose_device(device)), late)

    # Iteration

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise SettingError(
                "num_workers of the DataLoader is above 0: use 0, the queue reads ahead itself"
            )
        while (batch := self.next_batch()) is not None:
            yield batch

    @property
    def epoch(self) -> int:
        """This job's epoch: another rank may find the job by it."""
        return self._patiently(lambda: self._start().epoch)

    @property
    def batches_waiting(self) -> int:
        """Batches that are named and not yet delivered: after a restart, those that come again."""
        return self._patiently(
            lambda: sum(k >= self._next for k in batch_record.read_records(self._start().run))
        )

    @property
    def _next(self) -> int:
        """k of the batch to be delivered next."""
        return self._progress.delivered

    def next_batch(self, timeout: float | None = None, max_groups: int | None = None) -> Batch | None:
        """The next batch, or None when the run has ended. Marks the one before as trained.

        max_groups: a batch that is named now gets no more groups than this (default batch_groups).
        Raises NoBatchError after `timeout` seconds without a new group, EpochFencedError when a newer trainer
        has taken over, BatchLostError when the server lost a named batch, and where waiting cannot end
        StarvedError, UncommittedBudgetError and BatchBudgetError.
        """
        started = time.monotonic()
        patience = Patience(timeout, self._pause)
        while True:
            try:
                session = self._finish_current()
                ended = session.find(self._next) is None and session.has_ended(self._next)
                if session.look_ahead(ended, max_groups):
                    patience.progress()
                batch = self._collect(session)
                if batch is not None:
                    self._current = batch
                    self._prepare_next(session, max_groups)
                    self._report(batch, time.monotonic() - started)
                    return batch
                if ended and session.scanned and session.find(self._next) is None:
                    session.tell_end(self._progress.ends + 1)
                    self._progress.end()
                    return None
                self._wait_for_news(session, patience, max_groups)
            except NotHeldError as error:
                if patience.is_over:
                    raise NoBatchError(
                        f"no batch within {timeout:g} s (run {self._run_name}, rank {self._rank}): {error}"
                    ) from None
                patience.wait_for_hold(error)
            except RETRYABLE as error:
                patience.outage.pause_after(error)
            else:
                patience.held()

    def _collect(self, session: Session) -> Batch | None:
        """The next batch, without what cannot be read of it; None if there is none yet.

        The one place that decides what a missing or unreadable group means. Raises BatchLostError.
        """
        while True:
            try:
                return self._reader.collect(session)
            except (BatchLostError, UndecodableGroupError) as error:
                if not session.has_same_servers():
                    return None  # recent writes are lost: the next turn takes the run again and repeats them
                if isinstance(error, BatchLostError):
                    raise
                if not self._reader.exclude(session, error):
                    return None

    def _prepare_next(self, session: Session, max_groups: int | None) -> None:
        """Name the batch after the one in hand and read it ahead. The next call repeats what fails here."""
        with suppress(*RETRYABLE, NotHeldError):
            session.look_ahead(False, max_groups)
            self._reader.read_ahead(session, session.find(self._next))

    def _report(self, batch: Batch, wait_s: float) -> None:
        if self._watchdog is not None:
            self._watchdog.progress()
        if self._rank == 0:
            observe(batch, wait_s)

    def _wait_for_news(self, session: Session, patience: Patience, max_groups: int | None) -> None:
        """Wait for results or groups, for a part of the timeout at most.

        Raises NoBatchError when the timeout is over, and the watchdog's errors where waiting cannot end.
        """
        timeout = patience.timeout
        patience.look(session)
        if patience.is_over:
            raise NoBatchError(
                f"no new group for {timeout:g} s (run {self._run_name}, batch {self._next}): "
                f"{Watchdog(session.run, self._limits).reasons()}"
            )
        if self._watchdog is not None:
            self._watchdog.look()
        else:
            patience.wait_for_batch(session.waits_for(self._next))
        block_ms = BLOCK_MS if timeout is None else min(BLOCK_MS, round(timeout * 500) or 1)
        self._reader.wait(session, block_ms, max_groups, self._stop)

    # What the training loop says

    def trained(self, batch: Batch) -> None:
        """The batch has been trained on: the version moves to batch.version + 1, admission is freed.

        Called for the batch before by `next_batch` if the loop did not. Only rank 0's call counts. Waits for a
        server that does not answer, as all calls of this queue do.
        """
        self._patiently(lambda: self._trained(batch))

    def state_dict(self) -> dict[str, Any]:
        """What to save beside the weights: JSON-serialisable; pass it to `commit` after saving.

        Rank 0's is the one to save. It has the ids of all groups in the weights that the server may still have, or
        have again: of batches that are not committed, or so lately that the server may lose it.
        """
        progress = self._progress
        if progress.began is None:
            self._patiently(self._start)
        state: dict[str, Any] = {
            "run": self._run_name,
            "epoch": progress.epoch,
            "version": progress.version,
            "groups": progress.groups,
            "kl": progress.kl or {},
        }
        return {**state, "running": progress.running} if progress.knows_running else state

    def commit(self, state: Mapping[str, Any]) -> None:
        """The checkpoint holding `state` is saved: its batches are trained for good and deleted here.

        Repeating it changes nothing. Only rank 0's call counts.
        """
        self._patiently(lambda: self._commit(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: take over the run, repeat its commit, set the version back.

        Batches recorded after it come again, in their order and composition, before new ones. Call it on every rank,
        with the same state; `next_batch` of a rank above 0 waits for rank 0's call.
        """
        missing = {"run", "version", "groups"} - state.keys()
        if missing:
            raise SettingError(f"state has no {sorted(missing)[0]!r}: give what state_dict() returned")
        if state["run"] != self._run_name:
            raise SettingError(f"state is of run {state['run']!r}, this queue reads {self._run_name!r}")
        self._progress.load(state)
        self._session = self._current = None
        self._reader.stop()
        if self._rank == 0:
            self._patiently(self._start)

    def close(self) -> None:
        """Disconnect. What was delivered and not marked as trained comes again."""
        self._stop.set()
        self._reader.stop()
        if self._owned:
            self._connection.close()

    # Inside

    def _patiently(self, call: Callable[[], T]) -> T:
        """`call()`, again until the server answers and rank 0 has the run."""
        patience = Patience(None, self._pause)

        def called() -> T:
            while True:
                try:
                    return call()
                except NotHeldError as error:
                    patience.wait_for_hold(error)

        return patiently(called, STAGE, sleep=self._pause)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise ServerUnreachableError(f"run {self._run_name}: the queue was closed while it waited")

    def _trained(self, batch: Batch) -> None:
        record = self._note_trained(self._start(), batch)
        (self._now() if self._rank == 0 else self._start()).tell_trained(record)

    def _note_trained(self, session: Session, batch: Batch) -> BatchRecord:
        record = session.records.get(batch.version)
        if record is None or record.id != batch.id:
            raise SettingError(f"batch {batch.version} is not one this queue has delivered and not committed")
        session.note_trained(record, batch.metrics.get("critic/kl"))
        return record

    def _commit(self, state: Mapping[str, Any]) -> None:
        session = self._now() if self._rank == 0 else self._start()
        if state["version"] > session.version:
            raise SettingError(
                f"state has version {state['version']}, this queue is at {session.version}: load it first"
            )
        session.commit(state["version"])

    def _start(self) -> Session:
        """The hold on the run, of whatever server; taken or joined at the first call."""
        return self._session or self._join()

    def _now(self) -> Session:
        """The hold on the run on the servers as they are: after a restart or failover it is repeated there."""
        if self._run is not None:
            self._run.keep_up(KEEP_UP_S)
        if self._session is not None and not self._is_stale and not self._session.has_same_servers():
            if self._rank == 0:
                logger.warning("%s: the server is not the one it was: repeating what it may have lost", STAGE)
            self._progress.lost()
            self._is_stale = True
            self._reader.stop()
        return self._join() if self._is_stale else self._start()

    def _join(self) -> Session:
        """Rank 0 takes the run; another rank raises NotHeldError until it has."""
        if not self._greeted:  # later on a refusal may pass as well: a server that restarts without its users
            self._connection.check()
            self._greeted = True
        if self._run is None:
            self._run = open_run(self._connection, self._run_name, self._run_settings)
        else:
            self._run.refresh()  # a server that lost the manifest gets back what is known of it
        run = self._run
        session: Session
        if self._rank == 0:
            self._progress.job = self._progress.job or self._find_job() or random_job()
            session = Lineage(run, self._settings, self._progress)
            self._watchdog = Watchdog(run, self._limits)
        else:
            session = Follower(run, self._settings, self._progress, self._wanted())
        self._session, self._is_stale = session, False
        self._reader.restart()
        return session

    def _find_job(self) -> str | None:
        if self._job is not None or self._world_size == 1:
            return self._job
        return find_job(self._number)

    def _wanted(self) -> Wanted:
        """How a rank above 0 finds its job. Raises SettingError where it cannot."""
        job = self._job if self._epoch is not None else self._find_job()
        if job is None and self._epoch is None:
            raise SettingError(
                f"job is not given on rank {self._rank} of {self._world_size}: pass the same job= on every rank, "
                "another one at each start, or use torchrun, SLURM or torch.distributed"
            )
        return Wanted(job, self._epoch)

    def _finish_current(self) -> Session:
        """The batch before is trained, as the loop asks for another one."""
        batch = self._current
        if batch is not None and batch.version >= self._progress.version:
            self._note_trained(self._start(), batch)
        session = self._now()
        if batch is not None and batch.version in session.records:
            if session.told <= batch.version:
                session.tell_trained(session.records[batch.version])
            if self._commit_mode == "each_batch":
                session.commit(session.version)
        self._current = None
        return session
