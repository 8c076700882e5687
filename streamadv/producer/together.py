"""Sends several pushes in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import StreamadvError
from .encode import Push, Reply, join, shares, slices
from .requests import OUT_OF_MEMORY, GroupCall, Steps, T


class _Ended(NamedTuple):
    outcome: Any  # a result or an error


class _Waiting(NamedTuple):
    """Steps that have come to their first push."""

    number: int
    request: GroupCall
    push: Push  # the first attempt at it


def together(pushes: Sequence[Steps[T]]) -> Steps[list[T | StreamadvError]]:
    """The outcomes of steps whose first pushes go together; what then is left of each goes by itself.

    Raises an error that comes before the first push, such as of a wrong argument, before anything is sent.
    """
    outcomes: dict[int, Any] = {}
    lanes: dict[Any, list[_Waiting]] = {}
    try:
        for number, steps in enumerate(pushes):
            step = yield from _advance(steps, None, number)
            if isinstance(step, _Waiting):
                lanes.setdefault(step.push.lane, []).append(step)
            elif isinstance(step.outcome, StreamadvError):
                raise step.outcome
            else:
                outcomes[number] = step.outcome
        for lane in lanes.values():
            for part in slices(lane, lambda waiting: waiting.push.load):
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
            return _Waiting(number, request, push)
        reply = yield request


def _ask(waiting: Sequence[_Waiting]) -> Steps[Sequence[Reply]]:
    """The replies to pushes that are sent together."""
    last: list[tuple[list[Any], Push]] = []  # attempt: its pushes, and these as one

    def make() -> Push:
        pushes: list[Any] = [one.request.make() if last else one.push for one in waiting]
        last[:] = [(pushes, join(pushes))]
        return last[0][1]

    replies = yield GroupCall(make)
    return [OUT_OF_MEMORY] * len(waiting) if replies is OUT_OF_MEMORY else shares(*last[0], replies)
