"""Prefetch for `Producer.groups`: the push that completes one group also asks to begin the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.exceptions import NoScriptError

from .. import tracing
from ..forks import renewed_at_fork
from ..store.calls import Companion
from ..store.scripts import ScriptCall
from .admission import Admission, BeginCall
from .checks import GroupRequest
from .encode import Push
from .group_columns import ColumnsPush
from .requests import GroupCall, Steps, T
from .tickets import GroupSpec, Ticket


class _Asked:
    """A group that was asked for with a push, and what has come of it."""

    def __init__(self, admission: Admission, spec: GroupSpec) -> None:
        self._admission = admission
        self._spec = spec
        self._call = BeginCall()
        self._lock = renewed_at_fork(threading.Lock())
        self._is_answered = False
        self.since = tracing.now()

    def companion(self) -> Companion:
        return Companion(self._admission.begin_call(self._spec, self._call), self._hear)

    def _hear(self, reply: Any) -> None:
        with self._lock:
            # A call without its script is not executed; it is asked by text, if at all.
            if self._is_answered or isinstance(reply, NoScriptError):
                return
            self._is_answered = True
            is_error = isinstance(reply, BaseException)  # it may be open, or not
            if not is_error and reply[0] not in (b"ok", b"open"):
                return
            if self._call.wanted and not is_error:
                self._admission.keep_ahead(self._call, self._admission.first_ticket(self._spec, reply))
            else:
                self.withdraw()

    def take(self) -> Ticket | None:
        """The first ticket if it has come, once; a group that is opened later is withdrawn."""
        with self._lock:
            self._call.wanted = False
            return self._admission.take_ahead(self._call)

    def withdraw(self) -> None:
        self._admission.leave_unclaimed(self._call, self._spec.group_id)


class NextGroup:
    """Groups that are begun one after another, each asked for with a push if there is one. Threads may share it.

    A refusal costs the push nothing: `begin` asks again, and waits. A group that was opened and not taken is withdrawn.
    """

    def __init__(self, admission: Admission, request: GroupRequest) -> None:
        self._admission = admission
        self._request = request
        self._lock = renewed_at_fork(threading.Lock())
        self._asked: _Asked | None = None
        self._is_closed = False

    def begin(self) -> Steps[Ticket]:
        """The first ticket of the next group: at once if a push has brought it, else as `Admission.begin`."""
        asked = self._forget()
        if asked is not None and (ticket := asked.take()) is not None:
            return self._admission.traced(ticket, asked.since)
        return (yield from self._admission.begin(self._request))

    def close(self) -> None:
        """Nobody wants a next group, also not with the pushes of groups that are still played."""
        self._is_closed = True
        asked = self._forget()
        if asked is not None and asked.take() is not None:
            asked.withdraw()

    def with_prefetch(self, steps: Steps[T]) -> Steps[T]:
        """The same steps; their first push also asks for the next group."""
        reply: Any = None
        try:
            while True:
                try:
                    request = steps.send(reply)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                if isinstance(request, GroupCall):
                    request = GroupCall(partial(self._with_companion, request.make))
                reply = yield request
        finally:
            steps.close()

    def _with_companion(
        self, make: Callable[[], ScriptCall | Push | ColumnsPush]
    ) -> ScriptCall | Push | ColumnsPush:
        attempt = make()
        if not isinstance(attempt, Push):
            return attempt
        with self._lock:
            if self._asked is not None or self._is_closed:
                return attempt
            asked = self._asked = _Asked(self._admission, self._admission.check(self._request))
        return attempt._replace(companion=asked.companion())

    def _forget(self) -> _Asked | None:
        with self._lock:
            asked, self._asked = self._asked, None
            return asked
