"""The trainer's watchdog: while rank 0 waits, it says why no batch comes, and raises if waiting cannot end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from .. import clock
from ..errors import BatchBudgetError, StarvedError, UncommittedBudgetError
from ..messages import log_fields
from ..run import Run
from ..run.run import by_reason
from ..store.reasons import REASONS, Reason, listed, pasteable
from ..store.retry import RETRYABLE
from ..store.waiting import Blocked
from .causes import (
    BRAKES,
    LOST,
    Losses,
    budget_reason,
    counts_as_text,
    ordinary_wait,
    reasons_of,
    uncommitted_reason,
)
from .model import Ledger, Status
from .read import read_status

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
#: Batch-equivalents of groups after which the share of kept groups is judged.
KEPT_WINDOW: Final = 4
#: Losses at which a trainer gives up after `max_filtered_batches`, and what the error says of the groups.
GIVES_UP_ON: Final = {
    "filtered": "were filtered away",
    "stale": "were too old for their batch",
    "rolled_back": "were of versions behind the checkpoint that was loaded",
    "dead": "became dead letters",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """When waiting is no longer normal."""

    batch_groups: int
    min_kept_ratio: float  # warn below
    max_filtered_batches: int | None  # raise after so many batches' worth of lost groups without a batch
    min_groups: int  # enough to name a batch


class Watchdog:
    """Looks at the run while rank 0 waits. Groups that ended before the trainer took the run do not count as lost."""

    #: Of the ledger, as the last batch came, or when the trainer took the run; None = the server was away.
    counters: Counter[str] | None
    #: How groups had ended by then, or when a named batch was last seen to be computed; None = the next look tells.
    _ended_before: Counter[str] | None

    def __init__(self, run: Run, limits: Limits) -> None:
        self._run = run
        self._limits = limits
        self._look_due = clock.now()
        self._blocked = Blocked("trainer", "no batch", run.name)
        self._has_delivered = False
        self._warned = self._warned_of_commits = False
        self._read_counters()

    def progress(self) -> None:
        """A batch was delivered: the wait for the next one begins."""
        self._look_due = clock.now() + LOOK_S
        self._has_delivered = True
        self._read_counters()
        self._blocked.over()

    def look_at_commits(self, named: int, trained: int, committed: int) -> None:
        """Say once that the training loop does not commit, see `uncommitted_reason`."""
        if self.counters is None or self._warned_of_commits:
            return
        ledger, live = Ledger.of(self.counters), self.counters["live_bytes"]
        budget = self._run.manifest.max_bytes
        reason = uncommitted_reason(ledger, live, budget, named, trained, committed)
        if reason is not None:
            self._warned_of_commits = True
            fields = log_fields("uncommitted", run=self._run.name, role="trainer", count=trained)
            logger.warning("run %s: %s", self._run.name, reason.line(self._run.name), extra=fields)

    def look(self) -> None:
        """Look again if it is due. Raises StarvedError, UncommittedBudgetError, BatchBudgetError."""
        now = clock.now()
        if now < self._look_due:
            return
        self._look_due = now + LOOK_S
        status = read_for_trainer(self._run, self._limits)
        # A batch that is named waits for a worker, not for groups.
        if self._ended_before is None or status.trainer.untrained > 0:
            self._ended_before = Counter(status.groups.outcomes)
        ended = Counter(status.groups.outcomes) - self._ended_before
        if self._has_delivered:
            status = replace(status, groups=replace(status.groups, since_batch=dict(ended)))
        self._blocked.because(*_reasons(status))
        self._check_losses(status, ended)
        # Producers may wait for bytes that only a commit frees, or nothing, while the trainer waits for producers.
        if (reason := budget_reason(status)) is None:
            return
        if reason.name == "uncommitted":
            raise UncommittedBudgetError(reason.line(status.run))
        if status.quiet_s is not None and status.is_quiet:  # groups of another size might still find room
            raise BatchBudgetError(reason.line(status.run))

    def _read_counters(self) -> None:
        self.counters = self._ended_before = None
        with suppress(*RETRYABLE):
            self.counters = self._run.counters()
            self._ended_before = Counter(by_reason(self.counters, "outcome"))

    def _check_losses(self, status: Status, ended: Mapping[str, int]) -> None:
        losses = Losses.of(ended)
        lost = {reason: count for reason, count in losses.by_reason.items() if reason in GIVES_UP_ON}
        limit, batch = self._limits.max_filtered_batches, self._limits.batch_groups
        if limit is not None and sum(lost.values()) >= limit * batch:
            what = []
            for reason, count in lost.items():
                outcomes = {name: status.groups.outcomes.get(name, 0) for name in LOST[reason]}
                what.append(
                    f"{count} groups {GIVES_UP_ON[reason]} since the last batch ({counts_as_text(outcomes)} in all): "
                    f"{pasteable(REASONS[reason].remedy, status.run)}"
                )
            raise StarvedError(f"run {status.run}: {'; '.join(what)}; max_filtered_batches is {limit}")
        kept = losses.produced - losses.total
        is_judged = losses.produced >= KEPT_WINDOW * batch and not self._warned
        if is_judged and kept < self._limits.min_kept_ratio * losses.produced:
            self._warned = True
            logger.warning(
                "only %d of the last %d groups were kept: %s",
                kept,
                losses.produced,
                counts_as_text(ended),
                extra=log_fields("few_groups_kept", run=status.run, role="trainer"),
            )


def read_for_trainer(run: Run, limits: Limits) -> Status:
    """The status, as seen by a trainer of these limits."""
    status = read_status(run)
    admission = replace(status.admission, batch_groups=limits.min_groups)
    return replace(status, admission=admission, trainer=replace(status.trainer, state="waits"))  # it asks


def why_no_batch(run: Run, limits: Limits) -> str:
    """Why there is no batch: for an error of a trainer that gives up."""
    return listed(_reasons(read_for_trainer(run, limits)), run.name)


def _reasons(status: Status) -> list[Reason]:
    """Why the trainer waits. What keeps producers back is no reason while it needs no more groups."""
    reasons = [reason for reason in reasons_of(status) if status.starves or reason.name not in BRAKES]
    return reasons or [ordinary_wait(status)]
