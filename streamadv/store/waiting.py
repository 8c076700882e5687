"""How processes wait: a `Wait` paces one loop of attempts, reports the reason, and says when to give up.

`Blocked` reports the reason, in the log and as a metric. Each `Wait` has one; loops that wait for the same thing may
share one.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from .. import clock, doors, metrics
from ..doors import renewed_at_fork
from ..messages import log_fields
from .reasons import Reason, listed

logger = logging.getLogger(__name__)

#: Seconds after which a wait is reported, and between two reports. An attempt takes up to 5 s: so within 30 s.
REPORT_S: Final = 25.0
#: Seconds before a wait counts in the metric: shorter waits are part of a pipeline that runs.
BLOCKED_S: Final = 1.0
#: Seconds without an attempt after which a wait was given up. An attempt at a server that hangs takes 20 s.
ATTEMPT_S: Final = 30.0

_live: weakref.WeakSet[Blocked] = weakref.WeakSet()
_lock = renewed_at_fork(threading.Lock())


class Blocked:
    """Says why somebody waits, from the first `because` until `over`: after `first_s` seconds, then every REPORT_S.

    who, what: the subject and the state in the log, e.g. "trainer" and "no batch". run: of whoever waits; None for one
    that knows a server only. Any thread may call.
    """

    def __init__(self, who: str, what: str, run: str | None, first_s: float = REPORT_S) -> None:
        self._subject = (run, who, what)
        self._line = f"{who}: {what}" if run is None else f"run {run}: {who}: {what}"
        self._first_s = first_s
        self._names: frozenset[str] = frozenset()
        self._since = self._report_due = math.inf
        self._reported = self._last = -math.inf

    def because(self, *reasons: Reason) -> None:
        """Call before each attempt, with the reasons that hold now."""
        now = clock.now()
        with _lock:
            if now >= self._last + ATTEMPT_S:  # a new wait, or the one before was given up
                # One who waits again and again says so as seldom as one who waits for long.
                self._since, self._report_due = now, max(now + self._first_s, self._reported + REPORT_S)
            _live.add(self)
            self._last, self._names = now, frozenset(reason.name for reason in reasons)
            if now < self._report_due:
                return
            self._report_due = now + REPORT_S
            same = [other for other in _live if other._subject == self._subject and other is not self]
            if any(other._reported > now - REPORT_S for other in same):
                return  # another thread or task of this process waits for the same
            self._reported = now
        waited = f" for {self.seconds:.0f} s" if self.seconds >= 1 else ""
        run, who, _ = self._subject
        fields = log_fields("waiting", run=run, role=who, reason=", ".join(sorted(self._names)))
        logger.warning("%s%s: %s", self._line, waited, listed(reasons, run), extra=fields)

    def over(self) -> None:
        """The wait has ended, which is told if the wait was: the next `because` begins another one."""
        with _lock:
            _live.discard(self)
            since, self._since, self._last = self._since, math.inf, -math.inf
            if self._reported < since:
                return
        run, who, _ = self._subject
        fields = log_fields("waited", run=run, role=who)
        logger.info("%s: goes on after %.0f s", self._line, clock.now() - since, extra=fields)

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last `because` of this wait; 0 when it is over."""
        return max(0.0, self._last - self._since)


class Wait:
    """One loop of attempts: pauses between them, and is `expired` after `timeout` seconds (None = never).

    The n-th pause is uniform in [0, min(cap, base * 2**n)] seconds (full jitter), and ends with the timeout at the
    latest. blocked: says why. sleep: takes seconds; give `Event.wait` to end a pause early.
    """

    def __init__(
        self,
        blocked: Blocked,
        *,
        timeout: float | None = None,
        base: float = 0.05,
        cap: float = 2.0,
        sleep: Callable[[float], object] = doors.sleep,
    ) -> None:
        self.timeout = timeout
        self._blocked = blocked
        self._base, self._cap, self._sleep = base, cap, sleep
        self._attempts = 0
        self.progress()

    def because(self, *reasons: Reason) -> None:
        """Call after a failed attempt, with the reasons that hold now."""
        self._blocked.because(*reasons)

    def delay(self) -> float:
        """Count one more failed attempt. Returns the seconds to the next one, for those who sleep themselves."""
        limit = min(self._cap, self._base * 2.0 ** min(self._attempts, 64))
        self._attempts += 1
        return min(limit * random.random(), max(0.0, self._end - clock.now()))

    def pause(self) -> None:
        """Sleep until the next attempt is due."""
        self._sleep(self.delay())

    def progress(self) -> None:
        """Something came, though not what is waited for: the timeout begins anew."""
        self._end = math.inf if self.timeout is None else clock.now() + self.timeout

    def over(self) -> None:
        """An attempt succeeded: pauses, and the wait itself, begin anew with the next failure."""
        self._attempts = 0
        self._blocked.over()

    @property
    def expired(self) -> bool:
        """Whether it is time to give up."""
        return clock.now() >= self._end


def _blockers() -> Iterator[tuple[str, str]]:
    """Who is blocked in this process now, for longer than a moment, and for which reason."""
    with _lock:
        waits = list(_live)
    for blocked in waits:
        shown_from = blocked._since + min(blocked._first_s, BLOCKED_S)
        if shown_from <= clock.now() < blocked._last + ATTEMPT_S:
            for name in blocked._names:
                yield blocked._subject[1], name


metrics.blocked_as(_blockers)
