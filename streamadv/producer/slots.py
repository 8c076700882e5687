"""This process's view of a group's slots (free, started, handed out, ended), and the steps that end slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import Any, Self

from .. import metrics
from ..errors import SettingError, StreamadvError, TrajectoryError
from ..messages import brief
from ..trajectory.schema import Trajectory
from .failures import CANCELLED, NOT_PUSHED, Outcome, describe
from .logic import ProducerLogic
from .records import read_records
from .requests import Steps
from .tickets import ANY_SLOT, PushResult, Ticket


class Slots:
    """The slots of one group, by rollout index.

    A slot is free until somebody plays it, here (`started`) or elsewhere (`handed_out`), and `ended` once.
    """

    def __init__(self, logic: ProducerLogic, ticket: Ticket, indices: Sequence[int]) -> None:
        """ticket: of one of the slots `indices`; nobody else holds tickets of these."""
        self.logic = logic
        self.ticket = ticket
        self.indices = indices
        self.handed_out: set[int] = set()  # tickets that have left this process: somebody plays them
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self.cancelled: set[int] = set()  # cancelled while they may still be played here
        self.failures: dict[int, str] = {}

    @classmethod
    def of_group(cls, logic: ProducerLogic, ticket: Ticket) -> Self:
        """All slots of the group that has just been begun. ticket: its first one."""
        return cls(logic, ticket, range(ticket.slots))

    @classmethod
    def of_received(cls, logic: ProducerLogic, ticket: Ticket) -> Self:
        """The slot of a ticket that somebody else has handed out. Raises TrajectoryError for what is no ticket."""
        if not isinstance(ticket, Ticket):
            raise TrajectoryError(f"ticket is {brief(ticket)}, needs a Ticket: Ticket.from_json reads one")
        ticket.hand_out()
        return cls(logic, replace(ticket), [ticket.rollout_index])

    @cached_property
    def tickets(self) -> list[Ticket]:
        """One for each slot. Made when they are asked for: who pushes the group whole needs none."""
        tickets = [
            replace(self.ticket, rollout_index=index, metadata=dict(self.ticket.metadata))
            for index in self.indices
        ]
        return [ticket.watched_by(self.handed_out) for ticket in tickets]

    @cached_property
    def _of_any_slot(self) -> Ticket:
        """What all rollouts of the group share; a group of one slot leaves no choice."""
        return self.ticket if self.ticket.slots == 1 else replace(self.ticket, rollout_index=ANY_SLOT)

    @property
    def free(self) -> list[int]:
        """Slots that nobody plays."""
        taken = self.started | self.ended | self.handed_out
        return [index for index in self.indices if index not in taken]

    @property
    def unfinished(self) -> list[int]:
        """Slots that only this process can still end."""
        gone = self.ended | self.handed_out
        return [index for index in self.indices if index not in gone]

    def push(
        self, records: Sequence[Trajectory | Mapping[str, Any]], ticket: Ticket | None = None
    ) -> Steps[PushResult]:
        """Push rollouts of the group; `ticket` fills in what a record leaves out. Without it each names its slot."""
        ticket = ticket or self._of_any_slot
        checked = read_records(records, ticket)
        result = yield from self.logic.pushes.push(checked, ticket)
        self.ended.update([one.rollout_index for one in checked])
        return result

    def end(
        self, indices: Sequence[int], kind: str, why: str = "", *, note: bool = True
    ) -> Steps[PushResult]:
        """End slots without a trajectory. why: one line for `failures`, also logged if `note`."""
        if not indices:
            return PushResult([])
        result = yield from self.logic.pushes.end_slots(self.ticket, indices, kind)
        self.ended.update(indices)
        for index in result.indices:
            self.failures.setdefault(index, why or kind)
            if note:
                self._note(why or kind)
        return result

    def _note(self, why: str) -> None:
        group_id = self.ticket.group_id  # not in the reason, so that the log can count what is alike
        self.logic.failures.note(why.replace(f"group {group_id}, ", ""), group_id)

    def end_after_error(self, index: int, error: BaseException) -> Steps[PushResult]:
        """End the slot of a rollout that an exception has left."""
        return self.end([index], "failed" if isinstance(error, Exception) else CANCELLED, describe(error))

    def cancel_unfinished(self) -> Steps[PushResult]:
        """Cancel every unfinished slot, also those that are being played."""
        self.cancelled.update(self.unfinished)
        return (yield from self.end(self.unfinished, CANCELLED, note=False))

    def cancel(self, count: int | None, indices: Iterable[int] | None) -> Steps[PushResult]:
        """Cancel by count or by indices, as `Group.cancel`."""
        if count is not None and indices is None:
            return (yield from self._cancel_count(count))
        if indices is not None and count is None:
            return (yield from self._cancel_indices(list(dict.fromkeys(indices))))
        raise SettingError("cancel: give either count or indices")

    def _cancel_indices(self, indices: list[int]) -> Steps[PushResult]:
        for index in indices:
            if not isinstance(index, Integral) or isinstance(index, bool) or index not in self.indices:
                raise TrajectoryError(f"cancel: group {self.ticket.group_id} has no rollout {brief(index)}")
        result = yield from self.end(indices, CANCELLED, note=False)
        self.cancelled.update(result.indices)
        return result

    def _cancel_count(self, count: int) -> Steps[PushResult]:
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise SettingError(f"cancel: count is {brief(count)}, needs a whole number of rollouts")
        free = self.free
        if count > len(free):
            raise TrajectoryError(
                f"cancel: count is {count}, of group {self.ticket.group_id} {len(free)} rollouts are neither "
                f"started, handed out nor ended: name those that will not come with indices=[...]"
            )
        if not count:
            return PushResult([])
        result = yield from self.logic.pushes.cancel(self.ticket, count, free)
        self.ended.update(result.indices)
        self.cancelled.update(result.indices)
        self.failures.update(dict.fromkeys(result.indices, CANCELLED))
        return result

    def end_block(self, error: BaseException | None) -> Steps[PushResult]:
        """End the unfinished slots when the `with` block of the group ends. error: that left the block, or None."""
        if error is None:
            return (yield from self.end(self.unfinished, "failed", NOT_PUSHED))
        why = describe(error)
        if why == CANCELLED:
            return (yield from self.cancel_unfinished())
        return (yield from self.end(self.unfinished, "failed", f"its group was left by {why}"))

    def is_played_again(self, index: int, outcome: Outcome, seconds: float) -> bool:
        """Whether the slot is played once more; then the outcome of this play, which took so long, is forgotten."""
        taken = index in self.ended or index in self.handed_out
        if taken or not outcome.retries or self.logic.membership.is_in_vain(self.ticket):
            return False
        error = outcome.error
        of_the_run = isinstance(error, StreamadvError) and not isinstance(error, TrajectoryError)
        if of_the_run or not isinstance(error, Exception | None):
            return False
        why = NOT_PUSHED if error is None else describe(error)
        self._note(f"{why}, played again")
        metrics.rollout_replayed(seconds)
        outcome.retries, outcome.error, outcome.result = outcome.retries - 1, None, None
        return True

    def end_after_play(self, index: int, outcome: Outcome) -> Steps[PushResult]:
        """End the slot of a rollout that the user's function has left without ending it."""
        if index in self.ended or (outcome.error is None and index in self.handed_out):
            return PushResult([])
        if outcome.error is None:
            return (yield from self.end([index], "failed", NOT_PUSHED))
        return (yield from self.end_after_error(index, outcome.error))
