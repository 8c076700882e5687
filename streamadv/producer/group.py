"""A group and its rollouts for blocking code: played, pushed, failed, cancelled."""

from __future__ import annotations

import contextvars
import inspect
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ..errors import ProducerClosedError, SettingError, StreamadvError
from ..messages import brief
from ..store.retry import RETRYABLE
from ..trajectory.schema import Trajectory
from .failures import Outcome, describe
from .places import AnyGroup, AnyRollout, Places, kind_of
from .tickets import PushResult, Ticket

if TYPE_CHECKING:
    from .producer import Producer

#: Of `Group.run`, unless it is told another number.
MAX_THREADS: Final = 64


class Rollout(AnyRollout):
    """One rollout of a group. It ends once: pushed, failed or cancelled.

    `with rollout:` takes the newest model version for it and turns an exception inside into `fail`; the exception
    goes on.
    """

    def __init__(self, producer: Producer, places: Places, ticket: Ticket) -> None:
        super().__init__(places, ticket)
        self._producer = producer

    def push(self, **fields: Any) -> str:
        """Push this rollout: its columns (or `rows=`), `reward`, `steps` and other fields of a Trajectory.

        Waits while the server is full. 'pushed', 'duplicate' (the place was taken before), 'surplus' or 'late' (its
        group had ended). Raises TrajectoryError, naming field and value.
        """
        return self._producer._drive(self._push(fields))

    def fail(self, reason: str = "failed", detail: str = "") -> str:
        """End this rollout without a trajectory: `reason` failed or aborted. `detail`: why, for the log."""
        return self._producer._drive(self._fail(reason, detail))

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and not self.ended:
            with suppress(ProducerClosedError):
                ending = self._places.end([self.rollout_index], kind_of(error), describe(error))
                self._producer._drive(ending)


class Group(AnyGroup[Rollout]):
    """An admitted group: an iterable of its rollouts, and what can be done with it as a whole.

    Leaving `with producer.group(...) as group:` fails the rollouts that are not pushed, but for those whose tickets
    were handed out.
    """

    def __init__(self, producer: Producer, tickets: Sequence[Ticket]) -> None:
        places = Places(producer._logic, tickets)
        super().__init__(places, [Rollout(producer, places, ticket) for ticket in places.tickets])
        self._producer = producer

    def run(
        self, play: Callable[..., Any], *args: Any, threads: int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call `play(rollout, *args, **kwargs)` for each rollout that has not ended, all at once in threads.

        threads: how many at a time (at most 64 by default; 1 = one after the other in this thread). Returns what the
        calls returned, None for those that failed. An exception that `play` raises fails its rollout alone, and so
        does returning without push or fail (`not_pushed`); `failures` has the reasons. Raised, after all have ended,
        is what is no mishap of one rollout: errors of streamadv, and an exception that all rollouts of a group, or
        three groups of one rollout in a row, raise at the same line. An interrupt cancels what has not ended; threads
        that play see `rollout.cancelled`.
        """
        if inspect.iscoroutinefunction(play):
            raise SettingError("play is a coroutine function: run it with `async with Producer(...)`")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise SettingError(f"threads is {brief(threads)}, needs a whole number of at least 1, or None")
        played = [(rollout, Outcome()) for rollout in self if not rollout.ended]
        waiting, stopped = deque(played), threading.Event()

        def work() -> None:
            while waiting and not stopped.is_set():
                with suppress(IndexError):  # another thread was first
                    rollout, outcome = waiting.popleft()
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
                self._producer._drive(self._places.withdraw(), patient=False)
            raise
        failure = self._producer._logic.failures.judge([outcome for _, outcome in played])
        if failure is not None:
            raise failure
        return [outcome.result for _, outcome in played]

    def _play(self, rollout: Rollout, outcome: Outcome, play: Callable[[], Any]) -> None:
        rollout._start()
        try:
            outcome.result = play()
        except Exception as error:
            outcome.error = error
        try:
            self._producer._drive(self._places.conclude(rollout.rollout_index, outcome))
        except StreamadvError as error:
            outcome.error = outcome.error or error

    def push(self, records: Sequence[Trajectory | Mapping[str, Any]]) -> PushResult:
        """Push several rollouts of the group in one round trip; mappings name their `rollout_index`."""
        return self._producer._drive(self._places.push(records))

    def cancel(self, count: int | None = None, *, indices: Iterable[int] | None = None) -> PushResult:
        """State that rollouts will not come: `count` of those that nobody plays, or those with these indices.

        By count it takes the highest places that are not started (`with rollout`, `run`, `push`), not handed out
        (`ticket.to_json`) and not ended; TrajectoryError if there are fewer. The result's `indices` are the places that
        were cancelled. A push to one of them answers 'duplicate'.
        """
        return self._producer._drive(self._places.cancel(count, indices))

    def touch(self, deadline_s: float | None = None) -> bool:
        """Extend the deadline to `deadline_s` from now; False when the group has ended."""
        return self._producer.touch(self.group_id, deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        with nullcontext() if error is None else suppress(ProducerClosedError):
            self._producer._drive(self._places.leave(error))


def _in_threads(work: Callable[[], None], count: int) -> None:
    """Run `work` in so many threads until all have returned; what one of them raises is raised at once.

    The threads are daemons, so that what is still played after an interrupt does not keep the process from ending.
    """
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def body() -> None:
        try:
            work()
        except BaseException as error:  # raised below, in the caller's thread
            ends.put(error)
        else:
            ends.put(None)

    for _ in range(count):
        threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=True).start()
    for _ in range(count):
        if (error := ends.get()) is not None:
            raise error
