"""What a producer keeps for a while in case the server forgets it: a restart or failover may lose the last moments."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from .exchange import ServerId, Steps
from .tickets import PushResult

logger = logging.getLogger(__name__)

#: What was sent this long before the server was last seen unchanged is sent again to a restarted one.
RESEND_WINDOW_S: Final = 5.0
MAX_RESEND_BYTES: Final = 256 << 20


class Sent(NamedTuple):
    """Something a producer told the server, kept for a while in case the server forgets it."""

    when: float
    size: int
    again: Callable[[], Steps[PushResult]]


class ResendWindow:
    """The last things sent, oldest first."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._server_id: str | None = None
        self._sent: deque[Sent] = deque()
        self._bytes = 0

    def remember(self, size: int, again: Callable[[], Steps[PushResult]]) -> None:
        """Keep something just sent; `again` sends it once more (idempotent by rollout index)."""
        if self._seconds > 0:
            self._sent.append(Sent(self._clock(), size, again))
            self._bytes += size

    def check(self) -> Steps[None]:
        """Send everything again if the server is another one; else forget what it has had for long."""
        server_id = yield ServerId()
        if self._server_id not in (None, server_id):
            self._server_id = server_id
            sent, self._sent, self._bytes = list(self._sent), deque(), 0
            lost = 0
            for item in sent:
                result = yield from item.again()
                lost += result.count("pushed")
            logger.warning(
                "the server is not the one it was: sent %d pushes again, %d trajectories were lost",
                len(sent),
                lost,
            )
        self._server_id = server_id
        oldest = self._clock() - self._seconds
        while self._sent and (self._sent[0].when < oldest or self._bytes > MAX_RESEND_BYTES):
            self._bytes -= self._sent.popleft().size
