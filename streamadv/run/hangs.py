"""Calls of a user's function that end in bounded time, even if the function does not.

On the main thread two signals interrupt the call: a timer of the process's CPU time reaches code that never lets
another thread run (a regular expression gone wild), and a watching thread signals code that sleeps. On another thread
the call runs in a thread of its own, which is abandoned when its time is over.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from .. import clock
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


def call_within(call: Callable[[], T], timeout_s: float, what: str, stop: threading.Event | None = None) -> T:
    """Returns `call()`. Raises HungError after `timeout_s` seconds, and Stopped GRACE_S after `stop` was set.

    `what` names the call in messages.
    """
    limit = _Limit(timeout_s, what, stop)
    on_main = threading.current_thread() is threading.main_thread()
    return _call_with_signals(call, limit) if on_main else _call_in_thread(call, limit)


class Stopped(BaseException):
    """The process ends, and a call was given up for that: the function is not at fault."""


class _OverdueError(BaseException):
    """Raised inside a call that takes too long. The function's own `except Exception` does not catch it."""


class _Limit:
    """When a call is over: after its time, or some time after its process was told to end."""

    def __init__(self, timeout_s: float, what: str, stop: threading.Event | None) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._stop = stop
        self._started = clock.now()
        self._stopped: float | None = None
        self._reported = self._started

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @property
    def passed(self) -> bool:
        now = clock.now()
        if self._stopped is None and self._stop is not None and self._stop.is_set():
            self._stopped = now
        ended = self._stopped is not None and now - self._stopped > GRACE_S
        return ended or now - self._started > self._timeout_s

    def wait(self, done: threading.Event) -> bool:
        """Wait until the call is `done`, reporting one that lasts. False when the limit has passed before."""
        while not done.wait(min(0.2, self._timeout_s / 4)):
            if self.passed:
                return False
            now = clock.now()
            if now - self._reported > REPORT_S or (self._stopped and self._reported < self._stopped):
                self._reported = now
                ending = " (this process ends)" if self._stopped else ""
                text = "%s has not returned after %.0f s%s"
                logger.warning(
                    text,
                    self._what,
                    now - self._started,
                    ending,
                    extra=log_fields("call_slow", role=self._what),
                )
        return True

    def error(self) -> HungError | Stopped:
        seconds = clock.now() - self._started
        if self._stopped is not None:
            return Stopped(f"{self._what} was given up after {seconds:.1f} s, because this process ends")
        return HungError(f"{self._what} did not return within {seconds:.1f} s: bound what it waits for")


#: Of the call that the main thread is in.
_current: _Limit | None = None


def _on_signal(*_: Any) -> None:
    if _current is not None and _current.passed:
        raise _OverdueError


def _call_with_signals(call: Callable[[], T], limit: _Limit) -> T:
    """Call on the main thread; signals raise _OverdueError inside the call. Raises as `call_within`."""
    global _current
    if signal.getsignal(SIGNAL) is not _on_signal:
        signal.signal(SIGNAL, _on_signal)  # never restored: a late signal must find it
    main, done = threading.get_ident(), threading.Event()

    def watch() -> None:
        if not limit.wait(done):
            while not done.is_set():
                signal.pthread_kill(main, SIGNAL)
                done.wait(REPEAT_S)

    threading.Thread(target=watch, name="streamadv-watch", daemon=True).start()
    try:
        _current = limit
        signal.setitimer(signal.ITIMER_VIRTUAL, limit.timeout_s, REPEAT_S)
        try:
            return call()
        finally:
            _current = None
            done.set()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OverdueError:
        raise limit.error() from None


def _call_in_thread(call: Callable[[], T], limit: _Limit) -> T:
    """Call in a thread of its own, and stop waiting for it when its time is over. Raises as `call_within`."""
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised below, where it was called
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=body, name="streamadv-call", daemon=True)
    thread.start()
    if not limit.wait(done):
        # Ends a loop of Python code. A system call that waits is not interrupted.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_OverdueError)
        )
        raise limit.error()
    if errors:
        raise errors[0]
    return results[0]
