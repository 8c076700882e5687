"""What a producer keeps for a while in case the server forgets it: a restart or failover may lose the last moments."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import Busy, StreamadvError
from .requests import ServerIds, Steps
from .tickets import PushResult

logger = logging.getLogger(__name__)

#: What was sent this long before the server was last seen unchanged is sent again to a restarted one.
RESEND_WINDOW_S: Final = 5.0
#: Of all that is kept.
MAX_RESEND_BYTES: Final = 256 << 20


@dataclass(slots=True)
class Sent:
    """Something a producer told the server, kept for a while in case the server forgets it."""

    shard: int
    server_id: str | None  # which server was believed to have the shard before it was sent
    when: float
    size: int
    again: Callable[[], Steps[PushResult]]


class ResendWindow:
    """The last things sent, oldest first. Threads may check and remember at once: what is sent twice is a duplicate."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sent: deque[Sent] = deque()
        self._bytes = 0
        self._servers: Sequence[str | None] = ()
        self._lock = threading.Lock()
        self._told_short = False
        self.behind: frozenset[int] = frozenset()
        """Shards that had no room for something they have lost when last asked."""

    def server_of(self, shard: int) -> str | None:
        """The shard's server as of the last check.

        Read it before sending: the answer may come from one that is gone when the sending is remembered.
        """
        return self._servers[shard] if self._servers else None

    def remember(
        self, shard: int, server_id: str | None, size: int, again: Callable[[], Steps[PushResult]]
    ) -> None:
        """Keep something just sent; `again` sends it once more (idempotent by rollout index).

        What is kept never exceeds MAX_RESEND_BYTES: the oldest is forgotten for it.
        """
        if self._seconds <= 0:
            return
        with self._lock:
            self._sent.append(Sent(shard, server_id, self._clock(), size, again))
            self._bytes += size
            youngest = -math.inf
            while self._bytes > MAX_RESEND_BYTES:
                youngest = self._forget_oldest().when
            short = youngest > self._clock() - self._seconds and not self._told_short
            self._told_short |= short
        if short:
            logger.warning(
                "resend_window is %g s, of which pushes fill %d MiB in less: what a server loses may not be sent again",
                self._seconds,
                MAX_RESEND_BYTES >> 20,
            )

    def check(self, keys: Sequence[str]) -> Steps[bool]:
        """Send again what another server may have lost; forget what this one has had for long. `keys`: one per shard.

        False when the server had no room for some of it: check again.
        """
        current: Sequence[str | None] = yield ServerIds(keys)
        self._servers = current
        with self._lock:
            sent = list(self._sent)
        behind = [item for item in sent if item.server_id != current[item.shard]]
        lost, refused = 0, list[int]()
        for item in behind:
            try:
                result = yield from item.again()
                lost += result.count("pushed")
            except Busy:
                refused.append(item.shard)
                continue
            except StreamadvError as error:
                logger.warning("not sent again: %s", error)
            # Kept as if sent now: this server may go away as well.
            item.server_id, item.when = current[item.shard], self._clock()
        if behind:
            logger.log(
                logging.WARNING if lost or not self.behind else logging.DEBUG,
                "the server is not the one it was: of %d things sent again %d trajectories were lost, %d are refused",
                len(behind),
                lost,
                len(refused),
            )
        self.behind = frozenset(refused)
        self._trim(current)
        return not refused

    def _trim(self, current: Sequence[str | None]) -> None:
        oldest = self._clock() - self._seconds
        with self._lock:
            while (
                self._sent
                and self._sent[0].when < oldest
                and self._sent[0].server_id == current[self._sent[0].shard]
            ):
                self._forget_oldest()

    def _forget_oldest(self) -> Sent:
        item = self._sent.popleft()
        self._bytes -= item.size
        return item
