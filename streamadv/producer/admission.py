"""Admission: asks whether a group may begin, waits for it, and withdraws groups whose callers no longer wait.

The script decides: `lua/lib/admit.lua`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from weakref import WeakSet

from redis.exceptions import ResponseError

from .. import doors, metrics, tracing
from ..errors import GroupEndedError
from ..messages import check_number, log_fields, one_line, whole_number
from ..prompts.spec import PREFIX
from ..run.manifest import MAX_DEADLINE_S
from ..store.reasons import Reason
from ..store.replies import as_count
from ..store.retry import Outage
from ..store.scripts import ScriptCall, script_call
from ..store.waiting import Blocked, Wait
from ..trajectory.schema import Role
from .announcements import Lines, Place
from .membership import Membership
from .requests import (
    NO_ROOM,
    OUT_OF_MEMORY,
    STAGE,
    AdmissionPause,
    GroupCall,
    Pause,
    Reply,
    Steps,
    busy_error,
    check_group_reply,
    is_over_share,
    refusal,
)
from .resend import ResendWindow
from .tickets import GroupRequest, GroupSpec, PushResult, Ticket, check_group, new_group_id

MAX_AHEAD: Final = 63


class Ahead:
    """The groups of one iterator that are begun and not asked for."""

    def __init__(self, admission: Admission, request: GroupRequest, ahead: int) -> None:
        """Raises SettingError for what is no `ahead`."""
        self._admission, self._request = admission, request
        self._ahead = whole_number("ahead", ahead, 0, MAX_AHEAD)
        self._call = BeginCall()
        self._tickets: deque[Ticket] = deque()
        admission.ahead.add(self)

    def begin(self) -> Steps[Ticket]:
        """The first ticket of the next group: at once if it is begun already, else as `Admission.begin`."""
        if not self._tickets:
            self._call = BeginCall()
            self._tickets += yield from self._admission.begin(self._request, self._call, 1 + self._ahead)
        return self._tickets.popleft()

    def forget(self) -> None:
        """They are those of the process that this one is a copy of."""
        self._tickets.clear()

    def leave(self) -> None:
        """Nobody will ask for them: `withdraw` undoes them."""
        while self._tickets:
            self._admission.leave_unclaimed(self._call, self._tickets.pop().group_id)


logger = logging.getLogger(__name__)

#: First wait for admission: about the time that a fast trainer takes for a batch.
ADMISSION_WAIT_S: Final = 0.005


@dataclass(slots=True)
class BeginCall:
    """One call of `begin`: by its nonce the server knows which groups it opened."""

    nonce: str = field(default_factory=lambda: doors.random_bytes(8).hex())
    others: Sequence[str] = ()  # ids of the further groups it asks for


class Admission:
    """How a producer's groups are admitted."""

    def __init__(self, membership: Membership, resend: ResendWindow) -> None:
        self._membership = membership
        self._resend = resend
        self._not_admitted = Blocked(membership.who, "not admitted", membership.run)  # of all threads, tasks
        self.lines = Lines()
        self._unannounced = Outage(STAGE, membership.run)
        self._has_warned_unpaced = False
        self._has_said_sizes = False
        # Begins to undo, whose callers no longer wait: (nonce, group id).
        self.unclaimed: set[tuple[str, str]] = set()
        self.ahead: WeakSet[Ahead] = WeakSet()  # what iterators have begun and nobody has asked for yet

    def begin(self, request: GroupRequest, call: BeginCall, count: int = 1) -> Steps[list[Ticket]]:
        """Admit up to `count` groups and return their first tickets: one at least.

        Waits up to `request.timeout` seconds (None = for ever) for the first one, and not for the others. Raises Busy,
        GroupEndedError, RunEndedError, TrajectoryError, SettingError.
        """
        spec, has_given_id = self.check(request), request.group_id is not None
        return (yield from self.admit(spec, request.timeout, call, count, has_given_id))

    def admit(
        self,
        spec: GroupSpec,
        timeout: float | None,
        call: BeginCall,
        count: int = 1,
        has_given_id: bool = True,
    ) -> Steps[list[Ticket]]:
        """`begin` for a group that was checked. has_given_id: else it may get another id."""
        since = tracing.now()
        yield from self._membership.reopen()
        yield from self.withdraw()
        wait = self.admission_wait(timeout)
        with closing(Place()) as place:
            while True:
                spec, reply = yield from self._ask_to_begin(spec, call, has_given_id, count)
                if reply[0] in (b"ok", b"open"):
                    break
                if reply[0] == b"ended":
                    raise GroupEndedError(
                        f"group {spec.group_id} has ended: a run has each group_id once, begin another one under "
                        "another id"
                    )
                if (
                    reply[0] == b"mismatch"
                    and spec.group_id.startswith(PREFIX)
                    and spec.size != int(reply[1])
                ):
                    size = int(reply[1])  # begun with another size, before a restart
                    spec = spec._replace(size=size, slots=size + spec.slots - spec.size)
                    continue
                check_group_reply(reply, spec)
                shard = self._membership.shard_of(spec.group_id)
                reason = refusal(reply, shard if self._membership.shards > 1 else None)
                wait.because(reason)
                if wait.expired:
                    raise busy_error(reason, self._membership.run, timeout)
                with metrics.wait(STAGE):
                    yield from self._await_room(wait.delay(), reply, shard, spec.role, place)
                spec = spec if has_given_id else spec._replace(group_id=new_group_id())
        wait.over()
        if self._membership.closed:
            self.leave_unclaimed(call, spec.group_id, *call.others)
            self._membership.check_open()
        tickets = self._first_tickets(spec, call, reply)
        ids = (ticket.group_id for ticket in tickets)
        tracing.record(tracing.BEGIN, self._membership.run, ids, since, rollouts=spec.size)
        return tickets

    def _await_room(self, seconds: float, reply: Reply, shard: int, role: str, place: Place) -> Steps[None]:
        """The pause after a refusal, in line with those who wait for the same."""
        if reply is OUT_OF_MEMORY:  # it knows of no announcement: one from before would end the pause
            yield Pause(seconds)
            return
        self.lines.join(place, (shard, role))
        stream = self._membership.manifest.keys.shards[shard].admission
        try:
            yield AdmissionPause(seconds, stream, bytes(reply[-1]) or b"0-0", place)
        except ResponseError as error:  # nobody may read it, or it is no stream
            self._unannounced.because(Reason("unannounced", one_line(str(error))))
            yield Pause(seconds)

    def check(self, request: GroupRequest) -> GroupSpec:
        """What all rollouts of the group share. Raises as `check_group`."""
        manifest = self._membership.manifest
        # Every rollout of an evaluation counts, unless the caller wants spare ones.
        default = 0 if request.role == Role.EVAL else manifest.redundancy
        return check_group(request, default if request.redundancy is None else request.redundancy)

    def _ask_to_begin(
        self, spec: GroupSpec, call: BeginCall, has_given_id: bool, count: int
    ) -> Steps[tuple[GroupSpec, Reply]]:
        """Ask for admission once.

        If the shard has its share of the groups ahead, a group without a given id moves to the shard with the fewest.
        """
        if spec.role != Role.EVAL:  # which nothing paces
            self._warn_if_unpaced()
        reply = yield from self._begin(spec, call, count)
        if self._membership.shards > 1 and is_over_share(reply):
            counts = yield from self._membership.groups_ahead()
            if not has_given_id:
                spec = spec._replace(group_id=self._new_id_in(counts.index(min(counts))))
            groups_elsewhere = sum(counts) - counts[self._membership.shard_of(spec.group_id)]
            reply = yield from self._begin(spec, call, count, groups_elsewhere)
        return spec, reply

    def _begin(
        self, spec: GroupSpec, call: BeginCall, count: int, groups_elsewhere: int | None = None
    ) -> Steps[Reply]:
        shard = self._membership.shard_of(spec.group_id)
        call.others = [self._new_id_in(shard) for _ in range(count - 1)]
        try:
            request = GroupCall(partial(self._begin_call, spec, call, groups_elsewhere))
            reply: Reply = yield request
            while reply[0] == b"layout":  # the shard does not know how many the run has
                yield from self._membership.confirm_layout()
                reply = yield request
            return reply
        except BaseException:  # also when the steps are closed: no reply has come, and the groups may be open
            self.leave_unclaimed(call, spec.group_id, *call.others)
            raise

    def _begin_call(self, spec: GroupSpec, call: BeginCall, groups_elsewhere: int | None) -> ScriptCall:
        """One attempt to open groups. groups_elsewhere: groups that count in the other shards."""
        keys = self._membership.keys_of(spec.group_id)
        budget = self.budget_for_new(spec.group_id)
        arguments = self._membership.group_arguments(spec, budget, groups_elsewhere)
        known = self._membership.weights
        arguments += [call.nonce, "" if known is None else known.version, *call.others]
        others = [keys.group(group_id) for group_id in call.others]
        return script_call("begin", keys, arguments, group=spec.group_id, others=others)

    def _first_tickets(self, spec: GroupSpec, call: BeginCall, reply: Reply) -> list[Ticket]:
        """The tickets of slot 0 of the groups that a reply of `begin` says are open."""
        _, epoch, version, slots, slot_bytes, weights, others = reply
        self._membership.note_weights(weights)
        self._say_sizes(as_count(slot_bytes))
        self._membership.version = model_version = as_count(version)
        counts = (spec.size, int(slots), as_count(epoch), model_version)
        shared = (spec.data_source, dict(spec.metadata), spec.role)
        terms = (spec.deadline_s, spec.round, spec.columns)
        first = Ticket(spec.group_id, 0, *counts, *shared, *terms)
        return [first, *(replace(first, group_id=group_id) for group_id in call.others[:others])]

    def admission_wait(self, timeout: float | None) -> Wait:
        """The wait of a new group for admission, so many seconds at most."""
        return Wait(self._not_admitted, timeout=timeout, base=ADMISSION_WAIT_S)

    def wait_for_room(self, wait: Wait, reason: Reason) -> Steps[None]:
        """One pause of such a wait."""
        wait.because(reason)
        delay = wait.delay()
        with metrics.wait(STAGE):
            yield Pause(delay)

    def budget_for_new(self, group_id: str) -> int:
        """The byte budget for a group that may be new: none while its shard has no room for groups that it has lost.

        Those were admitted before. After new groups they might have to wait until this producer ends, and be lost.
        """
        is_behind = self._membership.shard_of(group_id) in self._resend.behind
        return NO_ROOM if is_behind else self._membership.max_bytes

    def _new_id_in(self, shard: int) -> str:
        while self._membership.shard_of(group_id := new_group_id()) != shard:
            pass
        return group_id

    def leave_unclaimed(self, call: BeginCall, *group_ids: str) -> None:
        """Note that nobody waits for groups that this call may have opened: `withdraw` undoes them."""
        self.unclaimed.update((call.nonce, group_id) for group_id in group_ids)

    def withdraw(self) -> Steps[None]:
        """Undo the opening of groups by calls whose callers no longer wait."""
        for nonce, group_id in sorted(self.unclaimed):
            yield self.withdrawal(group_id, nonce)
            self.unclaimed.discard((nonce, group_id))

    def withdrawal(self, group_id: str, nonce: str) -> ScriptCall:
        """Of a group that a call has begun; its reply is 0 if somebody else has it, or a slot is filled."""
        return script_call("withdraw", self._membership.keys_of(group_id), [group_id, nonce], group=group_id)

    def touch(self, group_id: str, deadline_s: float | None) -> Steps[bool]:
        """Extend the group's deadline; False when the group has ended."""
        shard = self._membership.shard_of(group_id)
        check_number("deadline_s", deadline_s, "seconds", most=MAX_DEADLINE_S, or_none=True)
        milliseconds = round((deadline_s or self._membership.manifest.group_deadline_s) * 1000)
        result = yield from self._resend.send(shard, self._touch, group_id, milliseconds)
        return bool(result.codes)

    def _touch(self, group_id: str, milliseconds: int) -> Steps[PushResult]:
        args = [group_id, milliseconds, self._membership.owner]
        reply = yield script_call("touch", self._membership.keys_of(group_id), args, group=group_id)
        return PushResult(["touched"] * reply)

    def _say_sizes(self, slot_bytes: int) -> None:
        """Log once how many rollouts may be open. slot_bytes: what is reserved for one."""
        if self._has_said_sizes or not slot_bytes:
            return
        self._has_said_sizes = True
        limit, most = self._membership.max_bytes, self._membership.manifest.max_trajectory_bytes
        is_known = slot_bytes < most
        logger.info(
            "run %s: max_bytes %d%s holds %d open rollouts, as each reserves %d bytes: %s",
            self._membership.run,
            limit,
            " of a shard" * (self._membership.shards > 1),
            limit // slot_bytes,
            slot_bytes,
            "what the run's trajectories need" if is_known else "max_trajectory_bytes, until eight are known",
            extra=log_fields("reservation", run=self._membership.run, role="producer"),
        )

    def _warn_if_unpaced(self) -> None:
        manifest = self._membership.manifest
        paced = manifest.batch_groups is not None and manifest.max_staleness is not None
        if paced or self._membership.version is not None or self._has_warned_unpaced:
            return
        self._has_warned_unpaced = True
        logger.warning(
            "run %s has no trainer yet: until one starts only max_bytes (%d) limits how many groups are begun, "
            "all at version 0; `streamadv runs create --batch-groups N --max-staleness N --run %s` paces them until "
            "then",
            self._membership.run,
            self._membership.max_bytes * self._membership.shards,
            self._membership.run,
            extra=log_fields("unpaced", run=self._membership.run, role="producer"),
        )
