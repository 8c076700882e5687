"""Steps that the ranks of a job take together, through the key-value store of their process group.

In each step every rank reports, and rank 0 decides: it reads all reports and writes the outcome. So all ranks end a
step in the same way. There is no collective call: any backend will do, and a rank that fails in its part of a step
can report that while the others are in theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from .. import clock
from ..batch.hold import find_job
from ..errors import CheckpointError, SettingError
from ..extras import torch
from ..messages import one_line
from ..store.reasons import Reason
from ..store.waiting import Blocked
from .plan import Rank

#: Seconds between two looks at what the other ranks have said.
LOOK_S: Final = 0.05
DONE: Final = "+"
FAILED: Final = "-"


@dataclass(slots=True)
class Step:
    """What this rank says when it leaves a step, and, once the step is over, what each rank has said."""

    says: str = ""
    heard: list[str] = field(default_factory=list)


class Together:
    """One rank's part. All ranks make the same calls, of the same steps; a rank alone needs no process group.

    number: of the queue, see `batch.hold.count_queue`. pause: sleeps; raises when the queue is closed.
    """

    def __init__(self, run: str, rank: Rank, number: int, pause: Callable[[float], object]) -> None:
        self._run, self._rank, self._number, self._pause = run, rank, number, pause
        self._store: Any = None
        self._call = 0
        self._step = 0
        self._prefix = ""  # of the call's keys
        self._old: list[str] = []  # keys that nobody reads once all ranks have come to the next step
        self._blocked = Blocked("trainer", "waiting for other ranks", run)

    @property
    def leads(self) -> bool:
        return self._rank.number == 0

    def begin(self) -> None:
        """Begin a call. Calls are counted, so what an interrupted one has left is not taken for the next one's.

        Raises SettingError for several ranks without a process group.
        """
        if self._rank.world_size == 1:
            return
        self._store = _store(self._rank.world_size)
        if self._call:
            self._old.append(self._failed)
        self._call += 1
        self._step = 0
        self._prefix = f"streamadv/{self._run}/{find_job(self._number)}/{self._call}"

    @contextmanager
    def step(self, *, alone: bool = False) -> Iterator[Step]:
        """Left when rank 0 has decided what came of it. alone: it waits for nobody's word, the others wait for it.

        Raises CheckpointError for a rank that raised in its part, or does not leave within the process group's timeout.
        """
        step = Step()
        if self._rank.world_size == 1:
            yield step
            step.heard = [step.says]
            return
        self._step += 1
        try:
            yield step
            with _reached():
                step.heard = self._decide(step.says, alone) if self.leads else self._follow(step.says, alone)
        except BaseException as error:
            with suppress(CheckpointError), _reached():  # what has failed here is raised
                self._fail(error)
            raise
        self._blocked.over()

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}/{self._step}/{name}"

    @property
    def _failed(self) -> str:
        """The key of a rank that has left the call by an error."""
        return f"{self._prefix}/failed"

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks; too late for a step that rank 0 has decided."""
        told = isinstance(error, CheckpointError) and self.leads
        text = str(error) if told else f"rank {self._rank.number}: {type(error).__name__}: {error}"
        if self.leads:
            self._tell(FAILED + one_line(text))
        else:
            self._store.set(self._failed, one_line(text))

    def _tell(self, text: str) -> None:
        """Decide the step, if it is not decided."""
        key = self._key("decision")
        self._store.compare_set(key, "", text)
        self._old.append(key)

    def _decide(self, says: str, alone: bool) -> list[str]:
        """Rank 0: hear all ranks, and tell them what each has said."""
        missing = [] if alone else list(range(1, self._rank.world_size))
        keys = [self._key(rank) for rank in missing]
        end = clock.now() + self._timeout_s
        while missing and not self._store.check([self._failed]):
            while missing and self._store.check([self._key(missing[0])]):
                missing.pop(0)
            if missing:
                self._wait(missing[0], end)
        if not alone and self._store.check([self._failed]):
            raise CheckpointError(self._store.get(self._failed).decode())
        heard = [says, *(self._store.get(key).decode() for key in keys)]
        while not alone and self._old:
            self._store.delete_key(self._old.pop())
        self._tell(DONE + json.dumps(heard))
        return heard

    def _follow(self, says: str, alone: bool) -> list[str]:
        """Other ranks: say it, and wait for what rank 0 decides. Rank 0 may come late, and then wait for others."""
        own, decision = self._key(self._rank.number), self._key("decision")
        end = clock.now() + 2 * self._timeout_s
        if not alone:
            self._store.set(own, says)
        while not self._store.check([decision]):
            self._wait(0, end)
        text = self._store.get(decision).decode()
        if not alone:
            self._store.delete_key(own)
        if text.startswith(FAILED):
            raise CheckpointError(text.removeprefix(FAILED))
        heard: list[str] = json.loads(text.removeprefix(DONE))
        return heard

    @property
    def _timeout_s(self) -> float:
        seconds: float = self._store.timeout.total_seconds()
        return seconds

    def _wait(self, rank: int, end: float) -> None:
        if clock.now() > end:
            raise CheckpointError(
                f"rank {rank} has not come within {self._timeout_s:g} s, the timeout of the process group: look at "
                "that rank; every rank calls checkpoint and resume"
            )
        self._blocked.because(Reason("other_rank", f"rank {rank} has not come"))
        self._pause(LOOK_S)


@contextmanager
def _reached() -> Iterator[None]:
    """Raise CheckpointError for a store that does not answer: it ends with the process that holds it."""
    try:
        yield
    except torch.distributed.DistError as error:
        raise CheckpointError(
            f"the store of the process group does not answer ({one_line(str(error))}): the rank that holds it, "
            "mostly rank 0, has ended: start the job again, and queue.resume finds the last checkpoint"
        ) from None


def _store(world_size: int) -> Any:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise SettingError(
            f"world_size is {world_size} and there is no process group, by which the ranks wait for each other: "
            "call torch.distributed.init_process_group first, or save state_dict() and call commit yourself"
        )
    return torch.distributed.distributed_c10d._get_default_store()
