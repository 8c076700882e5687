"""When a worker that has ended is started again."""

from __future__ import annotations

from typing import Final

from .. import clock

FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0
#: A worker that ran for so long has worked: the next end is a new accident.
WORKED_S: Final = 60.0
#: Ends in a row, each soon after its start, that are a fault and no accident.
MOST_ENDS: Final = 8


class Restarts:
    """The starts and ends of one worker."""

    def __init__(self) -> None:
        self._started = 0.0
        self._ends = 0  # in a row, without WORKED_S in between
        self._due: float | None = None

    def started(self) -> None:
        """The worker was started."""
        self._started, self._due = clock.now(), None

    def ended(self) -> float | None:
        """The worker has ended. Returns the seconds until the next start; None after too many ends."""
        now = clock.now()
        self._ends = 1 if now - self._started >= WORKED_S else self._ends + 1
        if self._ends >= MOST_ENDS:
            return None
        delay = min(LONGEST_S, FIRST_S * 2.0 ** (self._ends - 1))
        self._due = now + delay
        return delay

    @property
    def waits(self) -> bool:
        """Whether the worker has ended and is to be started again."""
        return self._due is not None

    @property
    def is_due(self) -> bool:
        """Whether it is to be started now."""
        return self._due is not None and clock.now() >= self._due
