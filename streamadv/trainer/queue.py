"""The trainer queue: what a training job iterates over, and what tells the pipeline what was trained.

It is a log read by rank, not a work queue: rank 0 names batches, every rank reads the same record and takes its
part of the same plan. The trainer's checkpoint decides what was trained: save `state_dict()` with the weights,
then `commit` it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from torch.utils.data import IterableDataset, get_worker_info

from .. import clock
from ..algorithms.chain import build_chain
from ..algorithms.chain.config import ChainConfig
from ..algorithms.device import Device, choose_device
from ..batch.hold import NotHeldError
from ..batch.progress import DURABILITY_WINDOW_S, Progress
from ..batch.record import BatchRecord, read_records
from ..batch.session import Session
from ..batch.settings import NamingSettings
from ..errors import (
    BatchLostError,
    NoBatchError,
    ServerUnreachableError,
    SettingError,
    UndecodableGroupError,
)
from ..run.manifest import RunSettings
from ..status.watchdog import Limits, Watchdog, why_no_batch
from ..store.connection import Connection
from ..store.retry import RETRYABLE, T, patiently
from .arguments import check_arguments, check_state
from .late_columns import LateColumn, check_late, pushed_columns
from .microbatch import Batch
from .patience import Patience
from .plan import Rank
from .reader import STAGE, BatchReader
from .report import RunFigures, named, observe, times
from .sessions import Sessions

#: Milliseconds of one wait for news at most.
BLOCK_MS: Final = 500


class TrainerQueue(IterableDataset[Batch]):
    """Iterate over it for batches: `for batch in queue: for micro_batch in batch: ...`.

    connection: URL of the server, or a `Connection`, which `close` then leaves open.
    run: name of the run; created if the server has none of that name.
    rank, world_size: of this process, 0 <= rank < world_size. Rank 0 leads: it names batches.
    batch_groups: groups of a batch.
    min_groups: name a batch as soon as so many groups are complete (default batch_groups).
    tokens_per_micro_batch: tokens of a micro-batch at most, prompts included; rows above it are not trained on. None
        makes one micro-batch of all that a rank has.
    max_staleness: producers are admitted so many versions ahead of the trainer; None does not pace them.
    drop_after: groups staler than so many versions are dropped instead of named (default 2 x max_staleness; None for
        both keeps them all).
    prefetch: batches that are named and computed before they are asked for.
    chain: preset name or configuration of the advantage chain.
    late: column -> supplier. The queue calls it with every micro-batch before it returns a batch; it returns one
        number per token, [N] of any real dtype, computed with the weights being trained.
    pushed: columns usually supplied late that producers push instead.
    commit: "each_batch" commits a batch when the next one is asked for; "manual" leaves it to `commit`.
    device: of the micro-batches: "cpu", "cuda", or "auto" for cuda if there is one.
    epoch: `queue.epoch` of rank 0, by which a rank above 0 may find its training job instead of by `job`.
    job: id of this start of the training job, the same on all its ranks and of no other start. Default: torchrun's or
        SLURM's id with the count of restarts, else one that the ranks find in torch.distributed's store.
    durability_window: seconds after which a server has its writes safe (with `appendfsync everysec` and failovers
        about 2). Until then `state_dict` keeps groups that were committed.
    keep_rolled_back: train on groups played with a version above a loaded checkpoint's instead of dropping them.
    min_kept_ratio: warn if filters keep a smaller share of groups.
    max_filtered_batches: raise StarvedError after so many batches' worth of groups were filtered, stale, rolled back
        or dead since the last batch; None never does.
    settings: of the run, see `RunSettings`.

    The constructor asks no server. Raises SettingError for an argument out of range. Every other call waits for a
    server that does not answer, and raises EpochFencedError when a newer trainer has taken over.
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
        check_arguments(
            rank,
            world_size,
            commit,
            durability_window,
            batch_groups=(batch_groups, 1),
            min_groups=(min_groups, 1),
            tokens_per_micro_batch=(tokens_per_micro_batch, 1),
            max_staleness=(max_staleness, 0),
            drop_after=(drop_after, 0),
            prefetch=(prefetch, 0),
            max_filtered_batches=(max_filtered_batches, 1),
        )
        late = dict(late or {})
        check_late(late)
        built = build_chain(chain)
        naming = NamingSettings(
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
        self._owns_connection = isinstance(connection, str)
        self._run_name = run
        self._rank = Rank(rank, world_size, choose_device(device))
        self._late = late
        self._commit_mode = commit
        self._limits = Limits(batch_groups, min_kept_ratio, max_filtered_batches, min_groups)
        self._stop = threading.Event()
        self._progress = Progress(durability_window)
        self._sessions = Sessions(
            self._connection, run, settings, naming, self._rank, job, epoch, self._progress
        )
        self._current: Batch | None = None  # delivered last
        # Of the session that `next_batch` saw last:
        self._reader: BatchReader | None = None
        self._watchdog: Watchdog | None = None  # rank 0's
        self._run_figures: RunFigures | None = None  # likewise
        self._delivered_at: float | None = None  # when a batch was delivered last

    # Iteration

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the run has ended, see `next_batch`. Raises SettingError in a DataLoader's worker."""
        if get_worker_info() is not None:
            raise SettingError(
                "num_workers of the DataLoader is above 0: use 0, the queue reads ahead itself"
            )
        while (batch := self.next_batch()) is not None:
            yield batch

    def next_batch(self, timeout: float | None = None, max_groups: int | None = None) -> Batch | None:
        """Return the next batch, or None when the run has ended. Marks the batch before as trained.

        timeout: seconds without a new group after which NoBatchError is raised; None waits for ever.
        max_groups: a batch that is named now gets no more groups than this (default batch_groups).

        Raises BatchLostError if the server lost a named batch, LateColumnError for a supplier that fails, and where
        waiting cannot end StarvedError, UncommittedBudgetError or BatchBudgetError. After an error the next call gives
        the same batch.
        """
        started = clock.now()
        patience = Patience(timeout, self._pause)
        while True:
            try:
                session = self._finish_current()
                reader = self._reader_of(session)
                ended = session.find(self._next) is None and session.has_ended(self._next)
                if session.name_ahead(ended, max_groups):
                    patience.progress()
                batch = self._collect(reader)
                if batch is not None:
                    self._current = batch
                    self._prepare_next(reader, max_groups)
                    self._report(batch, clock.now() - started)
                    return batch
                if ended and session.has_scanned_logs and session.find(self._next) is None:
                    session.publish_end(self._progress.ends + 1)
                    self._progress.end()
                    return None
                self._wait_for_news(reader, patience, max_groups)
            except NotHeldError as error:
                if patience.is_over:
                    raise NoBatchError(
                        f"no batch within {timeout:g} s (run {self._run_name}, rank {self._rank.number}): {error}"
                    ) from None
                patience.wait_for_hold(error)
            except RETRYABLE as error:
                patience.outage.pause_after(error)
            else:
                patience.held()

    @property
    def batches_waiting(self) -> int:
        """Batches that are named and not delivered: after a restart, those that are delivered again."""
        return self._patiently(
            lambda: sum(k >= self._next for k in read_records(self._sessions.current().run))
        )

    @property
    def epoch(self) -> int:
        """The fencing epoch of this job (no pass over the data): another rank may find the job by it."""
        return self._patiently(lambda: self._sessions.current().epoch)

    # What the training loop says

    def trained(self, batch: Batch) -> None:
        """Mark a batch as trained: the version moves to batch.version + 1, and producers are admitted further.

        `next_batch` does it for the batch before if the loop did not. Only rank 0's call counts. Raises SettingError
        for a batch that this queue has not delivered, or has committed.
        """
        self._patiently(lambda: self._trained(batch))

    def state_dict(self) -> dict[str, Any]:
        """Return what to save beside the weights, JSON-serialisable. Pass it to `commit` after saving.

        Save rank 0's. It has the ids of all groups in the weights that the server may still have, or get back after
        data loss: groups of batches that are not committed, or were committed within `durability_window`.
        """
        progress = self._progress
        if progress.began is None:
            self._patiently(self._sessions.current)
        state: dict[str, Any] = {
            "run": self._run_name,
            "epoch": progress.epoch,
            "version": progress.version,
            "groups": progress.groups,
            "kl": progress.kl or {},
        }
        return {**state, "running": progress.running} if progress.knows_running else state

    def commit(self, state: Mapping[str, Any]) -> None:
        """Say that the checkpoint holding `state` is saved: its batches count as trained and are deleted.

        Repeating it changes nothing. Only rank 0's call counts. Raises SettingError for a state of a later version.
        """
        self._patiently(lambda: self._commit(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: take over the run, repeat its commit, set the version back.

        Batches named after it are delivered again before new ones, in their order and with the same groups. Call it on
        every rank with the same state; `next_batch` of a rank above 0 waits for rank 0's call. Raises SettingError for
        the state of another run, or none.
        """
        check_state(state, self._run_name)
        self._progress.load(state)
        self._sessions.end()
        self._current = None
        self._stop_reading()
        if self._rank.number == 0:
            self._patiently(self._sessions.current)

    def close(self) -> None:
        """Disconnect. Batches that were delivered and not marked as trained are delivered again by the next queue."""
        self._stop.set()
        self._stop_reading()
        if self._owns_connection:
            self._connection.close()

    # The steps of next_batch

    @property
    def _next(self) -> int:
        """k of the batch to be delivered next."""
        return self._progress.delivered

    def _finish_current(self) -> Session:
        """Mark the batch before as trained, since the loop asks for another one, and commit it if that is the mode."""
        batch, sessions = self._current, self._sessions
        if batch is not None and batch.version >= self._progress.version:
            self._note_trained(sessions.current(), batch)
        session = sessions.checked()
        if batch is not None and batch.version in session.batches:
            if session.published_version <= batch.version:
                session.publish_version(session.batches[batch.version].record)
            if self._commit_mode == "each_batch":
                session.commit(session.version)
        self._current = None
        return session

    def _reader_of(self, session: Session) -> BatchReader:
        """The reader of this session: a new session reads the logs from their start."""
        if self._reader is None or self._reader.session is not session:
            self._stop_reading()
            if self._rank.number == 0:
                self._watchdog = Watchdog.begin(session.run, self._limits)
                self._run_figures = self._run_figures or RunFigures(session.run, self._watchdog.counters)
            self._reader = BatchReader(session, self._rank, self._late)
        return self._reader

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.stop()

    def _collect(self, reader: BatchReader) -> Batch | None:
        """The next batch without its unreadable groups; None if there is none yet.

        The one place that decides what a missing or unreadable group means. Raises BatchLostError.
        """
        while True:
            try:
                return reader.collect()
            except (BatchLostError, UndecodableGroupError) as error:
                # After data loss the next turn begins a session that repeats what is lost, see "Going back in time"
                # in docs/concepts/guarantees.md: nothing may be dead-lettered for it.
                if not reader.session.has_same_servers():
                    return None
                if isinstance(error, BatchLostError):
                    raise
                if not reader.exclude(error):
                    return None

    def _prepare_next(self, reader: BatchReader, max_groups: int | None) -> None:
        """Name the batch after the one in hand and read it ahead. The next call repeats what fails here."""
        with suppress(*RETRYABLE, NotHeldError):
            reader.session.name_ahead(False, max_groups)
            reader.read_ahead(reader.session.find(self._next))

    def _report(self, batch: Batch, wait_s: float) -> None:
        now = clock.now()
        figures = times(wait_s, None if self._delivered_at is None else now - self._delivered_at)
        self._delivered_at = now
        if self._watchdog is not None and self._run_figures is not None:
            self._watchdog.progress()
            figures |= self._run_figures.figures(self._watchdog.counters)
        batch.metrics.update(named(figures))
        if self._watchdog is not None:
            observe(batch, wait_s)

    def _wait_for_news(self, reader: BatchReader, patience: Patience, max_groups: int | None) -> None:
        """Wait for results or groups, for a part of the timeout at most.

        Raises NoBatchError when the timeout is over, and the watchdog's errors where waiting cannot end.
        """
        session, timeout = reader.session, patience.timeout
        patience.look(session)
        if patience.is_over:
            raise NoBatchError(
                f"no new group for {timeout:g} s (run {self._run_name}, batch {self._next}): "
                f"{why_no_batch(session.run, self._limits)}"
            )
        if self._watchdog is not None:
            self._watchdog.look()
        else:
            patience.wait_for_batch(session.waits_for(self._next))
        block_ms = BLOCK_MS if timeout is None else min(BLOCK_MS, round(timeout * 500) or 1)
        reader.wait(block_ms, max_groups, self._stop)

    # What the training loop says, once

    def _trained(self, batch: Batch) -> None:
        record = self._note_trained(self._sessions.current(), batch)
        self._writing_session().publish_version(record)

    def _note_trained(self, session: Session, batch: Batch) -> BatchRecord:
        """Note in the progress, before any server is asked, that the batch is in the weights."""
        named = session.batches.get(batch.version)
        if named is None or named.record.id != batch.id:
            raise SettingError(f"batch {batch.version} is not one this queue has delivered and not committed")
        session.note_trained(named.record, batch.kl)
        return named.record

    def _commit(self, state: Mapping[str, Any]) -> None:
        session = self._writing_session()
        if state["version"] > session.version:
            raise SettingError(
                f"state has version {state['version']}, this queue is at {session.version}: load it first"
            )
        session.commit(state["version"])

    def _writing_session(self) -> Session:
        """The session to write with. Only rank 0 writes, to the servers as they are now."""
        return self._sessions.checked() if self._rank.number == 0 else self._sessions.current()

    def _patiently(self, call: Callable[[], T]) -> T:
        """`call()`, repeated until the server answers and rank 0 has the run."""
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
