"""A group as the process knows it that holds its tickets: what `group.py` and `async_group.py` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, Self, TypeVar

from ..errors import SettingError, TrajectoryError
from ..messages import brief
from ..trajectory.schema import Trajectory
from .failures import CANCELLED, NOT_PUSHED, Outcome, describe
from .logic import ProducerLogic
from .requests import Steps
from .tickets import PushResult, Ticket, prepare

FAIL_REASONS: Final = ("failed", "aborted")


class Places:
    """What has become of the places of a group. A place is ended once, and free until somebody plays it."""

    def __init__(self, logic: ProducerLogic, tickets: Sequence[Ticket]) -> None:
        self.logic = logic
        self.handed_out: set[int] = set()  # tickets that have left this process: somebody plays them
        self.tickets = [replace(ticket).watched_by(self.handed_out) for ticket in tickets]
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self.withdrawn: set[int] = set()  # ended while they may still be played here
        self.failures: dict[int, str] = {}

    @classmethod
    def of_received(cls, logic: ProducerLogic, ticket: Ticket) -> Self:
        """The place of a ticket that somebody else has handed out. Raises TrajectoryError for what is none."""
        if not isinstance(ticket, Ticket):
            raise TrajectoryError(f"ticket is {brief(ticket)}, needs a Ticket: Ticket.from_json reads one")
        ticket.hand_out()
        return cls(logic, [ticket])

    @property
    def indices(self) -> list[int]:
        return [ticket.rollout_index for ticket in self.tickets]

    @property
    def free(self) -> list[int]:
        """Places that nobody plays."""
        return [each for each in self.indices if each not in self.started | self.ended | self.handed_out]

    @property
    def missing(self) -> list[int]:
        """Places that only this process could still end."""
        return [each for each in self.indices if each not in self.ended | self.handed_out]

    def push(self, records: Sequence[Trajectory | Mapping[str, Any]]) -> Steps[PushResult]:
        """Push several rollouts."""
        first = self.tickets[0]
        ready = prepare(records, first)
        result = yield from self.logic.push(ready, first.epoch, first.places)
        self.ended.update(trajectory.rollout_index for trajectory in ready)
        return result

    def end(
        self, indices: Sequence[int], kind: str, why: str = "", *, note: bool = True
    ) -> Steps[PushResult]:
        """End these places without a trajectory, for a reason of one line, which is logged with others (`note`)."""
        if not indices:
            return PushResult([])
        result = yield from self.logic.end_places(self.tickets[0], indices, kind)
        self.ended.update(indices)
        for index in result.indices:
            self.failures.setdefault(index, why or kind)
            if note:
                self.logic.failures.note(why or kind)
        return result

    def withdraw(self) -> Steps[PushResult]:
        """Cancel what is not ended, also what is being played."""
        self.withdrawn.update(self.missing)
        return (yield from self.end(self.missing, CANCELLED))

    def cancel(self, count: int | None, indices: Iterable[int] | None) -> Steps[PushResult]:
        """As `Group.cancel`."""
        if (count is None) == (indices is None):
            raise SettingError("cancel: give either count or indices")
        if indices is not None:
            chosen = list(dict.fromkeys(indices))
            for index in chosen:
                if isinstance(index, bool) or index not in self.indices:
                    raise TrajectoryError(
                        f"cancel: group {self.tickets[0].group_id} has no rollout {brief(index)}"
                    )
            result = yield from self.end(chosen, CANCELLED, note=False)
            self.withdrawn.update(result.indices)
            return result
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise SettingError(f"cancel: count is {brief(count)}, needs a whole number of rollouts")
        free = self.free
        if count > len(free):
            raise TrajectoryError(
                f"cancel: count is {count}, of group {self.tickets[0].group_id} {len(free)} rollouts are neither "
                f"started, handed out nor ended: name those that will not come with indices=[...]"
            )
        if not count:
            return PushResult([])
        result = yield from self.logic.cancel(self.tickets[0], count, free)
        self.ended.update(result.indices)
        self.withdrawn.update(result.indices)
        self.failures.update(dict.fromkeys(result.indices, CANCELLED))
        return result

    def leave(self, error: BaseException | None) -> Steps[PushResult]:
        """End what is left when the block of the group is left, by this exception or in the ordinary way."""
        if error is None:
            return (yield from self.end(self.missing, "failed", NOT_PUSHED))
        why = describe(error)
        why = why if why == CANCELLED else f"its group was left by {why}"
        return (yield from self.end(self.missing, kind_of(error), why))

    def conclude(self, index: int, outcome: Outcome) -> Steps[PushResult]:
        """What `play` has not ended itself ends as failed, with the reason."""
        if index in self.ended or (outcome.error is None and index in self.handed_out):
            return PushResult([])
        if outcome.error is None:
            return (yield from self.end([index], "failed", NOT_PUSHED))
        return (yield from self.end([index], kind_of(outcome.error), describe(outcome.error)))


def kind_of(error: BaseException) -> str:
    """How a rollout ends that this exception leaves."""
    return "failed" if isinstance(error, Exception) else CANCELLED


class AnyRollout:
    """What the two kinds of rollout share."""

    def __init__(self, places: Places, ticket: Ticket) -> None:
        self._places = places
        self.ticket = ticket
        """Its ticket, to be played elsewhere: `ticket.to_json()`."""
        self.group_id = ticket.group_id
        self.rollout_index = ticket.rollout_index
        self.model_version = ticket.model_version

    @property
    def ended(self) -> bool:
        """True once it was pushed, failed or cancelled through its group or this object."""
        return self.rollout_index in self._places.ended

    @property
    def cancelled(self) -> bool:
        """True when playing on is in vain: cancelled, or it would be dropped as stale (as of the last heartbeat)."""
        return self.rollout_index in self._places.withdrawn or self._places.logic.too_late(self.ticket)

    def _start(self) -> None:
        self._places.started.add(self.rollout_index)
        version = self._places.logic.version
        self.model_version = version if version is not None else self.model_version

    def _push(self, fields: dict[str, Any]) -> Steps[str]:
        self._places.started.add(self.rollout_index)
        fields.setdefault("model_version", self.model_version)
        ready = prepare([fields], self.ticket)
        result = yield from self._places.logic.push(ready, self.ticket.epoch, self.ticket.places)
        self._places.ended.add(self.rollout_index)
        return result.codes[0]

    def _fail(self, reason: str, detail: str) -> Steps[str]:
        if reason not in FAIL_REASONS:
            raise ValueError(f"reason is {reason!r}, needs 'failed' or 'aborted'")
        return self._end(reason, detail)

    def _end(self, reason: str, detail: str) -> Steps[str]:
        result = yield from self._places.end([self.rollout_index], reason, detail, note=bool(detail))
        return result.codes[0]


R = TypeVar("R", bound=AnyRollout)


class AnyGroup(Generic[R]):
    """What the two kinds of group share."""

    def __init__(self, places: Places, rollouts: list[R]) -> None:
        self._places = places
        self._rollouts = rollouts
        first = places.tickets[0]
        self.group_id = first.group_id
        self.size = first.group_size
        self.model_version = first.model_version

    @property
    def tickets(self) -> list[Ticket]:
        """One for each place, also the redundant ones.

        One whose `to_json` was called, or that was copied or sent to another process, counts as played by somebody
        else: `cancel(count)` and the end of the block leave its place alone.
        """
        return self._places.tickets

    @property
    def failures(self) -> Mapping[int, str]:
        """Why rollouts failed or were cancelled here: rollout_index -> one line."""
        return self._places.failures

    def __iter__(self) -> Iterator[R]:
        return iter(self._rollouts)

    def __len__(self) -> int:
        return len(self._rollouts)
