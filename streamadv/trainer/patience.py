"""How long a trainer queue waits for a batch, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from ..batch.session import Session
from ..store.retry import Backoff
from ..store.waiting import Reason, Waiting

#: Between two looks at whether rank 0 has the run.
WAIT_CAP_S: Final = 0.5


class Patience:
    """Of one call. It is over `timeout` seconds after the last progress: a new group, or a batch that is named."""

    def __init__(self, timeout: float | None, pause: Callable[[float], object]) -> None:
        self._timeout = timeout
        self._last = time.monotonic()
        self._backoff = Backoff(cap=WAIT_CAP_S, sleep=pause)
        self._waiting = Waiting("trainer", "waiting for a batch")
        self._seen: list[int] = []

    @property
    def is_over(self) -> bool:
        return self._timeout is not None and time.monotonic() - self._last > self._timeout

    def progress(self) -> None:
        self._last = time.monotonic()

    def look(self, session: Session) -> None:
        """At each turn of the wait: whether groups have come since the last one, be it that rank 0 has dropped them."""
        seen = [*_logged(session), len(session.passed_over)] if self._timeout else []
        if any(now > then for now, then in zip(seen, self._seen, strict=False)):
            self.progress()
        self._seen = seen

    def wait(self, reason: Exception) -> None:
        """A moment, for rank 0 to take the run. Says why after a while."""
        self._backoff.because("trainer", "waiting for rank 0", Reason("other_rank", str(reason)))
        self._backoff.wait()

    def over(self) -> None:
        """Rank 0 has the run."""
        self._backoff.reset()

    def because(self, reason: Reason) -> None:
        """Why there is no batch yet: said after a while."""
        self._waiting.because(reason)


def _logged(session: Session) -> list[int]:
    pipe: Any = session.run.connection.scripts.pipeline(transaction=False)
    for keys in session.run.keys.shards:
        pipe.xlen(keys.groups)
    return list(pipe.execute())
