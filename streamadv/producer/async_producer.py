"""The producer for asyncio code: the same methods as `producer.py`, awaited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from redis.exceptions import OutOfMemoryError

from ..errors import ManifestMismatchError, ProducerClosedError, StreamadvError
from ..run.heartbeats import HEARTBEAT_S
from ..store.connection import AsyncConnection
from ..store.retry import RETRYABLE, Outage, closed_under_way
from ..store.scripts import run_script_async, run_transaction_async, server_ids_async
from ..trajectory.schema import Trajectory
from .async_group import AsyncGroup, AsyncRollout
from .beginning import Call
from .logic import ProducerLogic
from .membership import CLOSE_S, STAGE
from .places import Places
from .requests import Memory, Pause, Request, ServerIds, Steps, T, Transaction
from .tickets import PushResult, Ticket

logger = logging.getLogger(__name__)


class AsyncProducer:
    """What `async with Producer(...)` gives. Any number of tasks may use it at once."""

    def __init__(self, connection: AsyncConnection, logic: ProducerLogic) -> None:
        self._connection = connection
        self._logic = logic
        self._heart: asyncio.Task[None] | None = None
        self._under_way = 0
        self._idle = asyncio.Event()  # set once it is closed and no call is under way
        self._over: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # done once it is closed
        self._forgetting: set[asyncio.Task[None]] = set()

    async def open(self) -> Self:
        """As `Producer.open`."""
        self._logic.check_open()
        await self._connection.wait_until_ready()
        await self._drive(self._logic.open())
        self._heart = asyncio.create_task(self._beat(), name="streamadv-heartbeat")
        return self

    async def close(self) -> None:
        """As `Producer.close`."""
        if self._heart is None or self._logic.closed:
            return
        self._logic.closed = True
        if self._logic.is_forked:
            return
        self._over.set_result(None)
        self._heart.cancel()
        with suppress(asyncio.CancelledError):
            await self._heart
        if self._under_way:
            await asyncio.wait({asyncio.create_task(self._idle.wait())}, timeout=CLOSE_S)
        self._heart = None
        with suppress(*RETRYABLE):  # an unheard goodbye is made good by the missing heartbeat
            await self._carry_through(self._logic.goodbye(), patient=False, closed=True)
        await self._connection.close()

    def group(self, size: int, **options: Any) -> _Admission:
        """`async with producer.group(size) as group`: on leaving, rollouts not pushed are failed. See `AsyncGroup`."""
        return _Admission(self, size, options)

    async def begin_group(
        self,
        size: int,
        *,
        group_id: str | None = None,
        data_source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        redundancy: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  covers waiting for admission, not a lost server
    ) -> AsyncGroup:
        """As `Producer.begin_group`. A group that the server opens after this was cancelled is withdrawn."""
        call = Call()
        steps = self._logic.begin(
            size, group_id, data_source, metadata, deadline_s, redundancy, timeout, call
        )
        beginning = asyncio.create_task(self._drive(steps))
        try:
            tickets = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            call.wanted = False
            forgetting = asyncio.create_task(self._forget(beginning, call))
            self._forgetting.add(forgetting)
            forgetting.add_done_callback(self._forgetting.discard)
            raise
        return AsyncGroup(self, tickets)

    async def _forget(self, beginning: asyncio.Task[list[Ticket]], call: Call) -> None:
        """Withdraw the group of a call that nobody waits for."""
        with suppress(StreamadvError):
            tickets = await beginning
            if tickets:
                self._logic.forgo(call, tickets[0].group_id)
            await self._drive(self._logic.withdraw())

    async def push(self, trajectories: Sequence[Trajectory]) -> PushResult:
        """As `Producer.push`."""
        return await self._drive(self._logic.push(trajectories, None, None))

    def rollout(self, ticket: Ticket) -> AsyncRollout:
        """The rollout of a ticket, for instance one received from another process."""
        return AsyncRollout(self, Places.of_received(self._logic, ticket), ticket)

    async def score(
        self,
        group_id: str,
        rollout_index: int,
        reward: float | None,
        rewards: Mapping[str, float] | None = None,
    ) -> str:
        """As `Producer.score`."""
        return await self._drive(self._logic.score(group_id, rollout_index, reward, rewards))

    async def touch(self, group_id: str, deadline_s: float | None = None) -> bool:
        """As `Producer.touch`."""
        return await self._drive(self._logic.touch(group_id, deadline_s))

    async def model_version(self) -> int | None:
        """As `Producer.model_version`."""
        self._logic.check_open()
        with closed_under_way():
            value: Any = await self._connection.scripts.hget(self._logic.joined.keys.home.lineage, "version")
        return None if value is None else int(value)

    async def finish(self) -> None:
        """As `Producer.finish`."""
        await self._drive(self._logic.finish())

    async def _beat(self) -> None:
        while not self._logic.closed:
            await self._pause(self._logic.until_heartbeat(HEARTBEAT_S))
            try:
                await self._drive(self._logic.heartbeat(), patient=False)
            except RETRYABLE as error:
                logger.warning("heartbeat of producer %s failed: %s", self._logic.name, error)
            except ProducerClosedError:
                return
            except ManifestMismatchError as error:  # every further call raises it
                logger.error("producer %s stops: %s", self._logic.name, error)
                return

    async def _drive(self, steps: Steps[T], patient: bool = True) -> T:
        """As `Producer._drive`."""
        self._logic.check_open()
        self._under_way += 1
        try:
            return await self._carry_through(steps, patient)
        except Exception as error:
            if not self._logic.closed or isinstance(error, StreamadvError):
                raise
            self._logic.check_open()  # its connection was closed under it
            raise
        finally:
            steps.close()
            self._under_way -= 1
            if self._logic.closed and not self._under_way:
                self._idle.set()
                if self._heart is None:
                    await self._connection.close()

    async def _carry_through(self, steps: Steps[T], patient: bool, closed: bool = False) -> T:
        """As `Producer._carry_through`."""
        reply: Any = None
        error: BaseException | None = None
        outage = Outage(STAGE)
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
                    reply = await self._carry_out(request)
                except OutOfMemoryError as failure:
                    error = failure
                except RETRYABLE as failure:
                    if not isinstance(request, Transaction) and patient:
                        await self._pause(outage.delay_after(failure))
                        continue
                    error = failure
                break

    async def _pause(self, seconds: float) -> None:
        """Sleep, or until the producer is closed."""
        await asyncio.wait({self._over}, timeout=seconds)

    async def _carry_out(self, request: Request) -> Any:
        if isinstance(request, Pause):
            return await self._pause(request.seconds)
        if isinstance(request, Memory):
            return await self._connection.memory()
        if isinstance(request, ServerIds):
            return await server_ids_async(self._connection, request.keys)
        if isinstance(request, Transaction):
            return await run_transaction_async(self._connection, request.payloads, request.call)
        return await run_script_async(self._connection.scripts, request)


class _Admission:
    """A group to be admitted on entering the block."""

    def __init__(self, producer: AsyncProducer, size: int, options: dict[str, Any]) -> None:
        self._producer = producer
        self._size = size
        self._options = options

    async def __aenter__(self) -> AsyncGroup:
        self._group = await self._producer.begin_group(self._size, **self._options)
        return self._group

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._group._leave(error)
