"""Supplies the next batch to one rank: waits for it, delivers it, and says why there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from .. import clock
from ..batch.hold import NotHeldError
from ..batch.progress import Progress
from ..batch.session import Session
from ..errors import BatchLostError, NoBatchError, StarvedError, UndecodableGroupError
from ..messages import log_fields
from ..status.causes import why_nothing_was_kept
from ..status.watchdog import Limits, Watchdog, why_no_batch
from ..store.retry import RETRYABLE
from .late_columns import LateColumn
from .marks import Marks
from .microbatch import Batch
from .patience import Patience
from .plan import Rank
from .reader import STAGE, BatchReader
from .report import RunFigures, named, observe, times
from .wait import wait_for_news

logger = logging.getLogger(__name__)

#: Milliseconds of one wait for news at most.
BLOCK_MS: Final = 500
#: Batches in a row without any advantage, after which that is told.
FLAT_BATCHES: Final = 5


class Supply:
    """The next batch of one rank.

    lock: held for each step, not while this waits. stop: set when the queue is closed. pause: sleeps until then.
    """

    def __init__(
        self,
        run: str,
        rank: Rank,
        marks: Marks,
        progress: Progress,
        late: Mapping[str, LateColumn],
        limits: Limits,
        lock: threading.RLock,
        stop: threading.Event,
        pause: Callable[[float], None],
    ) -> None:
        self._run_name = run
        self._rank = rank
        self._marks = marks
        self._progress = progress
        self._late = late
        self._limits = limits
        self._lock = lock
        self._stop = stop
        self._pause = pause
        self._delivered_at: float | None = None  # when a batch was delivered last
        self._flat = 0  # batches in a row in which every advantage is 0
        self._reported: Batch | None = None  # taken back from the training loop, with its figures
        # Of the session that was seen last:
        self._reader: BatchReader | None = None
        self._watchdog: Watchdog | None = None  # rank 0's
        self._run_figures: RunFigures | None = None  # likewise

    @property
    def _next(self) -> int:
        """k of the batch to be delivered next."""
        return self._progress.delivered

    def next_batch(
        self, timeout: float | None, max_groups: int | None, take_back: list[Callable[[], None]]
    ) -> Batch | None:
        """As `TrainerQueue.next_batch`. take_back: gets what undoes the delivery, for a call that does not return."""
        started = clock.now()
        patience = Patience(self._run_name, timeout, self._pause)
        if self._reader is not None:
            self._reader.session.look_again()  # waiting does it after that
        while True:
            try:
                with self._lock:
                    batch, reader = self._advance(patience, max_groups)
                    if batch is not None and reader is not None:
                        if batch is not self._reported:
                            self._report(batch, clock.now() - started)
                        return self._hand_out(batch, reader, max_groups, take_back)
                if reader is None:
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

    def _advance(self, patience: Patience, max_groups: int | None) -> tuple[Batch | None, BatchReader | None]:
        """The next batch, if it is there, and the reader to wait with; no reader: the run has ended."""
        if self._progress.finished:
            self.stop_reading()
            return None, None
        session = self._marks.finish_current()
        reader = self._reader_of(session)
        is_new = session.name_ahead(False, max_groups)
        ended = session.find(self._next) is None and session.has_ended(self._next)
        if (ended and session.name_ahead(True, max_groups)) or is_new:
            patience.progress()
        batch = self._collect(reader)
        has_all = session.has_scanned_logs and session.find(self._next) is None
        if batch is None and ended and has_all and session.has_ended(self._next):
            lost = None if self._progress.has_delivered else why_nothing_was_kept(session.run)
            session.publish_end(self._progress.ends + 1)
            self._progress.end()
            if not self._progress.has_delivered:
                self._end_without_batch(lost)
            return None, None
        return batch, reader

    def _hand_out(
        self,
        batch: Batch,
        reader: BatchReader,
        max_groups: int | None,
        take_back: list[Callable[[], None]],
    ) -> Batch:
        """Note that the training loop has the batch."""
        before, ready = self._next, reader.ready

        def undo() -> None:
            with self._lock:
                self._marks.current, self._progress.delivered, reader.ready = None, before, ready
                self._reported = batch

        take_back.append(undo)
        self._reported = None
        reader.hand_out()
        self._prepare_next(reader, max_groups)
        self._marks.delivered(batch)
        return batch

    def _reader_of(self, session: Session) -> BatchReader:
        """The reader of this session: a new session reads the logs from their start."""
        if self._reader is None or self._reader.session is not session:
            self.stop_reading()
            if self._rank.number == 0:
                self._watchdog = Watchdog(session.run, self._limits)
                self._run_figures = self._run_figures or RunFigures(session.run, self._watchdog.counters)
            self._reader = BatchReader(session, self._rank, self._late)
        return self._reader

    def stop_reading(self) -> None:
        """Read nothing ahead."""
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
        figures = times(batch, wait_s, None if self._delivered_at is None else now - self._delivered_at)
        self._delivered_at = now
        if self._watchdog is not None and self._run_figures is not None:
            self._watchdog.progress()
            figures |= self._run_figures.figures(self._watchdog.counters)
            progress = self._progress
            self._watchdog.look_at_commits(
                len(progress.batches),
                progress.version - progress.committed,
                progress.committed,
            )
        batch.metrics.update(named(figures))
        if self._watchdog is not None:
            observe(batch)
            self._look_at_advantages(batch)

    def _look_at_advantages(self, batch: Batch) -> None:
        ends = [batch.metrics.get(f"critic/advantages/{end}") for end in ("min", "max")]
        self._flat = self._flat + 1 if ends == [0.0, 0.0] else 0
        if self._flat == FLAT_BATCHES:
            logger.warning(
                "run %s: all advantages of the last %d batches are 0, so nothing is learned from them "
                "(critic/score/zero_std_ratio %g: the share of groups whose rollouts all have the same reward): look "
                "at the rewards, or filter such groups by RunSettings(zero_variance_filter=True)",
                self._run_name,
                FLAT_BATCHES,
                batch.metrics.get("critic/score/zero_std_ratio", 0.0),
                extra=log_fields("zero_advantages", run=self._run_name, role=STAGE, batch=batch.version),
            )

    def _end_without_batch(self, lost: str | None) -> None:
        """lost: what became of all that was pushed. Raises StarvedError if that is why the run was never trained."""
        version = self._progress.version
        if lost and not version:
            raise StarvedError(f"run {self._run_name} has ended at version 0 and nothing was trained: {lost}")
        if self._rank.number == 0:
            logger.warning(
                "run %s has ended at version %d before a batch came: its producers have finished and no group is left; "
                "%sstart producers, or give another run=",
                self._run_name,
                version,
                f"in all {lost}; " if lost else "",
                extra=log_fields("ended_without_batch", run=self._run_name, role=STAGE),
            )

    def _wait_for_news(self, reader: BatchReader, patience: Patience, max_groups: int | None) -> None:
        """Wait for results, groups or marks, for a part of the timeout at most.

        Raises NoBatchError when the timeout is over, and the watchdog's errors where waiting cannot end.
        """
        session, timeout = reader.session, patience.timeout
        patience.look(session)
        self._marks.news.clear()
        unmarked = session.waits_for_marks(self._next)
        if unmarked:
            patience.wait_for_batch(unmarked)
        elif self._watchdog is None:
            patience.wait_for_batch(session.waits_for(self._next))
        elif timeout != 0:  # at least once in a call, however slow this machine is
            self._watchdog.look()
        if patience.is_over:
            why = unmarked.line(self._run_name) if unmarked else why_no_batch(session.run, self._limits)
            raise NoBatchError(
                f"no new group for {timeout:g} s (run {self._run_name}, batch {self._next}): {why}"
            )
        block_ms = BLOCK_MS if timeout is None else min(BLOCK_MS, round(timeout * 500) or 1)
        if unmarked:
            self._marks.news.wait(block_ms / 1000)
            return
        wait_for_news(session, reader.log, block_ms, max_groups, self._stop)
