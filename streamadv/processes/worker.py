"""A worker process that is started again when it has ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..errors import ProcessEndedError
from .kept import Kept
from .restarts import Restarts

#: Exit statuses of a worker that refuses its settings: it would refuse them again.
REFUSALS: Final = (1, 2)


class Worker:
    """One `streamadv worker`. Start it from a thread that lives as long as the process, see `Kept`.

    words: what follows `streamadv worker` on its command line. show: called in threads with each line of its output and
    whether that is of stderr.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        show: Callable[[str, bool], object],
    ) -> None:
        self.name = name
        self._process = Kept(name, [sys.executable, "-m", "streamadv", "worker", *words], environment, show)
        self._restarts = Restarts()
        self.starts = 0

    @property
    def waits(self) -> bool:
        """Whether it has ended and is started again later."""
        return self._restarts.waits

    def start(self) -> None:
        self._process.start()
        self._restarts.started()
        self.starts += 1

    def look_after(self) -> str | None:
        """Start it again when that is due; call this often. Returns what has happened to it, for people.

        Raises ProcessEndedError for a worker that refuses to start, or keeps ending.
        """
        if self.waits:
            if self._restarts.is_due:
                self.start()
            return None
        status = self._process.exit_status
        if status is None:
            return None
        self._process.wait()
        delay = self._restarts.ended()
        if delay is None or (status in REFUSALS and self.starts == 1):
            raise ProcessEndedError(f"{self.name} ended with status {status}: its last lines say why")
        return f"{self.name} ended with status {status}, is started again in {delay:g} s"

    def terminate(self) -> None:
        """Ask it to end: it finishes what is in hand, and gives back what it has only read."""
        self._process.send(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until it has ended. Call `terminate` before."""
        self._process.wait()
