"""Where a process starts a thread, waits, draws a name or opens a connection: `streamadv.testing` takes these over.

`clock.now` is the door of time. What is not listed here never lasts: a lock that is held during a request is `RLock` of
this module, and every other one is `threading`'s. Files that are whole or not there are written here, too, and locks
are renewed in forked children.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T", bound=Any)

Event = threading.Event
Thread = threading.Thread
RLock = threading.RLock
Queue = queue.Queue
SimpleQueue = queue.SimpleQueue
#: Seconds since 1970.
wall = time.time
#: The bytes of a name that nobody else has.
random_bytes = os.urandom
#: Options of redis-py's clients, blocking and of asyncio.
client_options: dict[str, Any] = {}
async_client_options: dict[str, Any] = {}


#: What `sleep` does: functions have that as a default, which stays when this is replaced.
pause = time.sleep


def sleep(seconds: float) -> None:
    """Do nothing for so long."""
    pause(seconds)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path`: what the block writes there is on the disk before it gets its name; else it is removed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file or a folder on the disk before anything that relies on it. What is neither is left alone."""
    if path.is_file() or path.is_dir():
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


#: Locks that a forked child finds free: the thread that held one at the fork is not in the child.
_renewed: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def renewed_at_fork(lock: T) -> T:
    """The same lock, condition or event of `threading`; in each forked child it begins anew, with nobody in it."""
    if hasattr(lock, "_at_fork_reinit"):  # what `streamadv.testing` puts in its place is never forked
        _renewed.add(lock)
    return lock


def _renew() -> None:
    for lock in list(_renewed):
        lock._at_fork_reinit()  # as threading and logging do it with theirs


os.register_at_fork(after_in_child=_renew)
