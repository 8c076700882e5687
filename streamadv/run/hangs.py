"""Calls of a user's function that end in bounded time, also when the function does not.

On the main thread the call is interrupted: a timer of the process's own CPU time reaches also code that never lets
another thread run (a regular expression gone wild), a signal from a watching thread what sleeps. On another thread
the call runs in a thread of its own, which is left behind.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ..errors import HungError
from ..messages import log_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a call may go on when its process is to end.
GRACE_S: Final = 5.0
#: A call that lasts longer is spoken of, so often.
TELL_S: Final = 30.0
#: Nobody else's: SIGALRM belongs to the functions themselves, some of which bound their own time with it.
SIGNAL: Final = signal.SIGVTALRM
REPEAT_S: Final = 1.0  # a function may catch whatever interrupts it


def call_within(call: Callable[[], T], timeout_s: float, what: str, stop: threading.Event | None = None) -> T:
    """`call()`. Raises HungError after `timeout_s`, Stopped GRACE_S after `stop` was set; `what` is for messages."""
    limit = _Limit(timeout_s, what, stop)
    on_main = threading.current_thread() is threading.main_thread()
    return _interrupted(call, limit) if on_main else _abandoned(call, limit)


class Stopped(BaseException):
    """The process is to end, and a call was given up for that: no fault of the function's."""


class _OverdueError(BaseException):
    """Raised in the midst of a call that takes too long; `except Exception` of the function lets it pass."""


class _Limit:
    def __init__(self, timeout_s: float, what: str, stop: threading.Event | None) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._stop = stop
        self._started = time.monotonic()
        self._stopped: float | None = None
        self._told = self._started

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @property
    def passed(self) -> bool:
        now = time.monotonic()
        if self._stopped is None and self._stop is not None and self._stop.is_set():
            self._stopped = now
        ended = self._stopped is not None and now - self._stopped > GRACE_S
        return ended or now - self._started > self._timeout_s

    def wait(self, done: threading.Event) -> bool:
        """Until `done`: True; or until the limit has passed: False."""
        while not done.wait(min(0.2, self._timeout_s / 4)):
            if self.passed:
                return False
            now = time.monotonic()
            if now - self._told > TELL_S or (self._stopped and self._told < self._stopped):
                self._told = now
                ending = " (this process is to end)" if self._stopped else ""
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
        seconds = time.monotonic() - self._started
        if self._stopped is not None:
            return Stopped(f"{self._what} was given up after {seconds:.1f} s, as this process is to end")
        return HungError(f"{self._what} did not return within {seconds:.1f} s: bound what it waits for")


_current: _Limit | None = None  # of the call that the main thread is in


def _on_signal(*_: Any) -> None:
    if _current is not None and _current.passed:
        raise _OverdueError


def _interrupted(call: Callable[[], T], limit: _Limit) -> T:
    global _current
    if signal.getsignal(SIGNAL) is not _on_signal:
        signal.signal(SIGNAL, _on_signal)  # for good: a late signal must find it
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


def _abandoned(call: Callable[[], T], limit: _Limit) -> T:
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
        # Ends a loop of Python code; what waits in a call of the system stays until that returns.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_OverdueError)
        )
        raise limit.error()
    if errors:
        raise errors[0]
    return results[0]
