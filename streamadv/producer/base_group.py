"""The shared part of blocking and asyncio groups and rollouts: everything except carrying the steps out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, wraps
from numbers import Integral
from types import EllipsisType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from .. import metrics
from ..errors import SettingError, StreamadvError, TrajectoryError
from ..messages import brief, whole_number
from ..trajectory.members import Checked
from ..trajectory.packet_encoding import ended_packets
from ..trajectory.schema import Row, Step, Trajectory
from .failures import CANCELLED, NOT_PUSHED, Outcome, describe
from .logic import ProducerLogic
from .records import check_records, read_by_hand
from .requests import Steps, T
from .tickets import ANY_SLOT, GroupSpec, PushResult, Ticket, checked_ticket

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


class Slots:
    """The slots of one group, by rollout index.

    A slot is free until somebody plays it, here (`started`) or elsewhere (`handed_out`), and `ended` once.
    """

    def __init__(self, logic: ProducerLogic, ticket: Ticket, indices: Sequence[int]) -> None:
        """ticket: of one of the slots `indices`; nobody else holds tickets of these."""
        self.logic = logic
        self.ticket = ticket
        self.spec = GroupSpec.of(ticket)
        self.indices = indices
        self.handed_out: set[int] = set()  # tickets that have left this process: somebody plays them
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self.cancelled: set[int] = set()  # cancelled while they may still be played here
        self.failures: dict[int, str] = {}

    @classmethod
    def of_received(cls, logic: ProducerLogic, ticket: Ticket) -> Self:
        """The slot of a ticket that somebody else has handed out. Raises TrajectoryError for what is no ticket."""
        if not isinstance(ticket, Ticket):
            raise TrajectoryError(f"ticket is {brief(ticket)}, needs a Ticket: Ticket.from_json reads one")
        ticket.hand_out()
        checked = checked_ticket(ticket)
        return cls(logic, checked, [checked.rollout_index])

    @cached_property
    def tickets(self) -> list[Ticket]:
        """One for each slot. Made when they are asked for: who pushes the group whole needs none."""
        return [
            replace(self.ticket, rollout_index=index, metadata=dict(self.ticket.metadata)).watched_by(
                self.handed_out
            )
            for index in self.indices
        ]

    @property
    def free(self) -> list[int]:
        """Slots that nobody plays."""
        taken = self.started | self.ended | self.handed_out
        return [index for index in self.indices if index not in taken]

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has begun to play the group, here or elsewhere."""
        return not (self.started or self.ended or self.handed_out)

    @property
    def unfinished(self) -> list[int]:
        """Slots that only this process can still end."""
        gone = self.ended | self.handed_out
        return [index for index in self.indices if index not in gone]

    def push(
        self, records: Sequence[Trajectory | Mapping[str, Any]], ticket: Ticket | None = None
    ) -> Steps[PushResult]:
        """Push rollouts of the group; `ticket` fills in what a record leaves out. Without it each names its slot."""
        if ticket is None:  # a group of one slot leaves no choice
            ticket = self.ticket if self.ticket.slots == 1 else replace(self.ticket, rollout_index=ANY_SLOT)
        checked = read_by_hand(records, ticket)
        if checked is None:
            checked = [Checked.of(one) for one in check_records(records, ticket)]
        if not checked:
            return PushResult([])
        spec, pushes = self.spec._replace(data_source=checked[0].data_source), self.logic.pushes
        packets = yield from pushes.encode(checked)
        result = yield from pushes.send(spec, packets, ticket.epoch)
        self.ended.update([one.rollout_index for one in checked])
        return result

    def end(
        self, indices: Sequence[int], kind: str, why: str = "", *, note: bool = True
    ) -> Steps[PushResult]:
        """End slots without a trajectory. why: one line for `failures`, also logged if `note`."""
        if not indices:
            return PushResult([])
        packets = ended_packets(indices, kind, self.spec.role)
        result = yield from self.logic.pushes.send(self.spec, packets)
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
        if (count is None) == (indices is None):
            raise SettingError("cancel: give either count or indices")
        if count is not None:
            count, free = whole_number("cancel: count", count), self.free
            if count > len(free):
                raise TrajectoryError(
                    f"cancel: count is {count}, of group {self.ticket.group_id} {len(free)} rollouts are neither "
                    f"started, handed out nor ended: name those that will not come with indices=[...]"
                )
            if not count:
                return PushResult([])
            result = yield from self.logic.pushes.cancel(self.spec, count, free)
            self.ended.update(result.indices)
            self.cancelled.update(result.indices)
            self.failures.update(dict.fromkeys(result.indices, CANCELLED))
            return result
        asked = list(dict.fromkeys(() if indices is None else indices))
        for index in asked:
            if not isinstance(index, Integral) or isinstance(index, bool) or index not in self.indices:
                raise TrajectoryError(f"cancel: group {self.ticket.group_id} has no rollout {brief(index)}")
        result = yield from self.end(list(map(int, asked)), CANCELLED, note=False)
        self.cancelled.update(result.indices)
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


class BaseRollout:
    """What the two kinds of rollout share. Methods are those of the blocking one; `awaited` makes the others."""

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

    def push(
        self,
        /,
        *,
        reward: RewardArg = ...,
        rewards: MappingArg = None,
        reward_later: bool = False,
        status: str = "completed",
        role: str | None = None,
        model_version: VersionArg = ...,
        metadata: MappingArg = None,
        steps: StepsArg = None,
        rows: RowsArg = None,
        **columns: Any,
    ) -> str:
        """Push this rollout. Waits while the server is full.

        Optional arguments that are None are as not given, except `reward` and `model_version`.

        Returns 'pushed', 'duplicate' (the slot had ended before, nothing changed), 'surplus' or 'late' (its group had
        ended: complete without it, or expired). Raises TrajectoryError, naming field and value; ProducerClosedError.

        Args:
            reward: finite; None = unscorable. Left out, the run's scorers bring it.
            rewards: named components of the reward, for metrics and estimators; they do not replace `reward`.
            reward_later: `producer.score` brings the reward; else a push without one needs scorers.
            status: completed, truncated (ran into a limit), aborted or failed; the last two have no columns.
            role: that of its group by default, train or eval; baseline in a group of role train (counts for the group's
                statistics, is not trained on).
            model_version: policy version that generated it, or (oldest, newest); None = unknown. By default the newest
                one that the trainer had published when the rollout was started, else that of its ticket: give it where
                an engine loads weights later, or staleness is counted too low.
            metadata: a small JSON object, added to the group's; at most 32 levels deep.
            steps: turns in time order: `row`, `start`, `end` (token span, exclusive), `reward`, `state_key`.
            rows: several token sequences instead of one, each with its columns; then no columns stand beside.
            columns: of the one row, each [T] with T = prompt + response tokens; position t describes token t. Lists,
                numpy arrays or tensors. `input_ids` (int32) and `response_mask` (1 = generated by the policy, else 0)
                are required. Known: `rollout_log_probs`, `old_log_probs`, `ref_log_probs`, `teacher_log_probs`,
                `values`, `token_level_rewards`, `sum_pi_squared` (float32), `versions` (int32). Any other name is an
                extra column, carried to the trainer untouched. Large arrays may be sent again: see the producer's
                `resend_window`.
        """
        return self._producer._drive(  # type: ignore[no-any-return]
            self._push(
                reward=reward,
                rewards=rewards,
                reward_later=reward_later,
                status=status,
                role=role,
                model_version=model_version,
                metadata=metadata,
                steps=steps,
                rows=rows,
                **columns,
            )
        )

    def fail(self, reason: str = "failed", detail: str = "") -> str:
        """End this rollout without a trajectory: `reason` failed or aborted. `detail`: why, for the log."""
        if reason not in FAIL_REASONS:
            raise TrajectoryError(
                f"fail: reason is {brief(reason)}, needs 'failed' or 'aborted': put your own words into detail"
            )
        return self._producer._drive(self._end(reason, detail))  # type: ignore[no-any-return]

    def _push(self, **fields: Any) -> Steps[str]:
        self._slots.started.add(self.rollout_index)
        record = {name: value for name, value in fields.items() if value is not ...}
        record.setdefault("model_version", self.model_version)
        result = yield from self._slots.push([record], self.ticket)
        return result.codes[0]

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
        self._slots = Slots(producer._logic, ticket, range(ticket.slots))
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

    def __iter__(self) -> Iterator[R]:
        return iter(self._rollouts)

    @cached_property
    def _rollouts(self) -> list[R]:
        tickets = self._slots.tickets
        return [self._make_rollout(self._producer, self._slots, ticket) for ticket in tickets]

    def __len__(self) -> int:
        return len(self._slots.indices)

    def _to_play(self, retries: int) -> list[tuple[R, Outcome]]:
        """The rollouts that have not ended, with room for what becomes of each."""
        retries = whole_number("retries", retries)
        return [(rollout, Outcome(retries=retries)) for rollout in self if not rollout.ended]

    def _results(self, played: Sequence[tuple[R, Outcome]]) -> list[Any]:
        """What the calls of `play` returned. Raises as `Failures.exception_to_raise` decides."""
        outcomes = [outcome for _, outcome in played]
        failure = self._slots.logic.failures.exception_to_raise(outcomes)
        if failure is not None:
            raise failure
        return [outcome.result for outcome in outcomes]
