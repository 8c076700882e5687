"""The shared part of blocking and asyncio groups and rollouts: everything except carrying the steps out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from types import EllipsisType
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from .. import clock
from ..errors import SettingError, TrajectoryError
from ..messages import brief
from ..trajectory.schema import Row, Step
from .checks import MAY_BE_NONE
from .failures import Outcome
from .requests import Steps, T
from .slots import Slots
from .tickets import Ticket

FAIL_REASONS: Final = ("failed", "aborted")

# What `Rollout.push` takes. `...` = not given, which differs from None where None says something.
RewardArg = float | None | EllipsisType
VersionArg = int | tuple[int, int] | None | EllipsisType
MappingArg = Mapping[str, Any] | None
StepsArg = Sequence[Step | Mapping[str, Any]] | None
RowsArg = Sequence[Row | Mapping[str, Any]] | None

P = ParamSpec("P")


def awaited(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A method that returns what `_drive` does, for a class whose `_drive` is to be awaited."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        carrying_out: Any = method(self, *args, **kwargs)  # a coroutine, as `_drive` is one there
        result: T = await carrying_out
        return result

    return call


class BaseRollout:
    """What the two kinds of rollout share."""

    def __init__(self, producer: Any, slots: Slots, ticket: Ticket) -> None:
        self._producer = producer
        self._slots = slots
        self.ticket = ticket
        """Its ticket, to be played elsewhere: `ticket.to_json()`."""
        self.group_id = ticket.group_id
        self.rollout_index = ticket.rollout_index
        self.model_version = ticket.model_version
        """The newest version that the trainer has published, as far as known when it was started or admitted.

        Your engine may have loaded another one: then pass `model_version=` to `push`."""

    def __repr__(self) -> str:
        state = "ended" if self.ended else "cancelled" if self.cancelled else "open"
        return (
            f"{type(self).__name__}(group_id={self.group_id!r}, rollout_index={self.rollout_index}, "
            f"model_version={self.model_version}, {state})"
        )

    @property
    def ended(self) -> bool:
        """True once it was pushed, failed or cancelled through its group or this object."""
        return self.rollout_index in self._slots.ended

    @property
    def cancelled(self) -> bool:
        """True when playing on is in vain: it is cancelled, would be dropped as stale, or the run has been ended.

        The latter two as of the last heartbeat.
        """
        slots = self._slots
        return self.rollout_index in slots.cancelled or slots.logic.membership.is_in_vain(self.ticket)

    def _start(self) -> None:
        self._slots.started.add(self.rollout_index)
        version = self._slots.logic.membership.version
        self.model_version = version if version is not None else self.model_version

    def _push(self, **fields: Any) -> Steps[str]:
        self._slots.started.add(self.rollout_index)
        record = {
            name: value
            for name, value in fields.items()
            if value is not ... and (value is not None or name in MAY_BE_NONE)
        }
        record.setdefault("model_version", self.model_version)
        result = yield from self._slots.push([record], self.ticket)
        return result.codes[0]

    def _fail(self, reason: str, detail: str) -> Steps[str]:
        if reason not in FAIL_REASONS:
            raise TrajectoryError(
                f"fail: reason is {brief(reason)}, needs 'failed' or 'aborted': put your own words into detail"
            )
        return self._end(reason, detail)

    def _end(self, reason: str, detail: str) -> Steps[str]:
        result = yield from self._slots.end([self.rollout_index], reason, detail, note=bool(detail))
        return result.codes[0]


R = TypeVar("R", bound=BaseRollout)


class BaseGroup(Generic[R]):
    """What the two kinds of group share."""

    _make_rollout: type[R]

    def __init__(self, producer: Any, ticket: Ticket) -> None:
        """ticket: the first one of a group that has just been begun."""
        self._producer = producer
        self._slots = Slots.of_group(producer._logic, ticket)
        self.group_id = ticket.group_id
        self.size = ticket.group_size
        self.model_version = ticket.model_version

    def __repr__(self) -> str:
        slots = self._slots
        return (
            f"{type(self).__name__}(group_id={self.group_id!r}, size={self.size}, "
            f"model_version={self.model_version}, ended={len(slots.ended)}/{len(self)}, failed={len(slots.failures)})"
        )

    @property
    def tickets(self) -> list[Ticket]:
        """One for each slot, also the redundant ones.

        One whose `to_json` was called, or that was copied or sent to another process, counts as played by somebody
        else: `cancel(count)` and the end of the block leave its slot alone.
        """
        return self._slots.tickets

    @property
    def failures(self) -> Mapping[int, str]:
        """Why rollouts failed or were cancelled here: rollout_index -> one line."""
        return self._slots.failures

    @cached_property
    def _rollouts(self) -> list[R]:
        return [self._make_rollout(self._producer, self._slots, ticket) for ticket in self._slots.tickets]

    def __iter__(self) -> Iterator[R]:
        return iter(self._rollouts)

    def __len__(self) -> int:
        return len(self._slots.indices)

    def _to_play(self, retries: int) -> list[tuple[R, Outcome]]:
        """The rollouts that have not ended, with room for what becomes of each."""
        if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
            raise SettingError(f"retries is {brief(retries)}, needs a whole number of at least 0")
        return [(rollout, Outcome(retries=retries)) for rollout in self if not rollout.ended]

    def _is_played_again(self, rollout: R, outcome: Outcome, started: float) -> bool:
        """Whether a rollout that was played from `started` on has failed, and is played once more."""
        return self._slots.is_played_again(rollout.rollout_index, outcome, clock.now() - started)

    def _results(self, played: Sequence[tuple[R, Outcome]]) -> list[Any]:
        """What the calls of `play` returned. Raises as `Failures.exception_to_raise` decides."""
        outcomes = [outcome for _, outcome in played]
        failure = self._slots.logic.failures.exception_to_raise(outcomes)
        if failure is not None:
            raise failure
        return [outcome.result for outcome in outcomes]
