"""Sends several pushes in few calls: those of all tasks of an asyncio producer, and those of `push_many`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from redis.exceptions import ConnectionError

from ..errors import StreamadvError
from ..store.pipelined import fail
from .requests import OUT_OF_MEMORY, GroupCall, Push, Reply, Steps, T, join, shares, slices, take_slice

#: Calls of a lane that wait for their replies. With more, each would bring less; with one, the server would wait.
MAX_UNDER_WAY: Final = 2

_Waiting = tuple[Push, asyncio.Future[Any]]


class _Lane:
    """Pushes that may go together."""

    def __init__(self) -> None:
        self.queue: deque[_Waiting] = deque()
        self.under_way = 0
        self.is_scheduled = False


class Sender:
    """Sends together what is pushed in one turn of the event loop, or while MAX_UNDER_WAY calls are under way.

    A push that fails fails for itself: its task makes another attempt. call: sends a push.
    """

    def __init__(self, call: Callable[[Push], Awaitable[Any]]) -> None:
        self._call = call
        self._lanes: dict[Any, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def push(self, push: Push) -> asyncio.Future[Any]:
        """The replies for its groups."""
        lane = self._lanes.setdefault(push.lane, _Lane())
        future = asyncio.get_running_loop().create_future()
        lane.queue.append((push, future))
        if not lane.is_scheduled:
            lane.is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush, lane)
        return future

    def close(self) -> None:
        """What has not been sent raises ConnectionError."""
        for lane in self._lanes.values():
            while lane.queue:
                fail(lane.queue.popleft()[1], ConnectionError("the producer is closed"))

    def _flush(self, lane: _Lane) -> None:
        lane.is_scheduled = False
        while lane.queue and lane.under_way < MAX_UNDER_WAY:
            part = take_slice(lane.queue, lambda item: item[0].packets)
            lane.under_way += 1
            task = asyncio.create_task(self._send([item for item in part if not item[1].done()]))
            self._tasks.add(task)
            task.add_done_callback(partial(self._sent, lane, part))
        if not lane.queue and not lane.under_way:
            self._lanes = {key: other for key, other in self._lanes.items() if other is not lane}

    async def _send(self, part: Sequence[_Waiting]) -> None:
        pushes = [push for push, _ in part]
        try:
            joined = join(pushes) if pushes else None
            replies = [] if joined is None else shares(pushes, joined, await self._call(joined))
            for (_, future), reply in zip(part, replies, strict=True):
                if not future.done():
                    future.set_result(reply)
        except Exception as error:
            for _, future in part:
                fail(future, error)

    def _sent(self, lane: _Lane, part: Sequence[_Waiting], task: asyncio.Task[None]) -> None:
        """A call has ended, or was cancelled before it began."""
        self._tasks.discard(task)
        for _, future in part:
            fail(future, ConnectionError("the call was cancelled"))
        lane.under_way -= 1
        self._flush(lane)


class _Ended(NamedTuple):
    outcome: Any  # a result or an error


class _Held(NamedTuple):
    """Steps that have come to their first push."""

    number: int
    request: GroupCall
    push: Push  # the first attempt at it


def together(pushes: Sequence[Steps[T]]) -> Steps[list[T | StreamadvError]]:
    """The outcomes of steps whose first pushes go together; what then is left of each goes by itself.

    Raises an error that comes before the first push, such as of a wrong argument, before anything is sent.
    """
    outcomes: dict[int, Any] = {}
    lanes: dict[Any, list[_Held]] = {}
    try:
        for number, steps in enumerate(pushes):
            step = yield from _advance(steps, None, number)
            if isinstance(step, _Held):
                lanes.setdefault(step.push.lane, []).append(step)
            elif isinstance(step.outcome, StreamadvError):
                raise step.outcome
            else:
                outcomes[number] = step.outcome
        for lane in lanes.values():
            for part in slices(lane, lambda waiting: waiting.push.packets):
                replies = yield from _ask(part)
                for (number, *_), reply in zip(part, replies, strict=True):
                    ended = yield from _advance(pushes[number], reply)
                    outcomes[number] = ended.outcome
    finally:
        for steps in pushes:
            steps.close()
    return [outcomes[number] for number in range(len(pushes))]


def _advance(steps: Steps[Any], reply: Any, number: int | None = None) -> Steps[Any]:
    """Carry out what the steps ask for, after this reply: to their end, or with a number to their first push."""
    while True:
        try:
            request = steps.send(reply)
        except StopIteration as stop:
            return _Ended(stop.value)
        except StreamadvError as error:
            return _Ended(error)
        if number is not None and isinstance(request, GroupCall) and isinstance(push := request.make(), Push):
            return _Held(number, request, push)
        reply = yield request


def _ask(waiting: Sequence[_Held]) -> Steps[Sequence[Reply]]:
    """The replies to pushes that are sent together."""
    last: list[tuple[list[Any], Push]] = []  # attempt: its pushes, and these as one

    def make() -> Push:
        pushes: list[Any] = [one.request.make() if last else one.push for one in waiting]
        last[:] = [(pushes, join(pushes))]
        return last[0][1]

    replies = yield GroupCall(make)
    return [OUT_OF_MEMORY] * len(waiting) if replies is OUT_OF_MEMORY else shares(*last[0], replies)
