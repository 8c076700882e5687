"""Locks that a forked child finds free: the thread that held one at the fork is not in the child."""

from __future__ import annotations

import os
import weakref
from typing import Any, Final, TypeVar

T = TypeVar("T", bound=Any)

_renewed: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def renewed_at_fork(lock: T) -> T:
    """The same lock, condition or event of `threading`; in each forked child it begins anew, with nobody in it."""
    if hasattr(lock, "_at_fork_reinit"):  # what `doors` may put in its place is never forked
        _renewed.add(lock)
    return lock


def _renew() -> None:
    for lock in list(_renewed):
        lock._at_fork_reinit()  # as threading and logging do it with theirs


os.register_at_fork(after_in_child=_renew)
