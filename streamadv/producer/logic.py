"""What blocking and asyncio producers share: the parts of one without I/O, and how a caller asks for a group."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

from .. import clock, metrics
from ..errors import ManifestMismatchError, ProducerClosedError, RunEndedError, SettingError, StreamadvError
from ..messages import brief, log_fields
from ..prompts.prompts import Prompts
from ..run.heartbeats import HEARTBEAT_S
from ..run.manifest import RunSettings
from ..store.reasons import Reason
from ..store.retry import SERVER_ERRORS, server_reason
from ..store.waiting import Blocked, Wait
from .admission import Admission, Ahead, BeginCall
from .failures import Failures
from .membership import Membership, Weights
from .prompted import Given, PromptedGroups
from .push import Pushes
from .requests import LOST_GROUPS_FIRST, NO_WEIGHTS, STAGE, Pause, Steps
from .resend import ResendWindow
from .tickets import GroupRequest, Ticket, check_group

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
        call, columns, has_given_id = BeginCall(), None, request.group_id is not None
        if request.columns is not None:
            columns = yield from self.pushes.encode_columns(request.columns)
        spec = check_group(request._replace(columns=columns), self.membership.manifest.redundancy)
        [ticket] = yield from self.admission.begin(spec, request.timeout, call, has_given_id=has_given_id)
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
            level = logging.DEBUG if self._has_failed else logging.WARNING
            self._has_failed = True
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
        unsent = self._resend.kept
        if self._unheard is LOST_GROUPS_FIRST:
            unsent = self._resend.behind.total() + self._resend.missed
        logger.warning(
            "producer %s leaves run %s unheard: %s; calls that nobody sends again if the server has lost them: %d; "
            "groups that nobody plays, open until their deadline: %d",
            self.membership.name,
            self.membership.run,
            self._unheard.text,
            unsent,
            len(self.admission.unclaimed),
            extra=log_fields("left_unheard", run=self.membership.run, role="producer"),
        )


GroupT = TypeVar("GroupT")
GroupsT = TypeVar("GroupsT")
PromptedT = TypeVar("PromptedT")


class BaseProducer(Generic[GroupT, GroupsT, PromptedT]):
    """What the two kinds of producer share. GroupT, GroupsT, PromptedT: what its ways to begin groups return."""

    _logic: ProducerLogic

    def __repr__(self) -> str:
        member = self._logic.membership
        state = "closed" if member.closed else "finished" if member.finished else "open"
        if not member.is_joined and state == "open":
            state = "not connected"
        return f"{type(self).__name__}(run={member.run!r}, name={member.name!r}, version={member.version}, {state})"

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._logic.membership.run

    def begin_group(
        self,
        size: int,
        *,
        group_id: str | None = None,
        data_source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        redundancy: int | None = None,
        timeout: float | None = None,
        role: str = "train",
        round: str | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> GroupT:
        """Admit a group of `size` rollouts of one prompt, and get its tickets.

        Waits while the run is at its byte budget or as far ahead as max_staleness allows. An open `group_id` gives its
        tickets again.

        Args:
            size: usable rollouts that make the group complete, 1 to 4096.
            group_id: unique in the run, at most 200 characters without spaces; default a UUIDv7.
            data_source: name of the data set, for metrics; at most 200 characters.
            metadata: a small JSON object that all rollouts of the group carry; at most 64 KiB.
            deadline_s: seconds from now after which the group ends with what it has; default the run's
                group_deadline_s.
            redundancy: rollouts beyond `size`; the first `size` usable ones count. Default the run's.
            timeout: seconds to wait for admission; None = for ever, 0 = ask once.
            role: train, or eval: its rollouts measure a policy version and are never trained on. Evaluation groups
                count in the byte budget and not in pacing; `streamadv evals` has what they show.
            round: of role eval: the name of the round that the group is part of, such as "step-100", at most 200
                characters without spaces. What a round shows stays together, whatever versions its groups were played
                with; without a name it is split by version.
            columns: extra columns that all rollouts of the group share, such as the images of its prompt: name -> array
                of any shape. They are stored once, and delivered as `mb.extras[name]` for each row of the group that
                was pushed without a column of this name. At most max_trajectory_bytes together.

        Raises:
            Busy: not admitted within `timeout`.
            GroupEndedError: `group_id` names a group that has ended.
            RunEndedError: the trainer has ended the run. Evaluation groups are admitted nevertheless.
            TrajectoryError, SettingError: a wrong argument, or a group larger than the run's whole byte budget.
        """
        return self._begin(
            GroupRequest(
                size, group_id, data_source, metadata, deadline_s, redundancy, timeout, role, round, columns
            )
        )

    #: `begin_group` for use in a with block: on leaving it, rollouts not pushed are failed.
    group = begin_group

    def groups(
        self,
        size: int,
        *,
        data_source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        redundancy: int | None = None,
        timeout: float | None = None,
        role: str = "train",
        round: str | None = None,
        ahead: int = 0,
    ) -> GroupsT:
        """Groups until the trainer ends the run, each begun as by `begin_group` when the iterator is asked for it.

        A group that was begun ahead and not asked for is withdrawn with the next heartbeat at the latest, once the
        iterator is closed or forgotten.

        Args:
            ahead: groups begun before they are asked for, at most 63: one call begins 1 + `ahead`, as many as are
                admitted, and the next one follows when all are taken. For loops that play several groups at once, or
                very short ones: a group has its deadline, and counts in pacing, from its beginning on.

        The other arguments, and what a step raises, are those of `begin_group`.
        """
        request = GroupRequest(
            size, None, data_source, metadata, deadline_s, redundancy, timeout, role, round
        )
        return self._groups(Ahead(self._logic.admission, request, ahead))

    def prompts(
        self,
        prompts: Prompts,
        size: int = 8,
        *,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        redundancy: int | None = None,
        timeout: float | None = None,
    ) -> PromptedT:
        """Pairs of a prompt and its group, until each prompt has ended in each epoch, and with them the run.

        A prompt ends once the trainer has committed its group, a filter (zero variance, difficulty) has dropped it, or
        it is given up: its group ended otherwise, and `retries` more did too. Until then it is played again, by any
        producer of the run that iterates; what a producer leased that dies is there for the others after 30 s. So the
        iterator waits at the end until the trainer has saved its last checkpoint. All producers give the same prompts.

        The group has the id `prompt:<name>:<source>:<epoch>:<index>:<try>`, the source as `data_source`, and `prompt`
        (its index) and `epoch` in its metadata. Arguments and errors are those of `begin_group`; SettingError is also
        raised for prompts that are not those of the run, and for metadata with `prompt` or `epoch`.
        """
        if not isinstance(prompts, Prompts):
            raise SettingError(f"prompts is {brief(prompts)}, needs streamadv.Prompts(...)")
        if isinstance(metadata, Mapping) and (taken := {"prompt", "epoch"} & metadata.keys()):
            raise SettingError(
                f"metadata has {brief(min(taken))}: the prompt's own stands there, use another name"
            )
        request = GroupRequest(size, None, None, metadata, deadline_s, redundancy, timeout)
        return self._prompts(PromptedGroups(self._logic, prompts, request))

    @property
    def weights(self) -> Weights | None:
        """Where the newest weights lie, if the trainer says so: `queue.trained(batch, weights=URI)`; else None.

        Asks nobody: it is as new as the group begun last, or else as the last heartbeat (10 s at most).
        """
        return self._logic.membership.weights

    @abstractmethod
    def _begin(self, request: GroupRequest) -> GroupT: ...

    @abstractmethod
    def _prompts(self, prompted: PromptedGroups) -> PromptedT: ...

    @abstractmethod
    def _groups(self, ahead: Ahead) -> GroupsT: ...
