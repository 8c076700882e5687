"""Groups and rollouts for blocking code."""

from __future__ import annotations

import contextvars
import inspect
import queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from .. import clock, doors, tracing
from ..errors import ProducerClosedError, SettingError, StreamadvError
from ..messages import whole_number
from ..store.retry import RETRYABLE
from ..trajectory.schema import Trajectory
from .base_group import BaseGroup, BaseRollout
from .failures import Outcome
from .tickets import PushResult

if TYPE_CHECKING:
    from .producer import Producer

#: How many rollouts `Group.run` plays at a time by default.
MAX_THREADS: Final = 64


class Rollout(BaseRollout):
    """One rollout of a group. It ends once: pushed, failed or cancelled.

    `with rollout:` takes the newest model version for it and turns an exception inside into `fail`; the exception
    is not swallowed.

    It has `group_id`, `rollout_index`, `model_version` (the newest one known when it was started), `ticket`, and says
    whether it has `ended` or is `cancelled`.
    """

    _producer: Producer

    def _start(self) -> None:
        self._producer._keep_heart()
        super()._start()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if error is not None and not self.ended:
            with suppress(ProducerClosedError):
                self._producer._drive(self._slots.end_after_error(self.rollout_index, error))


class Group(BaseGroup[Rollout]):
    """An admitted group: an iterable of its rollouts, and what can be done with it as a whole.

    Leaving `with producer.group(...) as group:` fails the rollouts that are not pushed, except those whose
    tickets were handed out.

    It has `group_id`, `size` (usable rollouts that make it complete), `model_version` (at its admission), `tickets`,
    and `failures`.
    """

    _producer: Producer
    _make_rollout = Rollout

    def run(
        self,
        play: Callable[..., Any],
        *args: Any,
        threads: int | None = None,
        retries: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `play(rollout, *args, **kwargs)` for each rollout that has not ended, all at once in threads.

        threads: how many at a time (at most 64 by default; 1 = one after the other in this thread). Returns what the
        calls returned, None for those that failed. An exception that `play` raises fails its rollout alone, and so
        does a record that `push` refuses (TrajectoryError), and returning without push or fail (`not_pushed`);
        `failures` has the reasons. retries: how often such a rollout is played again first, with the newest version,
        so that it does not cost its group; one that was pushed, or that `fail` has ended, has ended.

        Raises, after all rollouts have ended, any other error of streamadv, or an exception that all rollouts of the
        group (or three groups of one rollout in a row) raised at the same line. An interrupt cancels what has not
        ended; threads that still play see `rollout.cancelled`.
        """
        if inspect.iscoroutinefunction(play):
            raise SettingError("play is a coroutine function: run it with `async with Producer(...)`")
        threads = whole_number("threads", threads, 1, or_none=True)
        played = self._to_play(retries)
        waiting, stopped = deque(played), doors.Event()

        def work() -> None:
            while not stopped.is_set():
                try:
                    rollout, outcome = waiting.popleft()
                except IndexError:
                    return
                self._play(rollout, outcome, partial(play, rollout, *args, **kwargs))

        try:
            count = min(len(played), threads or MAX_THREADS)
            if count > 1:
                _in_threads(work, count)
            else:
                work()
        except BaseException:
            stopped.set()
            with suppress(ProducerClosedError, *RETRYABLE):
                self._producer._drive(self._slots.cancel_unfinished(), patient=False)
            raise
        return self._results(played)

    def _play(self, rollout: Rollout, outcome: Outcome, play: Callable[[], Any]) -> None:
        is_due = True
        while is_due:
            rollout._start()
            started = clock.now()
            try:
                with tracing.inside(self._producer.run, self.group_id):
                    outcome.result = play()
            except Exception as error:
                outcome.error = error
            seconds = clock.now() - started
            is_due = self._slots.is_played_again(rollout.rollout_index, outcome, seconds)
        try:
            self._producer._drive(self._slots.end_after_play(rollout.rollout_index, outcome))
        except StreamadvError as error:
            outcome.error = outcome.error or error

    def push(self, records: Sequence[Trajectory | Mapping[str, Any]]) -> PushResult:
        """Push several rollouts of the group in one round trip; mappings name their `rollout_index`."""
        return self._producer._drive(self._slots.push(records))

    def cancel(self, count: int | None = None, *, indices: Iterable[int] | None = None) -> PushResult:
        """State that rollouts will not come: `count` of those that nobody plays, or those with these indices.

        By count it takes the highest slots that are not started (`with rollout`, `run`, `push`), not handed out
        (`ticket.to_json`) and not ended; TrajectoryError if there are fewer. The result's `indices` are the slots that
        were cancelled. A push to one of them answers 'duplicate'.
        """
        return self._producer._drive(self._slots.cancel(count, indices))

    def touch(self, deadline_s: float | None = None) -> bool:
        """Extend the deadline to `deadline_s` from now; False when the group has ended."""
        return self._producer.touch(self.group_id, deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        with nullcontext() if error is None else suppress(ProducerClosedError):
            self._producer._drive(self._slots.end_block(error))

    async def __aenter__(self) -> NoReturn:
        self.cancel(indices=[rollout.rollout_index for rollout in self])
        raise TypeError(
            "this producer was entered by `with`: write `with producer.group(...)`, or `async with Producer(...)`"
        )

    async def __aexit__(self, *error: object) -> None:
        """Python asks for it before `__aenter__`."""


def _in_threads(work: Callable[[], None], count: int) -> None:
    """Run `work` in so many threads until all have returned; what one of them raises is raised at once.

    The threads are daemons, so that what is still played after an interrupt does not keep the process from ending.
    """
    ends: queue.SimpleQueue[BaseException | None] = doors.SimpleQueue()

    def body() -> None:
        try:
            work()
        except BaseException as error:  # raised below, in the caller's thread
            ends.put(error)
        else:
            ends.put(None)

    for _ in range(count):
        doors.Thread(target=contextvars.copy_context().run, args=(body,), daemon=True).start()
    for _ in range(count):
        if (error := ends.get()) is not None:
            raise error
