"""Groups and rollouts for asyncio code: the methods of `group.py`, awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from .. import clock, tracing
from ..errors import ProducerClosedError, SettingError, StreamadvError
from ..store.retry import RETRYABLE
from .base_group import BaseGroup, BaseRollout, awaited
from .failures import Outcome
from .group import Group

if TYPE_CHECKING:
    from .async_producer import AsyncProducer


class AsyncRollout(BaseRollout):
    """One rollout of a group. It ends once: pushed, failed or cancelled.

    `async with rollout:` takes the newest model version for it and turns an exception inside into `fail`, the
    cancellation of its task into a cancelled rollout; the exception is not swallowed.

    It has `group_id`, `rollout_index`, `model_version` (the newest one known when it was started), `ticket`, and says
    whether it has `ended` or is `cancelled`; `push` and `fail` are those of `Rollout`, awaited.
    """

    _producer: AsyncProducer
    _player: asyncio.Task[Any] | None = None  # that is inside `async with rollout`
    _left: asyncio.Event | None = None
    push = awaited(BaseRollout.push)  # type: ignore[assignment]
    fail = awaited(BaseRollout.fail)  # type: ignore[assignment]

    async def __aenter__(self) -> Self:
        self._start()
        self._player, self._left = asyncio.current_task(), asyncio.Event()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        try:
            if error is not None and not self.ended:
                ending = self._slots.end_after_error(self.rollout_index, error)
                with suppress(ProducerClosedError, *RETRYABLE):
                    await self._producer._drive(ending, patient=isinstance(error, Exception))
        finally:
            self._player = None
            if self._left is not None:
                self._left.set()

    async def _until_left(self) -> None:
        """Wait while another task plays it inside `async with rollout`."""
        player, left = self._player, self._left
        if player is None or left is None or player.done() or player is asyncio.current_task():
            return
        leaving = asyncio.create_task(left.wait())
        try:
            await asyncio.wait({player, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()


class AsyncGroup(BaseGroup[AsyncRollout]):
    """An admitted group: an iterable of its rollouts, and what can be done with it as a whole.

    Leaving `async with producer.group(...) as group:` fails the rollouts that are not pushed, except those whose
    tickets were handed out. Left by an exception, it waits for rollouts that other tasks play inside `async with
    rollout`, so that the error of one does not cost its siblings.

    It has `group_id`, `size` (usable rollouts that make it complete), `model_version` (at its admission), `tickets`,
    and `failures`; `push`, `cancel` and `touch` are those of `Group`, awaited.
    """

    _producer: AsyncProducer
    _make_rollout = AsyncRollout
    push = awaited(Group.push)
    cancel = awaited(Group.cancel)
    touch = awaited(Group.touch)

    async def run(self, play: Callable[..., Any], *args: Any, retries: int = 0, **kwargs: Any) -> list[Any]:
        """Await `play(rollout, *args, **kwargs)` for each rollout that has not ended, all at once.

        Returns and raises as `Group.run`. A call that somebody else cancels is a cancelled rollout. Cancellation
        cancels the calls and what has not ended.
        """
        played = self._to_play(retries)
        calls = [
            asyncio.create_task(self._play(rollout, outcome, partial(play, rollout, *args, **kwargs)))
            for rollout, outcome in played
        ]
        try:
            if calls:
                await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            for call, (rollout, outcome) in zip(calls, played, strict=True):
                if call.cancelled():  # by somebody else than this: one rollout's mishap
                    outcome.error = asyncio.CancelledError()
                    await self._producer._drive(self._slots.end_after_play(rollout.rollout_index, outcome))
                elif call.done():
                    call.result()
        except BaseException:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            with suppress(ProducerClosedError, *RETRYABLE):
                await self._producer._drive(self._slots.cancel_unfinished(), patient=False)
            raise
        return self._results(played)

    async def _play(self, rollout: AsyncRollout, outcome: Outcome, play: Callable[[], Any]) -> None:
        is_due = True
        while is_due:
            rollout._start()
            started = clock.now()
            try:
                with tracing.inside(self._producer.run, self.group_id):
                    result = play()
                    if not inspect.isawaitable(result):
                        raise SettingError(
                            f"play has returned a {type(result).__name__}, needs to be a coroutine function"
                        )
                    outcome.result = await result
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                outcome.error = error  # of something that play had awaited
            except Exception as error:
                outcome.error = error
            seconds = clock.now() - started
            is_due = self._slots.is_played_again(rollout.rollout_index, outcome, seconds)
        try:
            await self._producer._drive(self._slots.end_after_play(rollout.rollout_index, outcome))
        except StreamadvError as error:
            outcome.error = outcome.error or error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if isinstance(error, Exception):
            for rollout in self:
                await rollout._until_left()
        patient = error is None or isinstance(error, Exception)
        with nullcontext() if error is None else suppress(ProducerClosedError, *RETRYABLE):
            await self._producer._drive(self._slots.end_block(error), patient=patient)
