"""The heartbeat of one rank of a training job: a thread sends it, however long a step takes."""

from __future__ import annotations

import math
import threading
import weakref
from contextlib import suppress
from typing import Final

from .. import clock, doors
from ..batch.progress import Progress
from ..batch.session import Session
from ..errors import EpochFencedError
from ..run.heartbeats import BEAT_S, Doing, RankReport
from ..store.retry import SERVER_ERRORS
from .plan import Rank

#: Seconds between two checks for a change.
LOOK_S: Final = 1.0
#: Seconds that `close` waits for a heartbeat under way.
CLOSE_S: Final = 1.0


class Heartbeat:
    """Beats from `start` until `close`, or until nobody has this object any more.

    It only reads the progress, and writes nothing else of the session. A newer trainer's run is left alone.
    """

    def __init__(self, rank: Rank, progress: Progress) -> None:
        self._rank = rank
        self._progress = progress
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._closed = doors.Event()
        self._beat_at = -math.inf
        self._told: tuple[int, int, int] | None = None  # how far the rank was at that time

    def start(self, session: Session) -> None:
        """Beat in this session from now on."""
        self._session = session
        if self._thread is None and not self._closed.is_set():
            arguments = (weakref.ref(self), self._closed)
            self._thread = doors.Thread(target=_beat, args=arguments, name="streamadv-heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say that this rank leaves, and stop. Does not wait for a server that is away."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            self._thread = None
            self.beat("left")

    def beat_if_due(self) -> None:
        """One heartbeat, if the last one is long ago or something has changed since."""
        now, where = clock.now(), (self._progress.delivered, self._progress.version, self._progress.epoch)
        if now - self._beat_at >= BEAT_S or where != self._told:
            self._beat_at, self._told = now, where
            self.beat()

    def beat(self, doing: Doing | None = None) -> None:
        """One heartbeat. While the server is away, or another trainer has the run, nothing is written."""
        session, progress = self._session, self._progress
        if session is None or not progress.epoch:
            return
        at = progress.delivered_at
        report = RankReport(
            self._rank.world_size,
            doing or ("trains" if progress.delivered > progress.version else "waits"),
            progress.delivered - 1 if progress.has_delivered else None,
            None if at is None else round(clock.now() - at, 1),
        )
        with suppress(*SERVER_ERRORS, EpochFencedError):  # the training loop meets the same and says so
            session.run.home.call("attend", [progress.fence, self._rank.number, report.to_json()])


def _beat(heartbeat: weakref.ref[Heartbeat], closed: threading.Event) -> None:
    while (alive := heartbeat()) is not None:
        alive.beat_if_due()
        del alive
        if closed.wait(LOOK_S):
            return
