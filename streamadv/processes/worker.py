"""A worker, or a program, that the supervisor starts again when it has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .. import clock
from ..errors import ProcessEndedError
from .kept import Kept

#: Exit statuses of a worker that refuses its settings: it would refuse them again.
REFUSALS: Final = (1, 2)
#: Seconds before a worker is started again: at first, doubled with every further end in a row, and at most.
FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0
#: A worker that ran for so many seconds has worked: its next end is a new accident.
WORKED_S: Final = 60.0
#: Ends in a row, each soon after its start, that are a fault and no accident.
MOST_ENDS: Final = 8


class Worker(Kept):
    """One process. Start it from a thread that lives as long as the process, see `Kept`.

    show: called in threads with each line of its output and whether that is of stderr. until_done: not started again
    once it has ended with status 0.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        show: Callable[[str, bool], object],
        until_done: bool = False,
    ) -> None:
        super().__init__(name, command, environment, show)
        self._until_done = until_done
        self.done = False
        self.starts = 0
        self._started = 0.0
        self._ends = 0  # in a row, without WORKED_S in between
        self._due: float | None = None  # when it has ended and is to be started again

    @property
    def waits(self) -> bool:
        """Whether it has ended and is started again later."""
        return self._due is not None

    def start(self) -> None:
        super().start()
        self._started, self._due = clock.now(), None
        self.starts += 1

    def look_after(self) -> str | None:
        """Start it again when that is due; call this often. Returns what has happened to it, for people.

        Raises ProcessEndedError for a worker that refuses to start, or keeps ending.
        """
        now = clock.now()
        if self.done:
            return None
        if self._due is not None:
            if now >= self._due:
                self.start()
            return None
        status = self.exit_status
        if status is None:
            return None
        self.wait()
        if status == 0 and self._until_done:
            self.done = True
            return None
        self._ends = 1 if now - self._started >= WORKED_S else self._ends + 1
        if self._ends >= MOST_ENDS or (status in REFUSALS and self.starts == 1):
            raise ProcessEndedError(f"{self.name} ended with status {status}: its last lines say why")
        delay = min(LONGEST_S, FIRST_S * 2.0 ** (self._ends - 1))
        self._due = now + delay
        return f"{self.name} ended with status {status}, is started again in {delay:g} s"


def worker_command(words: Sequence[str]) -> list[str]:
    """Of one `streamadv worker`. words: what follows on its command line."""
    return [sys.executable, "-m", "streamadv", "worker", *words]
