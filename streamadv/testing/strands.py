"""Strands: threads of which exactly one runs, and hands over at each door. Time is virtual.

Each strand is a real thread that waits for its turn, so that production code finds the locks, contexts and thread-local
data it is written for. Who goes next is decided by a heap of moments, in which equal ones keep their order.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

#: Seconds that one step takes.
STEP_S: Final = 1e-5
#: Of one schedule.
MOST_STEPS: Final = 30_000
#: Real seconds after which one step counts as stuck: it waits for something that is no door.
STUCK_S: Final = 200.0


class Killed(BaseException):
    """Raised at each door of a process that was killed."""


class Stuck(Exception):
    """The world cannot go on."""


class Process:
    """A simulated process: its strands die together."""

    def __init__(self, world: Scheduler, name: str) -> None:
        self.world = world
        self.name = name
        self.offset = 0.0  # seconds by which its wall clock is ahead
        self.dead = False
        self.began = world.time
        self.ended = math.inf  # when it was killed
        self.paused_until = 0.0
        self.moments = 0  # see `World.moment`
        self.breaks = ""  # how its last request broke the connection: cut, lost, or not at all
        self.due: Sequence[Any] = ()  # what is to befall its next request
        self.asked = 0.0  # when it sent its last request
        self.disturbances: list[tuple[float, float]] = []
        """From when to when something that befell one of its requests may have kept it from the server."""
        self.disturbed_until = -math.inf  # the end of the last of them
        self.strands: set[Strand] = set()
        self.requests: Counter[str] = Counter()  # by strand
        self._names: Counter[str] = Counter()
        self.errors: list[BaseException] = []  # what its strands have raised
        self.at_error: Callable[[Process, BaseException], object] = _raise_in_run
        self.at_death: list[Callable[[], object]] = []

    def label(self, name: str) -> str:
        """The name of a new strand, unique in this process and the same in every replay."""
        self._names[name] += 1
        count = self._names[name]
        return name if count == 1 else f"{name}.{count}"

    def kill(self) -> None:
        """From now on every door of this process raises Killed, and nothing it does has an effect."""
        if self.dead:
            return
        self.dead = True
        self.ended = self.world.time
        for strand in sorted(self.strands, key=lambda strand: strand.number):
            self.world.wake(strand)
        for call in self.at_death:
            call()


def _raise_in_run(process: Process, error: BaseException) -> None:
    """What an error of a process does, unless somebody says otherwise: whoever runs the world gets it."""
    process.world.failure = process.world.failure or error


class _Runner:
    """A real thread that carries strands out, one after another."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.strand: Strand | None = None
        self.thread = threading.Thread(target=self._loop, name="streamadv-strand", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while True:
            self.turn.acquire()
            strand = self.strand
            assert strand is not None
            strand.carry_out()
            self.strand = None
            _idle.append(self)
            strand.world.hand_over()


_idle: list[_Runner] = []


class Strand:
    """One thread of a process."""

    def __init__(self, process: Process, name: str, body: Callable[[], object], number: int) -> None:
        self.world = process.world
        self.process = process
        self.name = process.label(name)
        self.number = number
        self._body = body
        self.token = 0  # of the wait it is in
        self.ended = False
        self.at_end: Callable[[], object] = lambda: None
        self.runner = _idle.pop() if _idle else _Runner()
        self.runner.strand = self
        process.strands.add(self)

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"

    def carry_out(self) -> None:
        try:
            if not self.process.dead:
                self._body()
        except Killed:
            pass
        except BaseException as error:
            self.process.errors.append(error)
            if not self.process.dead:
                self.process.at_error(self.process, error)
        self.ended = True
        self.process.strands.discard(self)
        self.at_end()


class Scheduler:
    """Who runs when. `run` is called by a thread of the caller's, everything else by strands and events."""

    def __init__(self) -> None:
        self.time = 0.0
        self.steps = 0
        self.current: Strand | None = None
        self.failure: BaseException | None = None
        self._heap: list[tuple[float, int, Strand | None, int, Callable[[], object] | None]] = []
        self._numbers = itertools.count()
        self._main = threading.Lock()
        self._main.acquire()
        self._ends = False
        self._until: Callable[[], bool] = lambda: False

    def at(self, time: float, call: Callable[[], object]) -> None:
        """Make a call at this time, on whatever strand has its turn."""
        heapq.heappush(self._heap, (max(time, self.time), next(self._numbers), None, 0, call))

    def spawn(self, process: Process, name: str, body: Callable[[], object]) -> Strand:
        """A strand that begins when its turn comes."""
        strand = Strand(process, name, body, next(self._numbers))
        self.wake(strand)
        return strand

    def wake(self, strand: Strand, time: float = 0.0, token: int | None = None) -> None:
        """Let a strand that waits go on at this time. token: of the wait that is meant, any other one goes on."""
        if not strand.ended and token in (None, strand.token):
            if not strand.process.dead:
                time = max(time, strand.process.paused_until)
            entry = (max(time, self.time), next(self._numbers), strand, strand.token, None)
            heapq.heappush(self._heap, entry)

    def is_inside(self) -> bool:
        """Whether the caller is a strand of this world."""
        return self.current is not None and self.current.runner.thread is threading.current_thread()

    @property
    def process(self) -> Process:
        """The process that has its turn."""
        assert self.current is not None
        return self.current.process

    def check(self) -> None:
        """Raise Killed in a process that is dead."""
        if self.current is not None and self.current.process.dead:
            raise Killed

    def park(self, until: float = math.inf) -> None:
        """Wait until this time, or until `wake`. Raises Killed."""
        strand = self.current
        assert strand is not None
        self.check()
        if until < math.inf:
            self.wake(strand, until)
        if self.hand_over() is not strand:
            strand.runner.turn.acquire()
        self.check()

    def hand_over(self) -> Strand | None:
        """Let somebody go on who is not the caller; returns who."""
        caller, following = self.current, self._next()
        if following is None or following is not caller:
            (self._main if following is None else following.runner.turn).release()
        return following

    def _next(self) -> Strand | None:
        """Who goes on; calls that are due are made. None: the caller of `run`."""
        self.current = None
        try:
            while self._heap and self.failure is None and not self._until():
                time, _, strand, token, call = heapq.heappop(self._heap)
                if strand is not None and (strand.token != token or strand.ended):
                    continue
                self.time = max(self.time, time) + STEP_S
                self.steps += 1
                if self.steps > MOST_STEPS and not self._ends:
                    raise Stuck(f"{MOST_STEPS} steps, and no end: somebody asks without a pause")
                if strand is None:
                    assert call is not None
                    call()
                    continue
                strand.token += 1
                self.current = strand
                return strand
        except BaseException as error:
            self.failure = error
        return None

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until this holds, or nothing is left to happen. Raises what a call or check has raised."""
        self._until = until
        following = self._next()
        if following is not None:
            following.runner.turn.release()
            steps = self.steps
            while not self._main.acquire(timeout=STUCK_S):
                if self.steps == steps:
                    raise Stuck(f"{self.current} waits for what is no door of the world, or never waits")
                steps = self.steps
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def end(self, processes: list[Process]) -> None:
        """Kill everybody, and let their strands unwind."""
        self._ends = True
        for process in processes:
            process.kill()
        self._heap = [entry for entry in self._heap if entry[2] is not None]
        heapq.heapify(self._heap)
        for process in processes:
            for strand in sorted(process.strands, key=lambda strand: strand.number):
                self.wake(strand)
        self.run(lambda: False)
