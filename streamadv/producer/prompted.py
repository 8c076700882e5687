"""Groups of prompts for `Producer.prompts`: lease prompts, begin their groups, until all have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .. import doors, metrics
from ..errors import GroupEndedError, RunEndedError
from ..prompts.figures import by_source
from ..prompts.prompts import Prompts
from ..prompts.steps import Lease, describe, give_back, lease, read_ends, select, skip
from ..store.reasons import Reason
from ..store.replies import as_count, as_text
from ..store.scripts import ScriptCall
from ..store.waiting import Blocked, Wait
from .admission import BeginCall
from .requests import STAGE, GroupCall, Pause, Steps
from .tickets import GroupRequest, GroupSpec, Ticket, check_group

if TYPE_CHECKING:
    from .base_group import BaseGroup, Slots
    from .logic import ProducerLogic

G = TypeVar("G", bound="BaseGroup[Any]")

#: Of a lease: so many that its entry is longer than 64 bytes, and servers keep the entries in a table, not in a list.
NONCE_BYTES: Final = 28


@dataclass(eq=False)
class Given:
    """A group that the user has. Its prompt goes to somebody else if the producer leaves before anybody plays it."""

    prompted: PromptedGroups
    lease: Lease
    group_id: str
    nonce: str  # of the call that has begun it
    slots: Slots | None = None


class PromptedGroups:
    """The groups of one iterator. A prompt stays leased until its group has ended, whoever plays it.

    While all prompts are begun and some have not ended, the producer counts as finished, so that the trainer takes what
    is there for its last batches; it is open again before it leases another one. What is leased and not begun is given
    back before the producer says that it has finished or gone.
    """

    def __init__(self, logic: ProducerLogic, prompts: Prompts, request: GroupRequest) -> None:
        """request: of each group, without what the prompt decides."""
        self._logic = logic
        self._prompts = prompts
        self._request = request
        self._spec: GroupSpec | None = None  # what all groups share
        self._nonce = ""  # of leases that were asked for, while there is no answer
        self._leases: tuple[Lease, ...] = ()  # not begun yet; another thread may give them back
        self._admitting: Lease | None = None  # the one that is being begun
        self._last: Given  # the group that was begun last
        self._is_loop = False  # somebody loops over it: the run does not end while there is more for him
        self.is_left = False  # nobody will ask for more
        logic.prompted.append(self)
        self._wait = Wait(
            Blocked(logic.membership.who, "all prompts are begun", logic.membership.run), cap=1.0
        )

    def next(self) -> Steps[tuple[Any, Ticket] | None]:
        """The next prompt and the first ticket of its group; None when all have ended, or the trainer ended the run.

        Raises what `Admission.begin` raises, and SettingError for prompts that are not those of the run.
        """
        if not self._is_loop:
            self._is_loop = True
            self._logic.membership.loops.append(self._prompts.set.name)
        while True:
            leases = self._leases or (yield from self._find())
            if not leases:
                self.rest()
                return None
            leased = leases[0]
            source, position = map(int, leased.item.split())
            place = name, epoch, index = self._prompts.set.locate(source, position)
            if self._spec is None:
                numbers = {"prompt": index, "epoch": epoch}
                metadata = {**(self._request.metadata or {}), **numbers}
                redundancy = self._logic.membership.manifest.redundancy
                self._spec = check_group(self._request._replace(metadata=metadata), redundancy)
            spec = self._spec._replace(
                group_id=self._prompts.set.id_of(place, leased.number),
                data_source=name or None,
                metadata={**self._spec.metadata, "prompt": index, "epoch": epoch},
            )
            try:
                self._admitting = leased
                prompt = self._prompts.item(source, index)  # it may raise: before the group is begun
                call = BeginCall()
                [ticket] = yield from self._logic.admission.begin(spec, self._request.timeout, call)
            except GroupEndedError:  # somebody has played it: its end is under way
                yield give_back(self._home, self._prompts.set.name, [leased], what="ended")
                self._forget([leased])
                continue
            except RunEndedError:
                yield from self.close()
                return None
            finally:
                self._admitting = None
            self._forget([leased])
            self._last = Given(self, leased, ticket.group_id, call.nonce)
            self._logic.given.append(self._last)
            return prompt, ticket

    def given(self, group: G) -> G:
        """This group, of the prompt that `next` has returned, which the user gets now."""
        self._last.slots = group._slots
        return group

    def take_back(self, given: Iterable[Given]) -> Steps[None]:
        """A producer leaves whose user has not begun to play these groups: others do it."""
        leases = []
        for each in given:
            if (yield self._logic.admission.withdrawal(each.group_id, each.nonce)):
                leases.append(each.lease)
        if leases:
            yield give_back(self._home, self._prompts.set.name, leases)

    def close(self) -> Steps[None]:
        """Nobody will ask for more."""
        self.is_left = True
        self.rest()
        yield from self.give_back()
        if self._logic.membership.finished and not self._logic.membership.closed:  # it may hold up the end
            yield from self._logic.membership.send_heartbeat()

    def give_back(self, *, asks: bool = False) -> Steps[None]:
        """Prompts that were leased and not begun are there for others. asks: not those that are being leased."""
        leases = [lease for lease in self._leases if self.is_left or lease != self._admitting]
        nonce = "" if asks else self._nonce
        if leases or nonce:
            yield give_back(self._home, self._prompts.set.name, leases, nonce)
            self._forget(leases)
            self._nonce = "" if self._nonce == nonce else self._nonce
        if self.is_left and self in self._logic.prompted:
            self._logic.prompted.remove(self)

    def rest(self) -> None:
        """Nobody loops over it for now."""
        if self._is_loop:
            self._is_loop = False
            self._logic.membership.loops.remove(self._prompts.set.name)

    def forget(self) -> None:
        """In a child of the process (fork): they are its parent's."""
        self._leases, self._nonce = (), ""

    @property
    def holds(self) -> bool:
        """Whether prompts are leased, or may be, that are not begun."""
        return bool(self._leases or self._nonce)

    def _forget(self, leases: Sequence[Lease]) -> None:
        """These are begun, have ended, or are given back."""
        if self._leases[: len(leases)] == tuple(leases):  # mostly the first one
            self._leases = self._leases[len(leases) :]
        else:
            self._leases = tuple(lease for lease in self._leases if lease not in leases)

    @property
    def _home(self) -> Any:
        return self._logic.membership.manifest.keys.home

    def _find(self) -> Steps[tuple[Lease, ...]]:
        """Lease prompts, waiting for some; () when none will come."""
        membership = self._logic.membership
        while not (leases := self._leases):
            self._nonce = doors.random_bytes(NONCE_BYTES).hex()
            reply = yield self._call()
            self._nonce = ""
            state = reply[0]
            if state == b"unknown":
                yield from describe(self._home, self._prompts.set)
            elif state in (b"leased", b"again"):
                self._wait.over()
                entry = as_text(reply[1])
                self._leases += tuple(Lease(as_text(item), entry) for item in reply[2:])
                if self._prompts.set.skip_solved and state == b"leased":  # what was solved in the last epochs
                    leases = self._leases
                    skipped: list[int] = yield skip(self._home, self._prompts.set, leases)
                    self._forget([one for one, is_skipped in zip(leases, skipped, strict=True) if is_skipped])
            elif state == b"select":
                # The user's function says shares, which the run notes unless another producer was first.
                ends = yield from read_ends(membership.manifest.keys)
                weights = self._prompts._weights_for(by_source(self._prompts.set, ends))
                yield select(self._home, self._prompts.set, as_count(reply[1]), weights)
            elif state == b"some":
                yield from membership.reopen()
            elif state == b"over" or membership.has_run_ended:
                self._wait.over()
                if not membership.finished:
                    yield from self._logic.say_finished()
                return ()
            else:
                yield from self._pause(as_count(reply[1]) if state == b"wait" else 0)
        return leases

    def _call(self) -> GroupCall:
        is_first, finished = True, self._logic.membership.finished
        nonce = self._nonce  # a heartbeat may give it back before the call is repeated

        def make() -> ScriptCall:
            nonlocal is_first
            mode = "ask" if finished else "lease" if is_first else "repeat"
            is_first = False
            return lease(self._home, self._prompts.set, mode, nonce, self._logic.membership.owner)

        return GroupCall(make)

    def _pause(self, left: int) -> Steps[None]:
        """Wait for what was begun to end: it is played again, or the trainer commits it."""
        others = [each for each in self._logic.prompted if each.holds and each is not self]
        for other in others:  # they are asked for more later, or never
            yield from other.give_back(asks=True)
        if left and not self._logic.membership.finished and not any(other.holds for other in others):
            yield from self._logic.say_finished()
        name = self._prompts.set.name
        self._wait.because(Reason("prompts_begun", f"prompts {name}: {left} are begun and have not ended"))
        with metrics.wait(STAGE):
            yield Pause(self._wait.delay())
