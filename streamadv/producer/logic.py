"""The parts of a producer, without I/O; its heartbeat and its end."""

from __future__ import annotations

import logging
import math
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from .. import clock, metrics
from ..errors import ManifestMismatchError, ProducerClosedError, RunEndedError, StreamadvError
from ..messages import log_fields
from ..run.heartbeats import HEARTBEAT_S
from ..run.manifest import RunSettings
from ..store.reasons import Reason
from ..store.retry import SERVER_ERRORS, server_reason
from ..store.waiting import Blocked, Wait
from .admission import Admission, BeginCall
from .failures import Failures
from .membership import Membership, Weights
from .push import Pushes
from .requests import LOST_GROUPS_FIRST, NO_WEIGHTS, STAGE, Pause, Steps
from .resend import ResendWindow
from .tickets import GroupRequest, Ticket

if TYPE_CHECKING:
    from .prompted import Given, PromptedGroups

logger = logging.getLogger(__name__)

#: Seconds to the next heartbeat after a failed one, and while the server has no room for what it has lost.
CATCH_UP_S: Final = 1.0
#: Seconds that a closing producer gives to calls under way.
CLOSE_S: Final = 1.0
#: Groups that a closing producer gives back at most, one request each: the last ones.
GIVEN_KEPT: Final = 64
#: Seconds that closing a producer takes at most.
LEAVE_S: Final = 5.0
#: Seconds between two tries to leave, at most.
LEAVE_AGAIN_S: Final = 0.5
NO_ANSWER: Final = Reason("server_hangs", "the server has not answered")
#: What a heartbeat may raise.
HEARTBEAT_ERRORS: Final = (StreamadvError, *SERVER_ERRORS)


class ProducerLogic:
    """The state and the steps behind a `Producer` or an `AsyncProducer`. Threads and tasks may share it."""

    def __init__(
        self, run: str, name: str | None, settings: RunSettings | None, resend_window: float
    ) -> None:
        self.failures = Failures()
        self.membership = Membership(run, name, settings)
        self._resend = ResendWindow(resend_window)
        self.admission = Admission(self.membership, self._resend)
        self.pushes = Pushes(self.membership, self.admission, self._resend)
        self.prompted: list[PromptedGroups] = []  # iterators over prompts that may hold some
        # Groups of prompts that nobody may have begun to play.
        self.given: deque[Given] = deque(maxlen=GIVEN_KEPT)
        self._due = -math.inf  # the next heartbeat
        self._has_failed = False  # the one before
        self._unheard: Reason | None = NO_ANSWER  # why no server has heard that it leaves

    def open(self) -> Steps[None]:
        """Join the run and say so."""
        yield from self.membership.join()
        yield from self._attend()

    def begin(self, request: GroupRequest) -> Steps[Ticket]:
        """`Admission.begin`, and then the group's columns if it has some."""
        call, columns = BeginCall(), None
        if request.columns is not None:
            columns = yield from self.pushes.encode_columns(request.columns)
        [ticket] = yield from self.admission.begin(request._replace(columns=columns), call)
        if columns is None or not columns.size:
            return ticket
        try:
            yield from self.pushes.bring_columns(ticket, columns)
        except BaseException:  # nobody gets the ticket
            self.admission.leave_unclaimed(call, ticket.group_id)
            raise
        return ticket

    def heartbeat(self) -> Steps[None]:
        """What is done every few seconds: `_attend`, and find the byte budget."""
        self.failures.log()
        yield from self._attend()
        yield from self.membership.update_budget()

    def _attend(self) -> Steps[bool]:
        """Say that this producer is alive, send again what the servers have lost, say that it has finished or gone.

        The home shard hears of it before another server has to answer. Returns whether the servers have all they were
        sent: only then does the last word follow, because it lets the run end.
        """
        membership = self.membership
        self._due = clock.now() + HEARTBEAT_S
        yield from membership.send_heartbeat()
        manifest = yield from membership.agree()  # a setting that nobody had given may have been given since
        say_open = partial(membership.send_heartbeat, "open")
        has_all = yield from self._resend.check(manifest.keys.shards, first=say_open)
        if membership.finished or membership.closed:
            for groups in list(self.admission.ahead):
                groups.leave()
        for prompted in list(self.prompted):
            if membership.finished or membership.closed or prompted.is_left:
                yield from prompted.give_back()
        if membership.closed:
            yield from self._take_back()
        yield from self.admission.withdraw()
        leaves = membership.closed and membership.last_word == "serves"
        if has_all and membership.finished and not leaves:
            yield from membership.send_heartbeat(membership.last_word)
            if not membership.finished:  # its "open" may have come before that
                yield from membership.send_heartbeat("open")
        elif has_all and membership.closed:
            yield from membership.send_heartbeat("gone")
        self._has_failed = False
        if not has_all or not (membership.finished or membership.closed):
            return has_all
        # Another server may have got the last word: what it has lost is sent again first.
        return (yield from self._resend.are_same(manifest.keys.shards))

    def _take_back(self) -> Steps[None]:
        """Groups of prompts that nobody has begun to play are there for others. Others may be added meanwhile."""
        groups: dict[PromptedGroups, list[Given]] = {}
        for given in (found := list(self.given)):
            if given.slots is None or given.slots.is_untouched:
                groups.setdefault(given.prompted, []).append(given)
        for prompted, of in groups.items():
            yield from prompted.take_back(of)
        for given in found:
            with suppress(ValueError):  # another thread has done the same
                self.given.remove(given)

    def until_heartbeat(self) -> float:
        """Seconds to the next heartbeat, which also sends again what the server had no room for."""
        seconds = max(0.0, self._due - clock.now())
        # A server that was replaced has to hear of this producer within SETTLE_S.
        return min(seconds, CATCH_UP_S) if self._has_failed or self._resend.behind else seconds

    def stops_heartbeat(self, error: Exception) -> bool:
        """Log that a heartbeat failed. Returns True if every further one would fail as well."""
        if isinstance(error, ManifestMismatchError):
            logger.error(
                "producer %s stops: %s",
                self.membership.name,
                error,
                extra=log_fields("producer_stopped", run=self.membership.run, role="producer"),
            )
        elif not isinstance(error, ProducerClosedError):
            level, self._has_failed = logging.DEBUG if self._has_failed else logging.WARNING, True
            logger.log(
                level,
                "heartbeat of producer %s failed: %s",
                self.membership.name,
                error,
                extra=log_fields("heartbeat_failed", run=self.membership.run, role="producer"),
            )
            return False
        return True

    def wait_for_weights(self) -> Steps[Weights]:
        """Wait until a trainer has said where weights lie. Raises RunEndedError if it ends the run without."""
        wait = Wait(Blocked(self.membership.who, "no weights", self.membership.run))
        while self.membership.weights is None:
            yield from self.membership.send_heartbeat()
            if self.membership.weights is None:
                if self.membership.has_run_ended:
                    raise RunEndedError(
                        "the trainer has ended the run and named no weights: stop, or start a trainer on it again"
                    )
                wait.because(NO_WEIGHTS)
                with metrics.wait(STAGE):
                    yield Pause(wait.delay())
        wait.over()
        return self.membership.weights

    def finish(self) -> Steps[None]:
        """As its user says: no more groups will come from this producer, and nobody asks it for prompts."""
        for prompted in list(self.prompted):
            prompted.rest()
        yield from self.say_finished()

    def say_finished(self) -> Steps[None]:
        """Say that no more groups will come for now, once the server has all it was sent."""
        self.membership.finished = True
        wait = Wait(Blocked(self.membership.who, "not finished", self.membership.run))
        while not (yield from self._attend()):
            wait.because(LOST_GROUPS_FIRST)
            yield Pause(wait.delay())
        wait.over()

    def leave(self) -> Steps[None]:
        """Say goodbye as a closed producer: `_attend` until the servers have all, for LEAVE_S at most."""
        self.failures.log(now=True)
        if not self.membership.is_joined:
            self._unheard = None
        wait = Wait(
            Blocked(self.membership.who, "not gone", self.membership.run), timeout=LEAVE_S, cap=LEAVE_AGAIN_S
        )
        while self.membership.is_joined and not wait.expired:
            try:
                if (yield from self._attend()):
                    self._unheard = None
                    return
                self._unheard = LOST_GROUPS_FIRST
            except HEARTBEAT_ERRORS as error:
                self._unheard = server_reason(error)
            yield Pause(wait.delay(), leaves=True)

    def end(self) -> None:
        """Nothing more is sent: log what that leaves undone."""
        self.membership.left = True
        if self._unheard is None:
            return
        logger.warning(
            "producer %s leaves run %s unheard: %s; calls that nobody sends again if the server has lost them: %d; "
            "groups that nobody plays, open until their deadline: %d",
            self.membership.name,
            self.membership.run,
            self._unheard.text,
            self._resend.behind.total() + self._resend.missed
            if self._unheard is LOST_GROUPS_FIRST
            else self._resend.kept,
            len(self.admission.unclaimed),
            extra=log_fields("left_unheard", run=self.membership.run, role="producer"),
        )
