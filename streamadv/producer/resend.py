"""Keeps what a producer sent recently, and sends it again to a server that comes back without its latest writes.

See "Going back in time" in docs/reference/guarantees.md.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .. import clock
from ..doors import renewed_at_fork
from ..errors import Busy, NotPermittedError, StreamadvError
from ..messages import log_fields
from ..run.heartbeats import SETTLE_S
from ..store.keys import ShardKeys
from .requests import ServerIds, Steps
from .tickets import PushResult

logger = logging.getLogger(__name__)

#: Seconds before the last check of an unchanged server: what was sent since then is sent again to another one.
RESEND_WINDOW_S: Final = 5.0
#: Bounds of the window: bytes of payloads, and number of calls.
MAX_RESEND_BYTES: Final = 256 << 20
MAX_RESEND_COUNT: Final = 1 << 16
#: What `score` says of a group that is not there.
UNKNOWN: Final = "unknown"


@dataclass(slots=True)
class Sent:
    """Something that was sent to a shard."""

    shard: int
    server_id: str | None  # the shard's server as of the last check before it was sent
    when: float
    size: int  # bytes of its payloads and member tables
    send: Callable[..., Steps[PushResult]]
    what: tuple[Any, ...]  # arguments of `send`; plain tuples hold nothing that the garbage collector walks
    opens: bool  # a group that the server does not have; else it changes one that is open


class ResendWindow:
    """The last things sent, oldest first. Threads may check and remember at once: what is sent twice is a duplicate."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sent: deque[Sent] = deque()
        self._bytes = 0
        # Each shard's server as of the last check. Read it before sending, because another one may take over then.
        self.servers: dict[int, str | None] = {}
        self._lock = renewed_at_fork(threading.Lock())
        self._warned_short = False
        # Shard whose server was replaced -> when that one has heard every producer that is alive.
        self._settled: dict[int, float] = {}
        # Calls for groups that the server did not have at the last check: somebody else may bring them back.
        self.missed = 0
        # Shards that had no room for lost calls at the last check -> number of these calls.
        self.behind: Counter[int] = Counter()

    @property
    def kept(self) -> int:
        """How many calls would be sent again to another server."""
        return len(self._sent)

    def send(self, shard: int, send: Callable[..., Steps[PushResult]], *what: Any) -> Steps[PushResult]:
        """`send(*what)`, something without payload, and `remember` it if that has changed anything."""
        server_id = self.servers.get(shard)
        result = yield from send(*what)
        if result.codes:
            server_id = None if self._is_missed(shard, result) else server_id  # None: it is in doubt
            self.remember(shard, server_id, 0, send, *what, opens=False)
        return result

    def _is_missed(self, shard: int, result: PushResult) -> bool:
        """Whether the server does not have the group, and somebody may bring it back."""
        return result.codes == [UNKNOWN] and clock.now() < self._settled.get(shard, -math.inf)

    def remember(
        self,
        shard: int,
        server_id: str | None,
        size: int,
        send: Callable[..., Steps[PushResult]],
        *what: Any,
        opens: bool = True,
    ) -> None:
        """Keep something just sent; `send(*what)` sends it once more (idempotent by rollout index).

        Forgets the oldest for it, so that at most MAX_RESEND_BYTES and MAX_RESEND_COUNT things are kept.
        """
        if self._seconds <= 0:
            return
        with self._lock:
            self._sent.append(Sent(shard, server_id, clock.now(), size, send, what, opens))
            self._bytes += size
            youngest_forgotten = -math.inf
            while self._bytes > MAX_RESEND_BYTES or len(self._sent) > MAX_RESEND_COUNT:
                youngest_forgotten = self._forget_oldest().when
            is_short = youngest_forgotten > clock.now() - self._seconds and not self._warned_short
            self._warned_short |= is_short
        if is_short:
            logger.warning(
                "resend_window is %g s, pushes fill %d MiB or %d calls in less: what a server loses may stay lost",
                self._seconds,
                MAX_RESEND_BYTES >> 20,
                MAX_RESEND_COUNT,
                extra=log_fields("resend_window_short", role="producer"),
            )

    def check(self, shards: Sequence[ShardKeys], first: Callable[[], Steps[None]]) -> Steps[bool]:
        """Send again what another server may have lost; forget what this one has had for long enough.

        first: what is to be done on other servers before anything is sent again. What opens groups comes before what
        changes them. False when the server had no room for some of it, no memory, or not (yet) its group: check again.
        """
        asked = clock.now()  # sending again may take long, and the servers may be others by then
        servers = dict(enumerate((yield ServerIds(shards))))
        with self._lock:
            in_doubt = [sent for sent in self._sent if sent.server_id != servers[sent.shard]]
        in_doubt.sort(key=lambda sent: not sent.opens)
        replaced = [shard for shard, before in self.servers.items() if before != servers[shard]]
        self._settled |= dict.fromkeys(replaced, asked + SETTLE_S)
        if in_doubt or replaced:
            yield from first()
        self.servers = servers
        refused: Counter[int] = Counter()  # by shard
        lost = self.missed = 0
        for sent in in_doubt:
            try:
                result = yield from sent.send(*sent.what)
            except Busy:
                refused[sent.shard] += 1
                continue
            except NotPermittedError:
                raise
            except StreamadvError as error:
                logger.warning(
                    "not sent again: %s", error, extra=log_fields("resend_failed", role="producer")
                )
            else:
                if refused[sent.shard] and not set(result.codes) - {UNKNOWN}:
                    refused[sent.shard] += 1  # its group may be among those that were refused
                    continue
                if self._is_missed(sent.shard, result):
                    self.missed += 1
                    continue
                lost += result.count("pushed")
            # Kept as if sent now: this server may be replaced as well.
            sent.server_id, sent.when = servers[sent.shard], clock.now()
        if in_doubt:
            logger.log(
                logging.WARNING if lost or not self.behind else logging.DEBUG,
                "the server is not the one it was: calls sent again: %d; trajectories that it had lost, now back: %d; "
                "calls that wait for admission: %d",
                len(in_doubt),
                lost,
                refused.total(),
                extra=log_fields("sent_again", role="producer"),
            )
        self.behind = refused
        self._trim(servers, oldest_kept=asked - self._seconds)
        return not (refused or self.missed)

    def are_same(self, shards: Sequence[ShardKeys]) -> Steps[bool]:
        """Whether the servers are those of the last check."""
        return dict(enumerate((yield ServerIds(shards)))) == self.servers

    def _trim(self, servers: Mapping[int, str | None], oldest_kept: float) -> None:
        with self._lock:
            while self._sent and self._sent[0].when < oldest_kept:
                if self._sent[0].server_id != servers[self._sent[0].shard]:
                    return
                self._forget_oldest()

    def _forget_oldest(self) -> Sent:
        sent = self._sent.popleft()
        self._bytes -= sent.size
        return sent
