"""The producer for asyncio code: the methods of `producer.py`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from contextlib import suppress
from typing import Any, NoReturn, Self

from ..errors import RunEndedError, StreamadvError
from ..store.connection import AsyncConnection
from ..store.replies import as_int
from ..store.retry import RETRYABLE
from ..store.scripts import run_script_async, run_transaction_async, server_ids_async
from .admission import Ahead, await_room_async
from .async_group import AsyncGroup, AsyncRollout
from .base_group import Slots, awaited
from .extra_columns import ColumnsPush
from .logic import CLOSE_S, HEARTBEAT_ERRORS, LEAVE_S, BaseProducer, ProducerLogic
from .producer import Producer
from .prompted import PromptedGroups
from .requests import AdmissionPause, Attempt, Memory, Pause, Push, ServerIds, Steps, T, attempts
from .sender import Sender
from .tickets import GroupRequest, Ticket


class AsyncProducer(
    BaseProducer["BeginGroup", AsyncIterator[AsyncGroup], AsyncIterator[tuple[Any, AsyncGroup]]]
):
    """What `async with Producer(...)` gives: the methods of `Producer`, awaited. Any number of tasks may use it."""

    push = awaited(Producer.push)
    push_many = awaited(Producer.push_many)
    score = awaited(Producer.score)
    touch = awaited(Producer.touch)
    wait_for_weights = awaited(Producer.wait_for_weights)
    finish = awaited(Producer.finish)

    def __init__(
        self, connection: AsyncConnection, logic: ProducerLogic | None = None, **options: object
    ) -> None:
        if logic is None:  # somebody's own call, with the options of a Producer
            raise TypeError(
                "AsyncProducer is not made by itself: write `async with sa.Producer(...) as producer`"
            )
        self._connection = connection
        self._logic = logic
        self._sender = Sender(self._call)
        self._heart: asyncio.Task[None] | None = None
        self._under_way = 0
        self._idle = asyncio.Event()  # set once it is closed and no call is under way
        # Done once it is closed.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> Self:
        """As `Producer.open`."""
        self._logic.membership.check_open()
        try:
            await self._connection.wait_until_ready()
            await self._drive(self._logic.open())
        except BaseException:
            await self._disconnect()
            raise
        self._heart = asyncio.create_task(self._beat(), name="streamadv-heartbeat")
        return self

    async def close(self) -> None:
        """As `Producer.close`."""
        membership = self._logic.membership
        if self._heart is None or membership.closed:
            return
        membership.closed = True
        if membership.is_forked:
            return
        self._over.set_result(None)
        self._logic.admission.lines.wake()
        self._heart.cancel()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await asyncio.wait({self._heart})
                    if self._under_way:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(CLOSE_S):
                                await self._idle.wait()
                    await self._drive(self._logic.leave(), patient=False, leaves=True)
        finally:
            self._heart = None
            self._logic.end()
            await self._disconnect()

    def _begin(self, request: GroupRequest) -> BeginGroup:
        return BeginGroup(self._admit(request))

    async def _groups(self, ahead: Ahead) -> AsyncGenerator[AsyncGroup, None]:
        try:
            while True:
                try:
                    ticket = await self._drive(ahead.begin())
                except RunEndedError:
                    return
                yield AsyncGroup(self, ticket)
        finally:
            ahead.leave()

    async def _prompts(self, prompted: PromptedGroups) -> AsyncGenerator[tuple[Any, AsyncGroup], None]:
        try:
            while (found := await self._drive(prompted.next())) is not None:
                yield found[0], prompted.given(AsyncGroup(self, found[1]))
        finally:
            with suppress(StreamadvError, *RETRYABLE):
                await self._drive(prompted.close(), patient=False)

    async def _admit(self, request: GroupRequest) -> AsyncGroup:
        return AsyncGroup(self, await self._drive(self._logic.begin(request)))

    def rollout(self, ticket: Ticket) -> AsyncRollout:
        """As `Producer.rollout`."""
        slots = Slots.of_received(self._logic, ticket)
        return AsyncRollout(self, slots, slots.ticket)

    async def model_version(self) -> int | None:
        """As `Producer.model_version`."""
        membership = self._logic.membership
        membership.check_open()
        value: Any = await self._connection.scripts.hget(membership.manifest.keys.home.session, "version")
        return as_int(value)

    async def _disconnect(self) -> None:
        self._sender.close()
        await self._connection.close()

    async def _beat(self) -> None:
        while not self._logic.membership.closed:
            await self._pause(self._logic.until_heartbeat())
            try:
                await self._drive(self._logic.heartbeat(), patient=False)
            except HEARTBEAT_ERRORS as error:
                if self._logic.stops_heartbeat(error):
                    return

    async def _drive(self, steps: Steps[T], patient: bool = True, leaves: bool = False) -> T:
        """As `Producer._drive`."""
        membership = self._logic.membership
        requests = attempts(steps, membership, patient=patient, leaves=leaves)
        reply: Any = None
        membership.check_open(leaves)
        self._under_way += 1
        try:
            while True:
                try:
                    request = requests.send(reply)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                try:
                    reply = await self._carry_out(request)
                except Exception as error:
                    reply = error
        finally:
            steps.close()
            self._under_way -= 1
            if membership.closed and not self._under_way:
                self._idle.set()
                if self._heart is None:
                    await self._disconnect()

    async def _pause(self, seconds: float) -> None:
        """Sleep, or until the producer is closed."""
        await asyncio.wait({self._over}, timeout=seconds)

    async def _carry_out(self, request: Attempt) -> Any:
        if isinstance(request, Pause):
            pause = asyncio.sleep if request.leaves else self._pause
            return await pause(request.seconds)
        if isinstance(request, AdmissionPause):
            return await await_room_async(self._connection, request, self._over)
        if isinstance(request, Memory):
            return await self._connection.memory()
        if isinstance(request, ServerIds):
            return await server_ids_async(self._connection, request.shards)
        if isinstance(request, ColumnsPush):
            return await self._call(request)
        if isinstance(request, Push):
            return await self._sender.push(request)
        return await run_script_async(self._connection.pipelined or self._connection.scripts, request)

    async def _call(self, push: Push | ColumnsPush) -> Any:
        return await run_transaction_async(self._connection, *push.transaction())


class BeginGroup(Coroutine[Any, Any, AsyncGroup]):
    """A group that is admitted when this is awaited, or when its `async with` block is entered.

    If the server has opened it when its caller is cancelled, it is withdrawn: with the next group, or heartbeat.
    """

    def __init__(self, admitting: Coroutine[Any, Any, AsyncGroup]) -> None:
        self._admitting = admitting

    def send(self, value: Any) -> Any:
        return self._admitting.send(value)

    def throw(self, *error: Any) -> Any:
        return self._admitting.throw(*error)

    def close(self) -> None:
        self._admitting.close()

    def __await__(self) -> Generator[Any, Any, AsyncGroup]:
        return self._admitting.__await__()

    def __enter__(self) -> NoReturn:
        self.close()
        raise TypeError(
            "this producer was entered by `async with`: write `async with producer.group(...)`, or `with Producer(...)`"
        )

    def __exit__(self, *error: object) -> None:
        """Python asks for it before `__enter__`."""

    async def __aenter__(self) -> AsyncGroup:
        self._group = await self._admitting
        return await self._group.__aenter__()

    async def __aexit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        await self._group.__aexit__(kind, error, tb)
