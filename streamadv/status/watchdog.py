"""Looks at a run while its trainer waits: says why nothing comes, and raises where waiting cannot end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from .. import clock, metrics
from ..errors import BatchBudgetError, StarvedError, UncommittedBudgetError
from ..run import Run
from ..store.reasons import REASONS, Reason, listed
from ..store.replies import as_count
from ..store.retry import RETRYABLE
from ..store.waiting import Blocked
from .causes import LOST, QUIET_S, budget_reason, lost_since, ordinary, reasons_of, told, untrained
from .ledger import read_status

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
#: Batch-equivalents of groups after which the share of kept ones is judged.
KEPT_WINDOW: Final = 4
#: Losses at which a trainer gives up, after `max_filtered_batches`, and what is said of the groups.
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
    min_groups: int | None = None  # enough to name a batch, if fewer than batch_groups


class Watchdog:
    """Looks at the run while rank 0 waits."""

    def __init__(self, run: Run, limits: Limits) -> None:
        self._run = run
        self._limits = limits
        self._look_due = clock.now()
        self._blocked = Blocked("trainer", "no batch")
        self._has_delivered = False
        self._ended = self._read_ended()  # how groups had ended when the last batch came, or this began
        self._warned = False

    def progress(self) -> None:
        """A batch was delivered."""
        self._look_due = clock.now() + LOOK_S  # while batches come there is nothing to look for
        self._has_delivered = True
        self._ended = self._read_ended()
        self._blocked.over()
        metrics.no_progress(0.0)

    def look(self) -> None:
        """Called while waiting. Raises StarvedError, UncommittedBudgetError, BatchBudgetError."""
        now = clock.now()
        if now < self._look_due:
            return
        self._look_due = now + LOOK_S
        status = self._read()
        self._blocked.because(*_reasons(status))
        metrics.no_progress(self._blocked.seconds)
        self._check_losses(status)
        self._check_budget(status)

    def reasons(self) -> str:
        """What to add to an error: why there is no batch."""
        return listed(_reasons(self._read()))

    def _read(self) -> dict[str, Any]:
        """The status, as seen by a trainer of these limits."""
        status = read_status(self._run)
        status["admission"]["batch_groups"] = self._needed
        if self._has_delivered and self._ended is not None:
            status["groups"]["since_batch"] = dict(Counter(status["groups"]["outcomes"]) - self._ended)
        return status

    @property
    def _needed(self) -> int:
        return self._limits.min_groups or self._limits.batch_groups

    def _read_ended(self) -> Counter[str] | None:
        """How many groups have ended in which way; None while the server is away."""
        pipe = self._run.connection.scripts.pipeline(transaction=False)
        for keys in self._run.keys.shards:
            pipe.hgetall(keys.ledger)
        ended = Counter[str]()
        with suppress(*RETRYABLE):
            for ledger in pipe.execute():
                for name, count in ledger.items():
                    kind, _, outcome = name.decode(errors="replace").partition(":")
                    if kind == "outcome":
                        ended[outcome] += as_count(count)
            return ended
        return None

    def _check_losses(self, status: Mapping[str, Any]) -> None:
        outcomes = Counter[str](status["groups"]["outcomes"])
        # A named batch waits for a worker, not for groups.
        if self._ended is None or untrained(status) > 0:
            self._ended = outcomes
        ended = outcomes - self._ended
        lost, produced = lost_since(ended)
        lost = {reason: count for reason, count in lost.items() if reason in GIVES_UP_ON}
        limit, size = self._limits.max_filtered_batches, self._limits.batch_groups
        total = sum(lost.values())
        if limit is not None and total >= limit * size:
            what = "; ".join(
                f"{count} groups {GIVES_UP_ON[reason]} since the last batch "
                f"({told({name: outcomes[name] for name in LOST[reason]})} in all): {REASONS[reason].remedy}"
                for reason, count in lost.items()
            )
            raise StarvedError(f"{what}; max_filtered_batches is {limit}")
        kept = produced - total - ended["incomplete"] - ended["expired"] - ended["cancelled"]
        if (
            produced >= KEPT_WINDOW * size
            and kept < self._limits.min_kept_ratio * produced
            and not self._warned
        ):
            self._warned = True
            logger.warning("only %d of the last %d groups were kept: %s", kept, produced, told(ended))

    def _check_budget(self, status: Mapping[str, Any]) -> None:
        """Producers wait for bytes that only a commit frees, or nothing, and the trainer waits for producers."""
        reason = budget_reason(status, self._needed)
        if reason is None:
            return
        if reason.name == "uncommitted":
            raise UncommittedBudgetError(str(reason))
        if (status["quiet_s"] or 0.0) >= QUIET_S:  # groups of another size might still find room
            raise BatchBudgetError(str(reason))


def _reasons(status: Mapping[str, Any]) -> list[Reason]:
    return reasons_of(status) or [ordinary(status)]
