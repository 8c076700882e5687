"""Admission: asks whether a group may begin, waits for it, and withdraws groups whose callers no longer wait.

The script decides: `lua/lib/admit.lua`. Nobody polls: the trainer announces in each shard that it may have made room.
Of a producer's callers that a shard has refused, the first one blocks on the shard's stream `admission`
(`lua/lib/announce.lua`) and then asks again; the others stand in line behind it. Nobody waits longer than its pause:
then it asks as well, so an announcement that is lost costs a pause.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import ceil
from typing import Final
from weakref import WeakSet

from redis.exceptions import ResponseError

from .. import clock, doors, metrics, tracing
from ..errors import GroupEndedError
from ..messages import check_number, log_fields, one_line, whole_number
from ..prompts.spec import PREFIX
from ..run.manifest import MAX_DEADLINE_S
from ..store.connection import AsyncConnection, Connection
from ..store.reasons import Reason
from ..store.replies import as_count
from ..store.retry import Outage
from ..store.scripts import ScriptCall, script_call
from ..store.waiting import Blocked, Wait
from ..trajectory.schema import Role
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

logger = logging.getLogger(__name__)

MAX_AHEAD: Final = 63
#: First wait for admission: about the time that a fast trainer takes for a batch.
ADMISSION_WAIT_S: Final = 0.005
#: Seconds of one read, at most: a producer that closes waits for its end.
BLOCK_S: Final = 0.5
#: Seconds between two reads: a server that does not block is not asked in a loop.
UNBLOCKED_S: Final = 0.01


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
            self._call, timeout = BeginCall(), self._request.timeout
            spec = check_group(self._request, self._admission._membership.manifest.redundancy)
            self._tickets += yield from self._admission.begin(
                spec, timeout, self._call, 1 + self._ahead, has_given_id=False
            )
        return self._tickets.popleft()

    def forget(self) -> None:
        """They are those of the process that this one is a copy of."""
        self._tickets.clear()

    def leave(self) -> None:
        """Nobody will ask for them: `withdraw` undoes them."""
        while self._tickets:
            self._admission.leave_unclaimed(self._call, self._tickets.pop().group_id)


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
        self.not_admitted = Blocked(membership.who, "not admitted", membership.run)  # of all threads, tasks
        self.lines = Lines()
        self._unannounced = Outage(STAGE, membership.run)
        self._has_warned_unpaced = False
        self._has_said_sizes = False
        # Begins to undo, whose callers no longer wait: (nonce, group id).
        self.unclaimed: set[tuple[str, str]] = set()
        self.ahead: WeakSet[Ahead] = WeakSet()  # what iterators have begun and nobody has asked for yet

    def begin(
        self,
        spec: GroupSpec,
        timeout: float | None,
        call: BeginCall,
        count: int = 1,
        has_given_id: bool = True,
    ) -> Steps[list[Ticket]]:
        """Admit up to `count` groups and return their first tickets: one at least.

        Waits up to `timeout` seconds (None = for ever) for the first one, and not for the others. spec: by
        `check_group`. has_given_id: else the group may get another id. Raises Busy, GroupEndedError, RunEndedError,
        TrajectoryError, SettingError.
        """
        since, membership = tracing.now(), self._membership
        yield from membership.reopen()
        yield from self.withdraw()
        wait = Wait(self.not_admitted, timeout=timeout, base=ADMISSION_WAIT_S)
        with closing(Place()) as place:
            while True:
                spec, reply = yield from self._ask(spec, call, has_given_id, count)
                if reply[0] in (b"ok", b"open"):
                    break
                if reply[0] == b"ended":
                    raise GroupEndedError(
                        f"group {spec.group_id} has ended: a run has each group_id once, begin another one under "
                        "another id"
                    )
                size = int(reply[1]) if reply[0] == b"mismatch" else spec.size
                if size != spec.size and spec.group_id.startswith(PREFIX):  # begun before a restart
                    spec = spec._replace(size=size, slots=size + spec.slots - spec.size)
                    continue
                check_group_reply(reply, spec)
                shard = membership.shard_of(spec.group_id)
                reason = refusal(reply, shard if membership.shards > 1 else None)
                wait.because(reason)
                if wait.expired:
                    raise busy_error(reason, membership.run, timeout)
                with metrics.wait(STAGE):
                    yield from self._await_room(wait.delay(), reply, shard, spec.role, place)
                spec = spec if has_given_id else spec._replace(group_id=new_group_id())
        wait.over()
        if membership.closed:
            self.leave_unclaimed(call, spec.group_id, *call.others)
            membership.check_open()
        return self._tickets(spec, call, reply, since)

    def _tickets(self, spec: GroupSpec, call: BeginCall, reply: Reply, since: int) -> list[Ticket]:
        """The first ticket of each group that the reply has admitted. since: when the call began."""
        membership = self._membership
        _, epoch, version, slots, slot_bytes, weights, others = reply
        membership.note_weights(weights)
        if not self._has_said_sizes and (reserved := as_count(slot_bytes)):
            self._say_sizes(reserved)
        membership.version = model_version = as_count(version)
        counts = (spec.size, int(slots), as_count(epoch), model_version)
        shared = (spec.data_source, dict(spec.metadata), spec.role)
        first = Ticket(spec.group_id, 0, *counts, *shared, spec.deadline_s, spec.round, spec.columns)
        ids = [spec.group_id, *call.others[:others]]
        tracing.record(tracing.BEGIN, membership.run, ids, since, rollouts=spec.size)
        return [first, *(replace(first, group_id=group_id) for group_id in ids[1:])]

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

    def _ask(
        self, spec: GroupSpec, call: BeginCall, has_given_id: bool, count: int
    ) -> Steps[tuple[GroupSpec, Reply]]:
        """Ask for admission once.

        If the shard has its share of the groups ahead, a group without a given id moves to the shard with the fewest.
        """
        membership = self._membership
        if spec.role != Role.EVAL and membership.version is None:  # nothing paces an evaluation
            self._warn_if_unpaced()
        groups_elsewhere: int | None = None  # not counted yet
        while True:
            shard = membership.shard_of(spec.group_id)
            call.others = [self._new_id_in(shard) for _ in range(count - 1)]
            try:
                request = GroupCall(partial(self._begin_call, spec, call, shard, groups_elsewhere))
                reply: Reply = yield request
                while reply[0] == b"layout":  # the shard does not know how many the run has
                    yield from membership.confirm_layout()
                    reply = yield request
            except BaseException:
                # Also when the steps are closed: no reply has come, and the groups may be open.
                self.leave_unclaimed(call, spec.group_id, *call.others)
                raise
            if groups_elsewhere is not None or membership.shards == 1 or not is_over_share(reply):
                return spec, reply
            counts = yield from membership.groups_ahead()
            if not has_given_id:
                spec = spec._replace(group_id=self._new_id_in(counts.index(min(counts))))
            groups_elsewhere = sum(counts) - counts[membership.shard_of(spec.group_id)]

    def _begin_call(
        self, spec: GroupSpec, call: BeginCall, shard: int, groups_elsewhere: int | None
    ) -> ScriptCall:
        """One attempt to open groups of a shard. groups_elsewhere: groups that count in the others."""
        keys = self._membership.manifest.keys.shards[shard]
        budget = self.budget_for_new(shard)
        arguments = self._membership.group_arguments(spec, budget, groups_elsewhere)
        known = self._membership.weights
        arguments += [call.nonce, "" if known is None else known.version, *call.others]
        others = [keys.group(group_id) for group_id in call.others]
        return script_call("begin", keys, arguments, group=spec.group_id, others=others)

    def pause_for_room(self, wait: Wait, reason: Reason) -> Steps[None]:
        """One pause of a push's wait for room, which nobody announces; reason: of the refusal."""
        wait.because(reason)
        delay = wait.delay()
        with metrics.wait(STAGE):
            yield Pause(delay)

    def budget_for_new(self, shard: int) -> int:
        """The byte budget for a group that may be new: none while its shard has no room for groups that it has lost.

        Those were admitted before. After new groups they might have to wait until this producer ends, and be lost.
        """
        return NO_ROOM if shard in self._resend.behind else self._membership.max_bytes

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
        """Log how many rollouts may be open. slot_bytes: what is reserved for one."""
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
        if self._has_warned_unpaced or None not in (manifest.batch_groups, manifest.max_staleness):
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


# Waits for announcements


@dataclass(eq=False, slots=True)
class Place:
    """A caller's place in a line, until `close`."""

    line: deque[Place] = field(default_factory=deque)
    wake: Callable[[], object] = bool  # ends its wait for its turn

    @property
    def is_first(self) -> bool:
        return self.line[0] is self

    def close(self) -> None:
        """Let the next one have its turn."""
        if self in self.line:
            self.line.remove(self)
        for first in list(self.line)[:1]:
            first.wake()


class Lines:
    """Who waits for the same room, in the order they came. Threads may share it."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[Place]] = {}

    def join(self, place: Place, room: Hashable) -> None:
        """Stand at the end of the line for this room, unless it stands there already."""
        line = self._lines.setdefault(room, deque())
        if place.line is not line:
            place.close()
            place.line = line
            line.append(place)

    def wake(self) -> None:
        """End all waits for a turn."""
        for place in list(chain(*self._lines.values())):
            place.wake()

    def forget(self) -> None:
        """Who stands there is a thread of the process that this one is a copy of."""
        self._lines.clear()


def await_room(connection: Connection, pause: AdmissionPause, closing: threading.Event) -> None:
    """Return when the pause is over; of the first in line also once there is an announcement."""
    place, rest, turn = pause.place, pause.seconds, doors.Event()
    place.wake = turn.set
    if not place.is_first:
        since = clock.now()
        turn.wait(rest)
        rest -= clock.now() - since
    while place.is_first and rest > 0 and not closing.is_set():
        block_ms = ceil(min(rest, BLOCK_S) * 1000)
        if connection.blocking(block_ms).xread({pause.stream: pause.after}, count=1, block=block_ms):
            return
        closing.wait(UNBLOCKED_S)
        rest -= BLOCK_S


async def await_room_async(
    connection: AsyncConnection, pause: AdmissionPause, over: asyncio.Future[None]
) -> None:
    """As `await_room`. over: done once the producer is closed."""
    place, rest, turn = pause.place, pause.seconds, asyncio.Event()
    place.wake = turn.set
    if not place.is_first:
        since = clock.now()
        with suppress(TimeoutError):
            await asyncio.wait_for(turn.wait(), rest)
        rest -= clock.now() - since
    while place.is_first and rest > 0 and not over.done():
        block_ms = ceil(min(rest, BLOCK_S) * 1000)
        if await connection.blocking.xread({pause.stream: pause.after}, count=1, block=block_ms):
            return
        await asyncio.wait({over}, timeout=UNBLOCKED_S)
        rest -= BLOCK_S
