"""The producer for blocking code."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from .. import doors
from ..errors import ProducerClosedError, RunEndedError, StreamadvError
from ..run.manifest import RunSettings
from ..settings import run_name
from ..store.connection import AsyncConnection, Connection
from ..store.replies import as_int
from ..store.retry import RETRYABLE
from ..store.scripts import ScriptCall, run_script, run_transaction, server_ids
from ..trajectory.schema import Trajectory
from .admission import Ahead, await_room
from .base_group import Slots
from .group import Group, Rollout
from .logic import CLOSE_S, HEARTBEAT_ERRORS, LEAVE_S, BaseProducer, ProducerLogic
from .membership import Weights
from .prompted import PromptedGroups
from .requests import AdmissionPause, Attempt, Memory, Pause, ServerIds, Steps, T, attempts
from .resend import RESEND_WINDOW_S
from .tickets import GroupRequest, PushResult, Ticket

if TYPE_CHECKING:
    from .async_producer import AsyncProducer


class Producer(BaseProducer[Group, Iterator[Group], Iterator[tuple[Any, Group]]]):
    """Begins groups of one run and pushes their rollouts. Thread-safe.

    `with Producer(...)` gives this blocking producer, `async with Producer(...)` an `AsyncProducer` with the same
    methods. Calls wait while the server is away.

    Args:
        connection: a URL, or a Connection that is left open.
        run: name of the run; None = STREAMADV_RUN, else `default`. The first process of a run creates it.
        name: who this is among the run's producers, unique by default. A restarted producer of the same name takes the
            place of its predecessor, which goes on under another name if it is still there.
        settings: what this process wants the run to be created with.
        resend_window: seconds of pushes that are kept, at most 256 MiB, to be sent again to a server that comes back
            without its recent writes; 0 = none. Arrays are copied, but for columns of which one push brings 32 KiB or
            more: do not write into these meanwhile.
    """

    def __init__(
        self,
        connection: str | Connection,
        run: str | None = None,
        *,
        name: str | None = None,
        settings: RunSettings | None = None,
        resend_window: float = RESEND_WINDOW_S,
    ) -> None:
        run = run_name(run)
        self._connection = Connection.of(connection)
        self._owned = isinstance(connection, str)
        self._logic = ProducerLogic(run, name, settings, resend_window)
        self._closing = doors.renewed_at_fork(doors.Event())
        # A signal handler may make calls, also between two steps of one.
        self._calls = doors.renewed_at_fork(doors.RLock())
        self._under_way = 0
        self._idle = doors.renewed_at_fork(doors.Event())  # set once it is closed and no call is under way
        self._heart: threading.Thread | None = None

    def open(self) -> Self:
        """Connect, agree on the manifest, start the heartbeat. Done by `with`.

        Raises SettingError when the server refuses this user, password or certificate, ManifestMismatchError for a
        setting that differs from the run's.
        """
        self._logic.membership.check_open()
        try:
            self._connection.wait_until_ready()
            self._drive(self._logic.open())
        except BaseException:
            self._disconnect()
            raise
        self._start_heart()
        return self

    def _start_heart(self) -> None:
        self._heart = doors.Thread(target=self._live, name="streamadv-heartbeat", daemon=True)
        self._heart.start()

    def _keep_heart(self) -> None:
        """In a child of the process (fork), which has none of its threads, start the heartbeat again."""
        with self._calls:
            if self._heart is not None and not self._heart.is_alive() and self._logic.membership.is_forked:
                for groups in list(self._logic.admission.ahead):
                    groups.forget()
                for prompted in self._logic.prompted:
                    prompted.forget()
                self._logic.given.clear()
                self._logic.admission.lines.forget()
                self._start_heart()

    def close(self) -> None:
        """Send again what the server has lost, leave the list of producers unless it has finished, and disconnect.

        That takes LEAVE_S seconds at most; what is left undone then is logged. Calls of other threads that wait then,
        and all later ones, raise ProducerClosedError.
        """
        membership = self._logic.membership
        if self._heart is None or membership.closed:
            return
        membership.closed = True
        if membership.is_forked and not self._heart.is_alive():  # it has made no call here
            self._disconnect()
            return
        self._closing.set()
        self._logic.admission.lines.wake()
        try:
            self._heart.join(LEAVE_S)
        finally:
            self._heart = None
            self._logic.end()
            self._disconnect()

    def _disconnect(self) -> None:
        if self._owned:
            self._connection.close()

    def _begin(self, request: GroupRequest) -> Group:
        return Group(self, self._drive(self._logic.begin(request)))

    def _groups(self, ahead: Ahead) -> Iterator[Group]:
        try:
            while True:
                try:
                    ticket = self._drive(ahead.begin())
                except RunEndedError:
                    return
                yield Group(self, ticket)
        finally:
            ahead.leave()

    def _prompts(self, prompted: PromptedGroups) -> Iterator[tuple[Any, Group]]:
        try:
            while (found := self._drive(prompted.next())) is not None:
                yield found[0], prompted.given(Group(self, found[1]))
        finally:
            with suppress(StreamadvError, *RETRYABLE):
                self._drive(prompted.close(), patient=False)

    def push(self, trajectories: Sequence[Trajectory]) -> PushResult:
        """Push trajectories of one group; opens an unknown group.

        Waits while the server is above its maxmemory. Raises Busy if the group is unknown and not admitted now,
        TrajectoryError for a wrong trajectory.
        """
        return self._drive(self._logic.pushes.push_trajectories(trajectories))

    def push_many(
        self, groups: Sequence[Sequence[Trajectory]], *, timeout: float | None = None
    ) -> list[PushResult]:
        """`push` for several groups, each with its trajectories, in one round trip (at most 128 trajectories and 4 MB).

        Groups that are not admitted at once are pushed again until they are.

        Args:
            groups: of each group the trajectories.
            timeout: seconds to wait for admission; None = for ever, 0 = ask once.

        Raises TrajectoryError for a wrong trajectory before anything is pushed; after all others are pushed, Busy for a
        group not admitted within `timeout` and TrajectoryError for one that is open with another size, or has no slot
        for a rollout_index.
        """
        return self._drive(self._logic.pushes.push_many(groups, timeout))

    def rollout(self, ticket: Ticket) -> Rollout:
        """The rollout of a ticket, for instance one received from another process. Raises TrajectoryError."""
        self._keep_heart()
        slots = Slots.of_received(self._logic, ticket)
        return Rollout(self, slots, slots.ticket)

    def score(
        self,
        group_id: str,
        rollout_index: int,
        reward: float | None,
        rewards: Mapping[str, float] | None = None,
    ) -> str:
        """Bring the reward of a trajectory that was pushed without one; None = unscorable.

        rewards: named components. Returns 'scored', 'duplicate' (it had a reward), 'ended' (its group has ended) or
        'unknown' (no such group or slot). Raises TrajectoryError for a reward that is not finite.
        """
        return self._drive(self._logic.pushes.score(group_id, rollout_index, reward, rewards))

    def touch(self, group_id: str, deadline_s: float | None = None) -> bool:
        """Set the group's deadline to `deadline_s` seconds from now if that is later; False when it has ended.

        Default the run's group_deadline_s. Raises SettingError for what are no seconds.
        """
        return self._drive(self._logic.admission.touch(group_id, deadline_s))

    def model_version(self) -> int | None:
        """The newest version the trainer has published, None before there is a trainer. Asks the server."""
        membership = self._logic.membership
        membership.check_open()
        value = self._connection.scripts.hget(membership.manifest.keys.home.session, "version")
        return as_int(value)

    def wait_for_weights(self) -> Weights:
        """Wait until a trainer has said where weights lie, and return what `weights` has then: (version, URI).

        A trainer that opens the run with them, `queue.open(weights=URI)`, also paces the groups that are begun after
        it. Raises RunEndedError if the trainer has ended the run and named none.
        """
        return self._drive(self._logic.wait_for_weights())

    def finish(self) -> None:
        """This producer begins no more groups. When all have finished the run ends; a later push reopens it."""
        return self._drive(self._logic.finish())

    def _live(self) -> None:
        """Send heartbeats until the producer is closed, then leave. `close` may have given up waiting for that."""
        while not self._closing.wait(self._logic.until_heartbeat()):
            try:
                self._drive(self._logic.heartbeat(), patient=False)
            except HEARTBEAT_ERRORS as error:
                if self._logic.stops_heartbeat(error):
                    self._closing.wait()
        if self._under_way:
            self._idle.wait(CLOSE_S)
        with suppress(ProducerClosedError):
            self._drive(self._logic.leave(), patient=False, leaves=True)

    def _drive(self, steps: Steps[T], patient: bool = True, leaves: bool = False) -> T:
        """Carry out what the steps ask for: a call that `close` waits for. The last one to end disconnects once more.

        leaves: what a closed producer still has to say.
        """
        membership = self._logic.membership
        requests = attempts(steps, membership, patient=patient, leaves=leaves)
        reply: Any = None
        with self._calls:
            membership.check_open(leaves)
            heart = self._heart  # `close` may set it to None meanwhile
            if heart is not None and not heart.is_alive():
                self._keep_heart()
            self._under_way += 1
        try:
            while True:
                try:
                    request = requests.send(reply)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                try:
                    reply = self._carry_out(request)
                except Exception as error:
                    reply = error
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # without the frames of the client that it has interrupted
        finally:
            steps.close()
            with self._calls:
                self._under_way -= 1
                if membership.closed and not self._under_way:
                    if self._heart is None:
                        self._disconnect()
                    self._idle.set()

    def _carry_out(self, request: Attempt) -> Any:
        if isinstance(request, ScriptCall):
            return run_script(self._connection.scripts, request)
        if isinstance(request, Pause):
            return doors.sleep(request.seconds) if request.leaves else self._closing.wait(request.seconds)
        if isinstance(request, AdmissionPause):
            return await_room(self._connection, request, self._closing)
        if isinstance(request, Memory):
            return self._connection.memory()
        if isinstance(request, ServerIds):
            return server_ids(self._connection, request.shards)
        return run_transaction(self._connection, *request.transaction())

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncProducer:
        from .async_producer import AsyncProducer

        self._async_producer = await AsyncProducer(AsyncConnection(self._connection.url), self._logic).open()
        return self._async_producer

    async def __aexit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        await self._async_producer.close()
