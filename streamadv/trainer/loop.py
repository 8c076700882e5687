"""One rank's loop: names what can be named, collects the next batch, waits for news, and says why there is none."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from redis.exceptions import ResponseError

from .. import clock, doors
from ..batch.leader import Leader
from ..batch.session import NotHeldError
from ..errors import NoBatchError, ServerUnreachableError, StarvedError
from ..messages import counted, log_fields
from ..status.causes import why_nothing_was_kept
from ..status.watchdog import Limits, Watchdog, why_no_batch
from ..store.reasons import Reason
from ..store.retry import RETRYABLE, Outage, T
from ..store.waiting import Blocked, Wait
from .collect import STAGE, Collector
from .late_columns import LateColumn
from .microbatch import Batch
from .report import NOT_IN_NAMES, RunFigures, batch_figures, observe
from .session import Sessions

logger = logging.getLogger(__name__)

#: Milliseconds of one wait for news at most.
BLOCK_MS: Final = 500
#: Milliseconds after a new group in which no other one wakes rank 0: waking costs more than reading a group.
REST_MS: Final = 20
#: The longest pause between two looks at whether rank 0 has taken the run, in seconds.
HOLD_CAP_S: Final = 0.5
#: Batches in a row without any advantage, after which that is told.
FLAT_BATCHES: Final = 5


class Loop:
    """The next batch of one rank, and every other call that waits for the server or for rank 0."""

    def __init__(self, sessions: Sessions, late: Mapping[str, LateColumn], limits: Limits) -> None:
        self.lock = doors.RLock()  # held for each step, not while this waits
        self._sessions = sessions
        self._progress = sessions.progress
        self._late = late
        self._limits = limits
        self._closed = doors.Event()
        self._delivered_at: float | None = None  # when a batch was delivered last
        self._flat = 0  # batches in a row in which every advantage is 0
        self._reported: Batch | None = None  # taken back from the training loop, with its figures
        # Of the session that was seen last:
        self._collector: Collector | None = None
        self._watchdog: Watchdog | None = None  # rank 0's
        self._run_figures: RunFigures | None = None  # likewise

    def next_batch(
        self, timeout: float | None, max_groups: int | None, take_back: list[Callable[[], None]]
    ) -> Batch | None:
        """As `TrainerQueue.next_batch`. take_back: gets what undoes the delivery, for a call that does not return."""
        started = clock.now()
        patience = _Patience(self._sessions, timeout, self.pause)
        while True:
            with patience.attempt():
                with self.lock:
                    batch, collector = self._advance(patience, max_groups)
                    if batch is not None and collector is not None:
                        if batch is not self._reported:
                            self._report(batch, collector.session.dropped.figures(), clock.now() - started)
                        return self._hand_out(batch, collector, max_groups, take_back)
                if collector is None:
                    return None
                self._wait_for_news(collector, patience, max_groups)

    def patiently(self, call: Callable[..., T], *arguments: Any) -> T:
        """The call, repeated until the server answers and rank 0 has the run."""
        patience = _Patience(self._sessions, None, self.pause)
        try:
            while True:
                with patience.attempt(), self.lock:
                    return call(*arguments)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    def pause(self, seconds: float) -> None:
        """Sleep. Raises when the queue is closed."""
        self._closed.wait(seconds)
        self.check_open()

    def check_open(self) -> None:
        """Raises when the queue is closed."""
        if self._closed.is_set():
            raise ServerUnreachableError(
                f"run {self._sessions.run_name}: this queue is closed, make another one"
            )

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._closed.set()
        self.stop_reading()

    def stop_reading(self) -> None:
        """Read nothing ahead."""
        if self._collector is not None:
            self._collector.stop()

    # One turn

    def _advance(self, patience: _Patience, max_groups: int | None) -> tuple[Batch | None, Collector | None]:
        """The next batch, if it is there, and the collector to wait with; no collector: the run has ended."""
        if self._progress.finished:
            self.stop_reading()
            return None, None
        session = self._sessions.finish_batch()
        leader = session if isinstance(session, Leader) else None
        if self._collector is None or self._collector.session is not session:
            self.stop_reading()
            if session.leads:
                self._watchdog = Watchdog(session.run, self._limits)
                self._run_figures = self._run_figures or RunFigures(session.run, self._watchdog.counters)
            # A new session reads the logs from their start.
            self._collector = Collector(session, self._sessions.rank, self._late)
        collector, k = self._collector, self._progress.delivered
        is_new = leader is not None and leader.name_ahead(False, max_groups)
        ended = session.find(k) is None and session.has_all(k)
        if (ended and leader is not None and leader.name_ahead(True, max_groups)) or is_new:
            patience.batch.progress()
        batch = collector.collect()
        is_last = ended and (leader is None or leader.has_scanned_logs) and session.find(k) is None
        # Asked once more: naming may have dropped groups of prompts, which are to be played again.
        if batch is None and is_last and session.has_ended(k):
            collector.read()  # results that came after their batch was committed go before the run ends
            begins = self._progress.version == 0 and not self._progress.has_delivered
            lost = why_nothing_was_kept(session.run) if begins else None
            if leader is not None:
                leader.publish_end(self._progress.ends + 1)
            self._progress.ends += 1
            if not self._progress.has_delivered:
                self._end_without_batch(lost, 0 if leader is None else leader.prompts.left)
            return None, None
        return batch, collector

    def _hand_out(
        self,
        batch: Batch,
        collector: Collector,
        max_groups: int | None,
        take_back: list[Callable[[], None]],
    ) -> Batch:
        """The training loop gets the batch that is ready."""
        before, ready = self._progress.delivered, collector.ready
        assert ready is not None

        def undo() -> None:
            with self.lock:
                self._sessions.in_hand, self._progress.delivered, collector.ready = None, before, ready
                self._reported = batch

        take_back.append(undo)
        self._reported = None
        record = ready[0]
        self._progress.deliver(record)
        collector.ready = None
        collector.session.dropped.sums.clear()
        collector.results.pop(record.id, None)
        collector.stop()
        # Name and read ahead what comes after the one in hand. The next call repeats what fails here.
        with suppress(*RETRYABLE, NotHeldError):
            if isinstance(collector.session, Leader):
                collector.session.name_ahead(False, max_groups)
            collector.read_ahead(collector.session.find(self._progress.delivered))
        self._sessions.in_hand = batch if self._sessions.marks_itself else None
        return batch

    def _end_without_batch(self, lost: str | None, prompts_left: int) -> None:
        """lost: what became of all that was pushed. Raises StarvedError if that is why the run was never trained."""
        version, run = self._progress.version, self._sessions.run_name
        if lost:
            raise StarvedError(f"run {run} has ended at version 0 and nothing was trained: {lost}")
        if self._sessions.rank.number == 0:
            remedy = "start producers, or give another run="
            if prompts_left:  # nobody loops over them, and none has come back
                remedy = f"{counted(prompts_left, 'prompt')} have not ended: start their producers, then the trainer"
            logger.warning(
                "run %s has ended at version %d before a batch came: its producers have finished and no group is left; "
                "%s",
                run,
                version,
                remedy,
                extra=log_fields("ended_without_batch", run=run, role=STAGE),
            )

    # What it reports

    def _report(self, batch: Batch, dropped: Mapping[str, float], wait_s: float) -> None:
        """Complete the metrics of a batch, and tell those of the process."""
        now, progress = clock.now(), self._progress
        step_s = None if self._delivered_at is None else now - self._delivered_at
        figures = {**batch_figures(batch, wait_s, step_s), **dropped, **batch.metrics}
        self._delivered_at = now
        if self._watchdog is not None and self._run_figures is not None:
            self._watchdog.progress()
            figures |= self._run_figures.figures(self._watchdog.counters)
            trained = progress.version - progress.committed
            self._watchdog.look_at_commits(len(progress.batches), trained, progress.committed)
        # Rewards near the limit of float64 overflow in a sum.
        finite = {NOT_IN_NAMES.sub("_", name): float(x) for name, x in figures.items() if math.isfinite(x)}
        batch.metrics.clear()
        batch.metrics.update(finite)
        if self._watchdog is None:
            return
        observe(batch)
        self._warn_if_flat(batch)

    def _warn_if_flat(self, batch: Batch) -> None:
        """Log that nothing is learned, once all advantages of FLAT_BATCHES batches in a row are 0."""
        ends = [batch.metrics.get(f"critic/advantages/{end}") for end in ("min", "max")]
        self._flat = self._flat + 1 if ends == [0.0, 0.0] else 0
        if self._flat == FLAT_BATCHES:
            run = self._sessions.run_name
            logger.warning(
                "run %s: all advantages of the last %d batches are 0, so nothing is learned from them "
                "(critic/score/zero_std_ratio %g: the share of groups whose rollouts all have the same reward): look "
                "at the rewards, or filter such groups by RunSettings(zero_variance_filter=True)",
                run,
                FLAT_BATCHES,
                batch.metrics.get("critic/score/zero_std_ratio", 0.0),
                extra=log_fields("zero_advantages", run=run, role=STAGE, batch=batch.version),
            )

    # How it waits

    def _wait_for_news(self, collector: Collector, patience: _Patience, max_groups: int | None) -> None:
        """Wait for results, groups or marks, for a part of the timeout at most.

        Raises NoBatchError when the timeout is over, and the watchdog's errors where waiting cannot end.
        """
        session, timeout, run = collector.session, patience.timeout, self._sessions.run_name
        # Groups that came since the last look are progress, also those that rank 0 has dropped already.
        if timeout:
            pipe: Any = session.run.connection.scripts.pipeline(transaction=False)
            for keys in session.run.keys.shards:
                pipe.xlen(keys.groups)
            counts = [*pipe.execute(), len(session.dropped)]
            if any(now > before for now, before in zip(counts, patience.counts, strict=False)):
                patience.batch.progress()
            patience.counts = counts
        self._sessions.news.clear()
        reason = session.waits_for(self._progress.delivered)
        unmarked = reason if session.leads else None
        if reason is not None:
            patience.batch.because(reason)
        elif timeout != 0 and self._watchdog is not None:
            self._watchdog.look()  # at least once in a call, however slow this machine is
        if patience.batch.expired:
            why = unmarked.line(run) if unmarked else why_no_batch(session.run, self._limits)
            raise NoBatchError(
                f"no new group for {timeout:g} s (run {run}, batch {self._progress.delivered}): {why}"
            )
        block_ms = BLOCK_MS if timeout is None else round(min(BLOCK_MS, timeout * 500)) or 1

        def could_name() -> bool:  # beside what another thread names
            with self.lock:
                return isinstance(session, Leader) and session.could_name(max_groups)

        if unmarked:
            self._sessions.news.wait(block_ms / 1000)
        elif wait_for_news(collector, block_ms, could_name, self._closed.wait):
            with self.lock:
                collector.read()


class _Patience:
    """The waits of one call: for a batch, for rank 0 to take the run, and for the server.

    The call gives up `timeout` seconds after the last progress: a new group, or a batch that was named.
    """

    def __init__(self, sessions: Sessions, timeout: float | None, pause: Callable[[float], object]) -> None:
        run, self.timeout = sessions.run_name, timeout
        self._who = f"run {run}, rank {sessions.rank.number}"
        self._outage = Outage(STAGE, run, sleep=pause)
        self.batch = Wait(Blocked(STAGE, "waiting for a batch", run), timeout=timeout)
        self._hold = Wait(Blocked(STAGE, "waiting for rank 0", run), cap=HOLD_CAP_S, sleep=pause)
        self.counts: list[int] = []  # of groups, as they were seen last

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """After a block that the server, or rank 0, keeps from its end: pause, and say after a while why. Repeat it."""
        try:
            with self._outage.attempt():
                yield
                self._hold.over()
        except NotHeldError as error:
            if self.batch.expired:
                raise NoBatchError(f"no batch within {self.timeout:g} s ({self._who}): {error}") from None
            self._hold.because(Reason("other_rank", str(error)))
            self._hold.pause()


def wait_for_news(
    collector: Collector, block_ms: int, could_name: Callable[[], bool], sleep: Callable[[float], object]
) -> bool:
    """Return when a result has come, or another batch can be named; at the latest after `block_ms`.

    Returns whether there are results to read. The shards get equal parts of the time, one after another; on rank 0 the
    wait is for their groups as well.
    """
    run, started = collector.session.run, clock.now()
    leader = collector.session if isinstance(collector.session, Leader) else None
    part_ms = max(1, block_ms // len(run.keys.shards))
    for shard in range(len(run.keys.shards)):
        keys, until, rests = run.keys.shards[shard], clock.now() + part_ms / 1000, False
        while (left_ms := round((until - clock.now()) * 1000)) > 0:
            streams: dict[Any, Any] = {keys.results: collector.cursors[shard]}
            if leader is not None and leader.waits_for_groups and not rests:
                streams[keys.groups] = leader.cursors[shard]
            wait_ms = min(left_ms, REST_MS) if rests else left_ms
            try:
                reply: Any = run.connection.blocking(part_ms).xread(streams, count=1, block=wait_ms)
            except ResponseError as error:
                if not str(error).startswith("UNBLOCKED"):  # a primary was demoted while this waited
                    raise
                reply = None
            come = dict(reply or {})
            if keys.results.encode() in come:
                return True
            if come and could_name():
                return False
            if not come and not rests:
                break
            rests = bool(come)
    if clock.now() - started < block_ms / 2000:
        sleep(part_ms / 1000)  # a server that does not block must not be asked in a loop
    return False
