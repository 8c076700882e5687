"""Several pushes in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import StreamadvError
from .encode import Push, Reply, join, shares, slices
from .requests import OUT_OF_MEMORY, GroupCall, Request, Steps, T


class _Ended(NamedTuple):
    outcome: Any  # a result or an error


def together(pushes: Sequence[Steps[T]]) -> Steps[list[T | StreamadvError]]:
    """The outcomes of steps whose first pushes go together; what then is left of each goes by itself.

    Raises an error that comes before the first push, such as of a wrong argument, before anything is sent.
    """
    outcomes: dict[int, Any] = {}
    lanes: dict[Any, list[tuple[int, GroupCall, Push]]] = {}
    try:
        for number, steps in enumerate(pushes):
            step = yield from _until_push(steps)
            if isinstance(step, _Ended) and isinstance(step.outcome, StreamadvError):
                raise step.outcome
            if isinstance(step, _Ended):
                outcomes[number] = step.outcome
            else:
                request, push = step
                lanes.setdefault(push.lane, []).append((number, request, push))
        for lane in lanes.values():
            for part in slices(lane, lambda item: item[2].load):
                replies = yield from _ask([request for _, request, _ in part])
                for (number, *_), reply in zip(part, replies, strict=True):
                    outcomes[number] = yield from _finish(pushes[number], reply)
    finally:
        for steps in pushes:
            steps.close()
    return [outcomes[number] for number in range(len(pushes))]


def _until_push(steps: Steps[Any]) -> Steps[tuple[GroupCall, Push] | _Ended]:
    """Carry out what comes before the first push, which is returned with one attempt at it."""
    step = _next(steps, None)
    while not isinstance(step, _Ended):
        if isinstance(step, GroupCall) and isinstance(push := step.make(), Push):
            return step, push
        reply = yield step
        step = _next(steps, reply)
    return step


def _ask(requests: Sequence[GroupCall]) -> Steps[Sequence[Reply]]:
    """The replies to pushes that are sent together."""
    attempt: list[Any] = []
    joined: list[Push] = []

    def make() -> Push:
        attempt[:] = [request.make() for request in requests]
        joined[:] = [join(attempt)]
        return joined[0]

    replies = yield GroupCall(make)
    return (
        [OUT_OF_MEMORY] * len(requests) if replies is OUT_OF_MEMORY else shares(attempt, joined[0], replies)
    )


def _finish(steps: Steps[Any], reply: Reply) -> Steps[Any]:
    """Carry out the rest, given the reply to the push, and return the outcome."""
    step = _next(steps, reply)
    while not isinstance(step, _Ended):
        reply = yield step
        step = _next(steps, reply)
    return step.outcome


def _next(steps: Steps[Any], reply: Any) -> Request | _Ended:
    try:
        return steps.send(reply)
    except StopIteration as stop:
        return _Ended(stop.value)
    except StreamadvError as error:
        return _Ended(error)
