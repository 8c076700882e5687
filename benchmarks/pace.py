"""How a benchmark's source of load hears from its supervisor: a pace per line of stdin."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Final

#: Paces as the supervisor writes them; a number is units per second.
GO: Final = "inf"
WAIT: Final = "0"


class Pace:
    """Units per second, changed by lines of stdin; nothing to begin with. Ends the process with its stdin."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._due = 0.0
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_for_turn(self) -> float:
        """Until the next unit is due, and when it was. Late units are made up for: a rate is kept on the average."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._rate and self._due <= now:
                    due = now if self._rate == math.inf else self._due
                    self._due += 1 / self._rate
                    return due
                self._changed.wait(self._due - now if self._rate else None)

    @property
    def going(self) -> bool:
        """Whether there is any pace, for sources that have no thread to wait in."""
        return self._rate > 0

    def wait_until_going(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.going)

    def _listen(self) -> None:
        for text in sys.stdin:
            with self._changed:
                self._rate, self._due = float(text), time.monotonic()
                self._changed.notify_all()
