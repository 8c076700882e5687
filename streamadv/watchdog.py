"""Why nothing moves: found out while the trainer waits, and by `streamadv status`.

`reasons_of` reads a status; the Watchdog looks at it while rank 0 waits for a batch, says what it finds, and
raises where waiting cannot end: everything is filtered away, or uncommitted batches fill the byte budget.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from . import metrics
from .admission import byte_budget
from .errors import StarvedError, UncommittedBudgetError
from .run import Run
from .status import read_status

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
SAY_S: Final = 30.0
#: An entry this old in front of a consumer group means that nobody works there.
STUCK_S: Final = 20.0
#: Batch-equivalents of groups after which the share of kept ones is judged.
KEPT_WINDOW: Final = 4

FILTERED: Final = ("zero_variance", "difficulty", "no_train_members")


@dataclass(frozen=True, slots=True)
class Limits:
    """When waiting is no longer normal."""

    batch_groups: int
    min_kept_ratio: float  # warn below
    max_filtered_batches: int | None  # raise after so many batches' worth of filtered groups without a batch


def reasons_of(status: Mapping[str, Any]) -> list[str]:
    """What stands still in a run and since when, one line each; [] when everything moves."""
    reasons = []
    for name, stream in status["streams"].items():
        stage = {"rollouts": "grouper", "work": "advantage worker"}.get(
            name, f"scorer {name.partition(':')[2]}"
        )
        age = stream["oldest_age_s"]
        if age is not None and (age > STUCK_S or not stream["consumers"]):
            who = f"{stream['consumers']} known" if stream["consumers"] else "none known"
            reasons.append(
                f"{stream['length']} entries wait for a {stage} ({who}), the oldest for {age:.0f} s"
            )
    states = [producer["state"] for producer in status["producers"]]
    if "open" not in states and (status["groups"]["open"] or "finished" not in states):
        told = f"{states.count('finished')} finished, {states.count('lost')} lost"
        reasons.append(f"no producer is alive ({told}), {status['groups']['open']} groups are open")
    outcomes = status["groups"]["outcomes"]
    filtered = sum(outcomes.get(name, 0) for name in FILTERED)
    kept = sum(outcomes.get(name, 0) for name in metrics.KEPT)
    if filtered and not kept:
        reasons.append(f"all {filtered} groups so far were filtered away ({_listed(outcomes, FILTERED)})")
    if (dead := outcomes.get("dead", 0)) and dead >= kept:
        by_reason = ", ".join(f"{name} {count}" for name, count in status["ledger"]["dead"].items())
        reasons.append(
            f"all {dead} groups became dead letters (trajectories: {by_reason}): see `streamadv dead list`"
        )
    if status["ready"] and (waiting := _untrained(status)) > 0:
        reasons.append(f"{waiting} batches are named and wait for results or for the trainer")
    return reasons


class Watchdog:
    """Looks at the run while rank 0 waits."""

    def __init__(self, run: Run, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._limits = limits
        self._clock = clock
        self._since = self._look_due = clock()
        self._say_due = self._since + SAY_S
        self._outcomes: dict[str, int] | None = None  # when the last batch came
        self._warned = False

    def progress(self) -> None:
        """A batch was delivered."""
        self._since = self._clock()
        self._look_due = self._since + LOOK_S  # while batches come there is nothing to look for
        self._say_due = self._since + SAY_S
        self._outcomes = None
        metrics.no_progress(0.0)

    def look(self) -> None:
        """Called while waiting. Raises StarvedError, UncommittedBudgetError."""
        now = self._clock()
        if now < self._look_due:
            return
        self._look_due = now + LOOK_S
        metrics.no_progress(now - self._since)
        status = read_status(self._run)
        self._check_filters(status)
        self._check_budget(status)
        if now >= self._say_due:
            self._say_due = now + SAY_S
            reasons = "; ".join(reasons_of(status)) or "producers are at work"
            logger.warning("no batch for %.0f s: %s", now - self._since, reasons)

    def reasons(self) -> str:
        """What to add to an error: why there is no batch."""
        return "; ".join(reasons_of(read_status(self._run))) or "producers are at work"

    def _check_filters(self, status: Mapping[str, Any]) -> None:
        outcomes = status["groups"]["outcomes"]
        # A named batch waits for a worker, not for groups.
        if self._outcomes is None or _untrained(status) > 0:
            self._outcomes = outcomes
        before, size = self._outcomes, self._limits.batch_groups
        filtered = sum(outcomes.get(name, 0) - before.get(name, 0) for name in FILTERED)
        kept = sum(outcomes.get(name, 0) - before.get(name, 0) for name in metrics.KEPT)
        limit = self._limits.max_filtered_batches
        if limit is not None and filtered >= limit * size:
            raise StarvedError(
                f"{filtered} groups were filtered away since the last batch ({_listed(outcomes, FILTERED)} in all), "
                f"max_filtered_batches is {limit}: the tasks are too easy or too hard, or turn the filter off"
            )
        produced = kept + filtered
        if (
            produced >= KEPT_WINDOW * size
            and kept < self._limits.min_kept_ratio * produced
            and not self._warned
        ):
            self._warned = True
            logger.warning(
                "only %d of the last %d groups were kept: %s", kept, produced, _listed(outcomes, FILTERED)
            )

    def _check_budget(self, status: Mapping[str, Any]) -> None:
        """Producers wait for bytes that only a commit frees, and the trainer waits for producers."""
        ledger, uncommitted = status["ledger"], _uncommitted(status)
        waiting = ledger["queued"] or status["groups"]["open"] or _untrained(status) > 0
        if uncommitted <= 0 or waiting or not ledger["in_flight"]:
            return
        manifest = self._run.manifest
        budget = byte_budget(manifest.max_bytes, self._run.connection.memory())
        groups = status["groups"]["logged"]
        reserve = ledger["in_flight"] // max(1, groups) * status["place_bytes"]
        if status["bytes"]["live"] + status["bytes"]["reserved"] + reserve > budget:
            raise UncommittedBudgetError(
                f"{uncommitted} trained but uncommitted batches hold {status['bytes']['live']} bytes of max_bytes "
                f"{budget}, so no group can be admitted: commit more often, or raise max_bytes"
            )


def _untrained(status: Mapping[str, Any]) -> int:
    """Batches that are named and not yet trained on."""
    return int(status["trainer"]["batches"]) - _uncommitted(status)


def _uncommitted(status: Mapping[str, Any]) -> int:
    """Batches that are trained on and not yet committed."""
    return (status["trainer"]["version"] or 0) - int(status["trainer"]["committed"])


def _listed(outcomes: Mapping[str, int], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {outcomes[name]}" for name in names if outcomes.get(name))
