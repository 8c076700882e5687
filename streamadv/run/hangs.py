"""Calls a user's function in bounded time, even if the function does not return.

On the main thread two signals interrupt the call, which stays on it: judges such as Math-Verify bound their own time
with SIGALRM and refuse every call on another thread. A timer of the process's CPU time reaches code that never lets
another thread run (a runaway regular expression); a second thread signals code that sleeps. On any other thread, the
call runs in a thread of its own, which is abandoned when the time is over.
"""

from __future__ import annotations

import ctypes
import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from .. import clock, doors
from ..errors import HungError
from ..messages import log_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that a call may go on after its process was told to end.
GRACE_S: Final = 5.0
#: Seconds after which a call that lasts is reported, and between two reports.
REPORT_S: Final = 30.0
#: Not SIGALRM, with which some functions bound their own time.
SIGNAL: Final = signal.SIGVTALRM
#: Seconds between two interruptions: a function may catch the first one.
REPEAT_S: Final = 1.0
#: Seconds between two looks at a call.
LOOK_S: Final = 0.2


class Stopped(BaseException):
    """The process ends, and a call was given up for that: the function is not at fault."""


class _OverdueError(BaseException):
    """Raised inside a call that takes too long. The function's own `except Exception` does not catch it."""


class _Limit:
    """When a call is over: after its time, or some time after its process was told to end."""

    def __init__(self, timeout_s: float, what: str, stop: threading.Event | None) -> None:
        self.timeout_s = timeout_s
        self._what = what
        self._stop = stop
        self._started = self._reported = clock.now()
        self._stopped: float | None = None
        self.interrupted = -math.inf

    @property
    def passed(self) -> bool:
        now = clock.now()
        if self._stopped is None and self._stop is not None and self._stop.is_set():
            self._stopped = now
        ended = self._stopped is not None and now - self._stopped > GRACE_S
        return ended or now - self._started > self.timeout_s

    def look(self) -> bool:
        """Whether it has passed. A call that goes on is reported now and then."""
        if self.passed:
            return True
        now = clock.now()
        if now - self._reported > REPORT_S or (self._stopped and self._reported < self._stopped):
            self._reported = now
            fields = log_fields("call_slow", role=self._what)
            ending = " (this process ends)" if self._stopped else ""
            text = "%s has not returned after %.0f s%s"
            logger.warning(text, self._what, now - self._started, ending, extra=fields)
        return False

    def error(self) -> HungError | Stopped:
        seconds = clock.now() - self._started
        if self._stopped is not None:
            return Stopped(f"{self._what} was given up after {seconds:.1f} s, because this process ends")
        return HungError(f"{self._what} did not return within {seconds:.1f} s: bound what it waits for")


#: Limit of the call that the main thread is in.
_current: _Limit | None = None
#: Thread that watches the limit: one for the life of the process, because starting one takes longer than a small call.
_watcher: threading.Thread | None = None


def _watch(main: int) -> None:
    while True:
        time.sleep(LOOK_S)
        limit = _current
        if limit is not None and limit.look():
            signal.pthread_kill(main, SIGNAL)


def _on_signal(*_: Any) -> None:
    limit, now = _current, clock.now()
    if limit is not None and limit.passed and now - limit.interrupted >= REPEAT_S:
        limit.interrupted = now
        raise _OverdueError


def call_within(call: Callable[[], T], timeout_s: float, what: str, stop: threading.Event | None = None) -> T:
    """Returns `call()`. Raises HungError after `timeout_s` seconds, and Stopped GRACE_S after `stop` was set.

    `what` names the call in messages.
    """
    global _current, _watcher
    limit = _Limit(timeout_s, what, stop)
    if threading.current_thread() is not threading.main_thread():
        return _call_in_thread(call, limit)
    # On the main thread: signals raise _OverdueError inside the call.
    if signal.getsignal(SIGNAL) is not _on_signal:
        signal.signal(SIGNAL, _on_signal)  # never restored: a late signal must find it
    if _watcher is None or not _watcher.is_alive():  # a fork has none
        arguments = (threading.get_ident(),)
        _watcher = threading.Thread(target=_watch, args=arguments, name="streamadv-watch", daemon=True)
        _watcher.start()
    try:
        try:
            _current = limit
            signal.setitimer(signal.ITIMER_VIRTUAL, limit.timeout_s, REPEAT_S)
            return call()
        finally:
            _current = None
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OverdueError:
        _current = None  # the signal may have come just before this was done above
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        raise limit.error() from None


def _call_in_thread(call: Callable[[], T], limit: _Limit) -> T:
    """Call in a thread of its own, and stop waiting for it when its time is over. Raises as `call_within`."""
    done = doors.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised below, where it was called
            errors.append(error)
        finally:
            done.set()

    thread = doors.Thread(target=body, name="streamadv-call", daemon=True)
    thread.start()
    while not done.wait(min(LOOK_S, limit.timeout_s / 4)):
        if limit.look():
            # Ends a loop of Python code. A system call that waits is not interrupted.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_OverdueError)
            )
            raise limit.error()
    if errors:
        raise errors[0]
    return results[0]
