"""How long a trainer queue waits for a batch, and what it says meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..batch.session import Session
from ..store.reasons import Reason
from ..store.retry import Outage
from ..store.waiting import Blocked, Wait

#: Between two looks at whether rank 0 has the run.
WAIT_CAP_S: Final = 0.5


class Patience:
    """The waits of one call: for a batch, for rank 0, and for the server.

    The call gives up `timeout` seconds after the last progress: a new group, or a batch that was named.
    """

    def __init__(self, timeout: float | None, pause: Callable[[float], object]) -> None:
        self.outage = Outage("trainer", sleep=pause)
        self._batch = Wait(Blocked("trainer", "waiting for a batch"), timeout=timeout)
        self._rank_0 = Wait(Blocked("trainer", "waiting for rank 0"), cap=WAIT_CAP_S, sleep=pause)
        self._seen: list[int] = []

    @property
    def is_over(self) -> bool:
        return self._batch.expired

    def progress(self) -> None:
        self._batch.progress()

    def look(self, session: Session) -> None:
        """At each turn of the wait: whether groups have come since the last one, be it that rank 0 has dropped them."""
        seen = [*_logged(session), len(session.passed_over)] if self._batch.timeout else []
        if any(now > then for now, then in zip(seen, self._seen, strict=False)):
            self.progress()
        self._seen = seen

    def wait(self, reason: Exception) -> None:
        """A moment, for rank 0 to take the run. Says why after a while."""
        self._rank_0.because(Reason("other_rank", str(reason)))
        self._rank_0.pause()

    def over(self) -> None:
        """The server answers and rank 0 has the run."""
        self.outage.over()
        self._rank_0.over()

    def because(self, reason: Reason) -> None:
        """Why there is no batch yet: said after a while."""
        self._batch.because(reason)


def _logged(session: Session) -> list[int]:
    pipe: Any = session.run.connection.scripts.pipeline(transaction=False)
    for keys in session.run.keys.shards:
        pipe.xlen(keys.groups)
    return list(pipe.execute())
