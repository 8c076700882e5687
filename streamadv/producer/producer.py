"""The producer for blocking code: admission, tickets, push, fail, cancel, score, finish.

`with Producer(...)` blocks; `async with Producer(...)` gives the asyncio twin (`async_producer.py`) with the
same methods. What they do stands in `producing.py`. torch is not imported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from redis.exceptions import OutOfMemoryError

from ..errors import ManifestMismatchError, ProducerClosedError, StreamadvError
from ..run.heartbeats import HEARTBEAT_S
from ..run.manifest import RunSettings
from ..store.connection import AsyncConnection, Connection
from ..store.retry import RETRYABLE, Outage
from ..store.scripts import run_script, run_transaction, server_ids
from ..trajectory.schema import Trajectory
from .group import Group, Rollout
from .logic import ProducerLogic
from .membership import CLOSE_S, STAGE
from .places import Places
from .requests import Memory, Pause, Request, ServerIds, Steps, T, Transaction
from .resend import RESEND_WINDOW_S
from .tickets import PushResult, Ticket

if TYPE_CHECKING:
    from .async_producer import AsyncProducer

logger = logging.getLogger(__name__)


class Producer:
    """Pushes rollouts of one run.

    `connection` is a URL or a Connection; `settings` are what this process wants the run to be created with
    (see `manifest.py`). name: who this is among the run's producers; a restarted one of the same name takes its
    predecessor's place (default: unique). resend_window: seconds of pushes kept to be sent again when the server
    comes back without its last moments (0 = none). Thread-safe: every call is a self-contained exchange.
    """

    def __init__(
        self,
        connection: str | Connection,
        run: str = "default",
        *,
        name: str | None = None,
        settings: RunSettings | None = None,
        resend_window: float = RESEND_WINDOW_S,
    ) -> None:
        self._connection = Connection(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        self._logic = ProducerLogic(run, name, settings, resend_window)
        self._closing = threading.Event()
        self._calls = threading.Condition()
        self._under_way = 0
        self._heart: threading.Thread | None = None

    def open(self) -> Self:
        """Connect, agree on the manifest, start the heartbeat. Done by `with`.

        Raises SettingError when the server refuses this user, password or certificate.
        """
        self._logic.check_open()
        self._connection.wait_until_ready()
        self._drive(self._logic.open())
        self._heart = threading.Thread(target=self._beat, name="streamadv-heartbeat", daemon=True)
        self._heart.start()
        return self

    def close(self) -> None:
        """Stop the heartbeat and disconnect. A producer that has not finished leaves the list of producers.

        Calls of other threads that wait then, and all later ones, raise ProducerClosedError.
        """
        if self._heart is None or self._logic.closed:
            return
        self._logic.closed = True
        if self._logic.is_forked:  # its threads, and what they hold, are the parent's
            self._disconnect()
            return
        self._closing.set()
        self._heart.join()
        self._heart = None
        with self._calls:
            self._calls.wait_for(lambda: self._under_way == 0, CLOSE_S)
        with suppress(*RETRYABLE):  # an unheard goodbye is made good by the missing heartbeat
            self._carry_through(self._logic.goodbye(), patient=False, closed=True)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._owned:
            self._connection.close()

    def group(self, size: int, **options: Any) -> Group:
        """`begin_group` for use in a with block: on leaving it, rollouts not pushed are failed. See `Group`."""
        return self.begin_group(size, **options)

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
    ) -> Group:
        """Admit a group of `size` rollouts and get its tickets.

        Waits while the run is at its byte budget or as far ahead as max_staleness allows; after `timeout`
        seconds raises Busy. An open `group_id` gives its tickets again, an ended one raises GroupEndedError.
        """
        steps = self._logic.begin(size, group_id, data_source, metadata, deadline_s, redundancy, timeout)
        return Group(self, self._drive(steps))

    def push(self, trajectories: Sequence[Trajectory]) -> PushResult:
        """Push trajectories of one group; an unknown group is opened by it (and may be refused with Busy)."""
        return self._drive(self._logic.push(trajectories, None, None))

    def rollout(self, ticket: Ticket) -> Rollout:
        """The rollout of a ticket, for instance one received from another process."""
        return Rollout(self, Places.of_received(self._logic, ticket), ticket)

    def score(
        self,
        group_id: str,
        rollout_index: int,
        reward: float | None,
        rewards: Mapping[str, float] | None = None,
    ) -> str:
        """Bring the reward of a trajectory pushed without one: 'scored', 'duplicate', 'ended' or 'unknown'."""
        return self._drive(self._logic.score(group_id, rollout_index, reward, rewards))

    def touch(self, group_id: str, deadline_s: float | None = None) -> bool:
        """Set the group's deadline to `deadline_s` from now if that is later; False when it has ended."""
        return self._drive(self._logic.touch(group_id, deadline_s))

    def model_version(self) -> int | None:
        """The newest version the trainer has published, None before there is a trainer."""
        self._logic.check_open()
        value = self._connection.scripts.hget(self._logic.joined.keys.home.lineage, "version")
        return None if value is None else int(value)

    def finish(self) -> None:
        """This producer begins no more groups. When all have finished the run ends; a later push reopens it."""
        self._drive(self._logic.finish())

    def _beat(self) -> None:
        while not self._closing.wait(self._logic.until_heartbeat(HEARTBEAT_S)):
            try:
                self._drive(self._logic.heartbeat(), patient=False)
            except RETRYABLE as error:
                logger.warning("heartbeat of producer %s failed: %s", self._logic.name, error)
            except ProducerClosedError:
                return
            except ManifestMismatchError as error:  # every further call raises it
                logger.error("producer %s stops: %s", self._logic.name, error)
                return

    def _drive(self, steps: Steps[T], patient: bool = True) -> T:
        """`_carry_through` as a call that `close` waits for; the last one to end disconnects once more."""
        with self._calls:
            self._logic.check_open()
            self._under_way += 1
        try:
            return self._carry_through(steps, patient)
        except Exception as error:
            if not self._logic.closed or isinstance(error, StreamadvError):
                raise
            self._logic.check_open()  # its connection was closed under it
            raise
        finally:
            steps.close()
            with self._calls:
                self._under_way -= 1
                self._calls.notify_all()
                if self._logic.closed and self._heart is None and not self._under_way:
                    self._disconnect()

    def _carry_through(self, steps: Steps[T], patient: bool, closed: bool = False) -> T:
        """Carry out what `producing` asks for, request by request; ProducerClosedError before one, unless `closed`.

        Scripts are repeated until the server answers (not when impatient); what becomes of a push whose reply
        was lost is up to the steps.
        """
        reply: Any = None
        error: BaseException | None = None
        outage = Outage(STAGE, sleep=self._closing.wait)
        while True:
            try:
                request = steps.send(reply) if error is None else steps.throw(error)
            except StopIteration as stop:
                result: T = stop.value
                return result
            reply, error = None, None
            while True:
                if not closed:
                    self._logic.check_open()
                try:
                    reply = self._carry_out(request)
                except OutOfMemoryError as failure:
                    error = failure
                except RETRYABLE as failure:
                    if not isinstance(request, Transaction) and patient:
                        outage.pause_after(failure)
                        continue
                    error = failure
                break

    def _carry_out(self, request: Request) -> Any:
        if isinstance(request, Pause):
            return self._closing.wait(request.seconds)
        if isinstance(request, Memory):
            return self._connection.memory()
        if isinstance(request, ServerIds):
            return server_ids(self._connection, request.keys)
        if isinstance(request, Transaction):
            return run_transaction(self._connection, request.payloads, request.call)
        return run_script(self._connection.scripts, request)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> AsyncProducer:
        from .async_producer import AsyncProducer

        self._twin = await AsyncProducer(AsyncConnection(self._connection.url), self._logic).open()
        return self._twin

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._twin.close()
