"""Why rollouts failed: describes a failure in one line, sums failures up in the log, raises if all fail alike."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .. import clock
from ..doors import renewed_at_fork
from ..errors import StreamadvError, TrajectoryError
from ..messages import log_fields, one_line, place_of

logger = logging.getLogger(__name__)

MAX_REASON_CHARS: Final = 200
#: Seconds between two lines of the log.
LOG_INTERVAL_S: Final = 30.0
#: Different reasons that one line names.
MAX_REASONS: Final = 5
#: Groups of one rollout that fail alike in a row before the fault counts as one of the code that plays them.
ALIKE_GROUPS: Final = 3
#: The reason of a rollout whose function returned without push or fail.
NOT_PUSHED: Final = "not_pushed"
CANCELLED: Final = "cancelled"


def describe(error: BaseException) -> str:
    """Type, message and line of an exception on one line of bounded length; 'cancelled' for what stops a program."""
    if not isinstance(error, Exception):
        return CANCELLED
    text = one_line(str(error))
    text = text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 3] + "..."
    place = "" if isinstance(error, StreamadvError) else place_of(error)
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + place


#: Type of an exception, and the user's line of code that it comes from.
_Fault = tuple[type, str]


@dataclass(slots=True)
class Outcome:
    """How one call of the function that plays a rollout ended."""

    result: Any = None
    error: BaseException | None = None
    retries: int = 0  # how often it may be played again


class Failures:
    """The failed rollouts of one producer. Threads may share it."""

    def __init__(self) -> None:
        self._lock = renewed_at_fork(threading.Lock())
        self._unlogged: Counter[str] = Counter()  # reasons
        self._group_id = ""  # of the last one
        self._logged_at = -LOG_INTERVAL_S
        self._fault: _Fault | None = None  # of the last groups of one rollout, and how many had it in a row
        self._alike = 0

    def note(self, reason: str, group_id: str) -> None:
        """Count a rollout that has failed; logged at once after a quiet time, else with those that follow."""
        with self._lock:
            self._unlogged[reason] += 1
            self._group_id = group_id
        self.log()

    def log(self, now: bool = False) -> None:
        """Log the failures since the last line, if that is LOG_INTERVAL_S ago or `now`."""
        with self._lock:
            if not self._unlogged or not (now or clock.now() - self._logged_at >= LOG_INTERVAL_S):
                return
            self._logged_at = clock.now()
            counts, self._unlogged = self._unlogged, Counter()
            group_id = self._group_id
        listed = [f"{count} x {reason}" for reason, count in counts.most_common(MAX_REASONS)]
        more = f", and {len(counts) - MAX_REASONS} other reasons" if len(counts) > MAX_REASONS else ""
        total = counts.total()
        text = "%d rollout%s failed, the last one in group %s: %s%s"
        fields = log_fields("rollouts_failed", role="producer", count=total)
        logger.warning(text, total, "s" * (total > 1), group_id, ", ".join(listed), more, extra=fields)

    def exception_to_raise(self, outcomes: Sequence[Outcome]) -> BaseException | None:
        """The exception to raise after a group was played, if any.

        That is an error of streamadv that is not of a record, or one that all rollouts of the group raised at the same
        line of the user's code; for groups of one rollout, one that ALIKE_GROUPS of them raised in a row.
        """
        errors = [outcome.error for outcome in outcomes]
        for error in errors:
            if isinstance(error, StreamadvError) and not isinstance(error, TrajectoryError):
                return error
        faults = {
            (type(error), place_of(error)) if isinstance(error, Exception) else None for error in errors
        }
        fault = faults.pop() if len(faults) == 1 else None
        if len(errors) > 1:
            return None if fault is None else errors[0]
        with self._lock:
            self._alike = self._alike + 1 if fault == self._fault else 1
            self._fault = fault
            if fault is None or self._alike < ALIKE_GROUPS:
                return None
            self._fault, self._alike = None, 0
        return errors[0]
