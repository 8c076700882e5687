"""The waits of one call of the trainer queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..batch.hold import NotHeldError
from ..batch.session import Session
from ..store.reasons import Reason
from ..store.retry import Outage
from ..store.waiting import Blocked, Wait

#: The longest pause between two looks at whether rank 0 has taken the run, in seconds.
HOLD_CAP_S: Final = 0.5


class Patience:
    """The waits of one call: for a batch, for rank 0 to take the run, and for the server.

    The call gives up `timeout` seconds after the last progress: a new group, or a batch that was named.
    """

    def __init__(self, run: str, timeout: float | None, pause: Callable[[float], object]) -> None:
        self.timeout = timeout
        self.outage = Outage("trainer", run, sleep=pause)
        self._batch = Wait(Blocked("trainer", "waiting for a batch", run), timeout=timeout)
        self._hold = Wait(Blocked("trainer", "waiting for rank 0", run), cap=HOLD_CAP_S, sleep=pause)
        self._counts: list[int] = []

    @property
    def is_over(self) -> bool:
        """Whether `timeout` seconds have passed since the last progress."""
        return self._batch.expired

    def progress(self) -> None:
        """Start the timeout anew."""
        self._batch.progress()

    def look(self, session: Session) -> None:
        """Take groups that came since the last look as progress, also those that rank 0 has dropped already."""
        if not self.timeout:
            return
        counts = [*_lengths(session), len(session.dropped)]
        if any(now > before for now, before in zip(counts, self._counts, strict=False)):
            self.progress()
        self._counts = counts

    def wait_for_batch(self, reason: Reason) -> None:
        """Say after a while why there is no batch. Does not pause."""
        self._batch.because(reason)

    def wait_for_hold(self, error: NotHeldError) -> None:
        """Pause until rank 0 may have taken the run, and say after a while why it has not."""
        self._hold.because(Reason("other_rank", str(error)))
        self._hold.pause()

    def held(self) -> None:
        """The server answers and rank 0 has the run."""
        self.outage.over()
        self._hold.over()


def _lengths(session: Session) -> list[int]:
    """Entries in each shard's groups log."""
    pipe: Any = session.run.connection.scripts.pipeline(transaction=False)
    for keys in session.run.keys.shards:
        pipe.xlen(keys.groups)
    return list(pipe.execute())
