"""A simulated world: processes, a server and a clock, of which a seed decides who goes next and what fails."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import os
import queue
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Self
from unittest.mock import patch

from .. import clock, doors
from ..store.clients import SOCKET_TIMEOUT
from .async_wire import AsyncConnection, Loop
from .plan import Choices, Plan
from .server import EPOCH_S, Server
from .strands import Killed, Process, Scheduler, Stuck
from .waits import Event, Queue, RLock, Thread
from .wire import URL, Commands, Connection

__all__ = ["URL", "Killed", "Stuck", "World"]

#: Kinds of what may happen with a request -> what follows the kind: see `World.befall`.
KINDS: Final = (
    "slow",
    "late",
    "cut",
    "lost",
    "kill",
    "die",
    "crash",
    "refuse",
    "forget",
    "jump",
    "pause",
    "set",
)
#: Seconds in which a client notices that a reply does not come, and tries again.
TIMEOUT_S: Final = 15.0
#: Seconds in which it tries again when it has been told, or was late itself.
AGAIN_S: Final = 3.0
#: Kinds that most schedules have alone, so that what follows from few faults is not drowned by the others.
MODES: Final = (
    ("crash", "refuse", "forget", "jump", "slow"),
    ("slow", "late", "cut", "lost"),
    ("crash", "kill", "die", "pause"),
    KINDS,
)
#: How often a connection that has broken breaks again at the next request of its process.
BREAKS_AGAIN: Final = 0.25
#: What may follow the death of a server, or a jump of its clock, how many seconds later, and how often something does.
FOLLOWERS: Final = ("crash", "refuse", "jump", "kill", "pause", "pause")
FOLLOWS_S: Final = (0.0, 0.0, 0.5, 2.0, 6.0, 11.0)
FOLLOWS: Final = 0.4
_SECONDS: Final = (0.002, 0.01, 0.05, 0.2, 0.6, 1.5, 4.0, 12.0)


class World(Scheduler):
    """One simulated world. `with World(seed) as world:` takes the doors of this process over.

    seed: decides who goes next and what fails. choices: replays a schedule, see `choices` of the world that had it.
    faults: kinds that a seed may draw, by default some of all of them.
    """

    def __init__(
        self, seed: int | str = 0, *, choices: Mapping[str, Any] | None = None, faults: Sequence[str] = KINDS
    ) -> None:
        super().__init__()
        self.plan = Plan(seed, choices)
        self.server = Server(lambda: self.time, self._came)
        self.processes: list[Process] = []
        self.is_calm = False
        """No more faults."""
        self.log: list[str] | None = None
        """Set to a list, it gets a line for each step."""
        self.lost: list[tuple[float, float]] = []
        """When the server lost writes: at which time, and from which time on."""
        self.at_loss: list[Callable[[], object]] = []
        """Called when it has lost some."""
        self.was_full = False
        """Whether the server was above maxmemory."""
        self.jumps: list[tuple[float, float]] = []
        """When the server's clock has jumped, and how far."""
        self.outages: list[tuple[float, float]] = []
        """From when to when the server was away, or refused something."""
        self.disturbed_until = 0.0
        """Until when the server was away, or refused all or all writes."""
        self.refused_until = -math.inf
        """Until when it refused all or all writes."""
        self.is_over = False
        self._troubles = 0
        self._trace = hashlib.blake2b(digest_size=8)
        self._waiting: dict[bytes, list[Callable[[], object]]] = {}
        self._names = random.Random(0)
        self._starts = Counter[str]()
        source = self.plan._random
        mode = source.choice(MODES)
        self._rates = _rates(source, [kind for kind in faults if kind in mode])
        self._moments = [kind for kind in faults if kind in mode and kind in ("crash", "kill", "cut")]
        self._followers = [kind for kind in FOLLOWERS if kind in faults]
        self._moment_rate = source.choice((0.0, 0.03, 0.1, 0.2)) if self._moments else 0.0

    @property
    def choices(self) -> Choices:
        """The choices that make this schedule what it is: give them to another world to have it again."""
        return self.plan.taken

    @property
    def trace(self) -> str:
        """A digest of every request so far."""
        return self._trace.hexdigest()

    # Doors

    def __enter__(self) -> Self:
        self._outside_now = clock.now
        self._before = stack = ExitStack()
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()  # what ends by chance would end elsewhere in a replay
        stack.callback(random.setstate, random.getstate())
        random.seed(0)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of processes that were killed
        stack.enter_context(patch.object(sys, "unraisablehook", lambda _: None))
        stack.enter_context(patch.object(clock, "now", self._now))
        stack.enter_context(patch.multiple(doors, **{name: door(self) for name, door in _DOORS.items()}))
        Connection.network = AsyncConnection.network = self
        for options, kind in (
            (doors.client_options, Connection),
            (doors.async_client_options, AsyncConnection),
        ):
            stack.enter_context(patch.dict(options, connection_class=kind, driver_info=None))
        return self

    def __exit__(self, *_: object) -> None:
        with self._before:
            self.is_calm = self.is_over = True
            self.end(self.processes)
            gc.collect(0)  # what was made in here: coroutines of processes that were killed end in silence

    def _now(self) -> float:
        return self.time if self.is_inside() else self._outside_now()

    def wall(self) -> float:
        """The wall clock of the process that has its turn."""
        return EPOCH_S + self.time + self.process.offset

    # Processes

    def start(self, name: str, main: Callable[[], object]) -> Process:
        """A process that runs `main`. An exception that it raises is raised by `run`, or goes to its `at_error`.

        A name that was used before gets a number, because the labels of choices have to be those of one process.
        """
        self._starts[name] += 1
        process = Process(self, name if self._starts[name] == 1 else f"{name}.{self._starts[name]}")
        self.processes.append(process)
        self.spawn(process, "main", main)
        return process

    def run_async(self, main: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine function in an event loop of the world, in the strand that calls."""
        loop = Loop(self)
        try:
            return loop.run_until_complete(_awaited(main))
        finally:
            asyncio._set_running_loop(None)
            loop.close()

    def sleep(self, seconds: float) -> None:
        """Let time go by in the strand that calls."""
        until = self.time + seconds
        while self.time < until:
            self.park(until)

    # Faults

    def deviation(self, process: Process, strand: str, commands: Commands) -> Sequence[Any]:
        """What is to happen with a request of this strand."""
        number = process.requests[strand] = process.requests[strand] + 1
        process.asked = self.time
        label = f"{process.name}/{strand}#{number}"
        shown = [f"{each[0].decode()} {each[1].decode()[:8] if len(each) > 1 else ''}" for each in commands]
        self._note(f"{self.time:.5f} {label} {' '.join(shown)}")
        if self.is_calm:
            return ()
        chosen, process.due = process.due, ()
        chosen = chosen or self.plan.choose(label, partial(self._draw, process)) or ()
        process.breaks = chosen[0] if chosen and chosen[0] in ("cut", "lost") else ""
        if chosen:
            seconds = chosen[1] if chosen[0] in ("slow", "late", "pause") else 0.0
            times_out = chosen[0] in ("slow", "late") and seconds >= SOCKET_TIMEOUT
            until = self.time + seconds + (TIMEOUT_S if times_out else AGAIN_S)
            process.disturbances.append((self.time, until))
            process.disturbed_until = max(process.disturbed_until, until)
        return chosen

    def moment(self) -> None:
        """The process that has its turn has done something: it may be killed or cut off soon, or the server dies."""
        process = self.process
        process.moments += 1

        def draw(source: random.Random) -> Any:
            if source.random() >= self._moment_rate:
                return None
            return [source.choice((0.0, 0.1, 0.5, 1.5)), *_drawn(source.choice(self._moments), source)]

        if self.is_calm or not (chosen := self.plan.choose(f"{process.name}!{process.moments}", draw)):
            return
        seconds, *fault = chosen

        def befall() -> None:
            if fault[0] == "cut":
                process.due = fault
            elif not (process.dead or self.is_calm):
                self.befall(process, fault, after=fault[0] == "crash")

        self.at(self.time + seconds, befall)

    def _draw(self, process: Process, source: random.Random) -> Any:
        if process.breaks and source.random() < BREAKS_AGAIN:
            return [process.breaks]
        at = source.random()
        for kind, rate in self._rates.items():
            at -= rate
            if at < 0:
                return _drawn(kind, source)
        return None

    def _note(self, line: str) -> None:
        self._trace.update(line.encode())
        if self.log is not None:
            self.log.append(line)

    def befall(self, process: Process, deviation: Sequence[Any], after: bool) -> None:
        """Let happen what does not concern the connection alone, before or after the request has its effect."""
        if not deviation or self.is_calm:  # drawn before
            return
        kind, *given = deviation
        if after != (kind in ("die", "crash")):
            return
        self._note(f"{process.name} {'after' if after else 'before'} {deviation}")
        match kind:
            case "kill" | "die":
                process.kill()
            case "crash":
                self.crash(*given)
            case "refuse":
                self.refuse(*given)
            case "forget":
                self.server.forget_scripts()
            case "jump":
                self.jump(*given)
            case "pause":
                self._pause(process, given[0])
            case "set":
                process.offset += given[0]

    def jump(self, seconds: float) -> None:
        self.server.offset += seconds
        self.jumps.append((self.time, seconds))
        self._follow()

    def crash(self, lost_s: float, down_s: float) -> None:
        """The server dies, comes back after a while, and has lost the writes of the last seconds."""
        lost = self.server.die(lost_s)
        if lost:
            self.lost.append((self.time, min(lost)))
            for call in self.at_loss:
                call()
        self._disturb()
        self.outages.append((self.time, self.time + down_s))
        self.disturbed_until = max(self.disturbed_until, self.time + down_s)
        self.at(self.time + down_s, lambda: setattr(self.server, "is_up", True))
        self._follow()

    def _follow(self) -> None:
        """Trouble seldom comes alone: something else befalls a process, or the server, soon after."""
        self._troubles += 1

        def draw(source: random.Random) -> Any:
            alive = [process.name for process in self.processes if not process.dead]
            if not (self._followers and alive) or source.random() >= FOLLOWS:
                return None
            fault = _drawn(source.choice(self._followers), source)
            return [source.choice(FOLLOWS_S), source.choice(alive), *fault]

        if self.is_calm or not (chosen := self.plan.choose(f"trouble{self._troubles}/then", draw)):
            return
        seconds, name, *fault = chosen

        def befall() -> None:
            for process in self.processes:
                if process.name == name and not (process.dead or self.is_calm):
                    self.befall(process, fault, after=fault[0] == "crash")

        self.at(self.time + seconds, befall)

    def refuse(self, what: str, seconds: float) -> None:
        """The server answers with this error for a while."""
        if self.server.refusal is None:
            self.server.refusal = what
            self.was_full = self.was_full or what == "oom"
            self.outages.append((self.time, self.time + seconds))
            if what != "oom":
                self.refused_until = self.time + seconds
                self.disturbed_until = max(self.disturbed_until, self.refused_until)
            self.at(self.time + seconds, lambda: setattr(self.server, "refusal", None))

    def _pause(self, process: Process, seconds: float) -> None:
        """The process stands still: what it waits for comes later."""
        until = self.time + seconds
        entries = []
        for time_, number, strand, token, call in self._heap:
            if strand is not None and strand.process is process:
                time_ = max(time_, until)
            entries.append((time_, number, strand, token, call))
        entries.sort()
        self._heap[:] = entries
        process.paused_until = until
        process.disturbances.append((self.time, until + AGAIN_S))
        process.disturbed_until = max(process.disturbed_until, until + AGAIN_S)

    # Blocking reads

    def wait_for_entries(self, keys: Sequence[bytes], call: Callable[[], object]) -> None:
        """Make the call once an entry has come to one of these streams."""
        for key in keys:
            self._waiting.setdefault(key, []).append(call)

    def _came(self, keys: set[bytes]) -> None:
        for key in sorted(keys):
            for call in self._waiting.pop(key, ()):
                self.at(self.time, call)

    def _disturb(self) -> None:
        """Everybody who waits for the server hears that it has gone."""
        self._came(set(self._waiting))

    def random_bytes(self, count: int) -> bytes:
        """Names that are the same in every replay."""
        return self._names.randbytes(count)


async def _awaited(main: Callable[[], Awaitable[Any]]) -> Any:
    return await main()


def _outside(world: World, inside: Callable[..., Any], outside: Callable[..., Any]) -> Callable[..., Any]:
    """A door that leads into the world for its strands only."""

    def door(*args: Any, **kwargs: Any) -> Any:
        return inside(*args, **kwargs) if world.is_inside() else outside(*args, **kwargs)

    return door


_DOORS: Final[Mapping[str, Callable[[World], Any]]] = {
    "Event": lambda world: _outside(world, lambda: Event(world), threading.Event),
    "Thread": lambda world: _outside(world, lambda **given: Thread(world, **given), threading.Thread),
    "RLock": lambda world: _outside(world, lambda: RLock(world), threading.RLock),
    "Queue": lambda world: _outside(world, lambda size=0: Queue(world, size), queue.Queue),
    "SimpleQueue": lambda world: _outside(world, lambda: Queue(world), queue.SimpleQueue),
    "wall": lambda world: _outside(world, world.wall, time.time),
    "pause": lambda world: _outside(world, world.sleep, time.sleep),
    "random_bytes": lambda world: _outside(world, world.random_bytes, os.urandom),
}


def _rates(source: random.Random, faults: Sequence[str]) -> dict[str, float]:
    """How often each kind of fault is drawn for a request of this schedule: most schedules have a few kinds only."""
    delays, clocks = (0.0, 0.0, 0.02, 0.1, 0.3), ((0.0,) * 4 + (0.001, 0.003))
    rates = {"slow": delays, "late": delays, "jump": clocks, "set": clocks}
    others = (0.0, 0.0, 0.0, 0.001, 0.003, 0.01, 0.03)
    return {kind: source.choice(rates.get(kind, others)) for kind in faults}


_JUMPS_S: Final = (-7200.0, -30.0, 30.0, 7200.0)
#: What is drawn for a kind of fault, each from these.
_GIVEN: Final[Mapping[str, tuple[Sequence[Any], ...]]] = {
    "slow": (_SECONDS,),
    "late": (_SECONDS,),
    "pause": ((1.0, 5.0, 12.0, 35.0),),
    "crash": ((0.0, 0.05, 0.3, 1.0, 2.0), (0.0, 0.1, 1.0, 5.0)),
    "refuse": (("loading", "busy", "readonly", "misconf", "oom", "oom"), (0.1, 2.0, 10.0, 45.0)),
    "jump": (_JUMPS_S,),
    "set": (_JUMPS_S,),
}


def _drawn(kind: str, source: random.Random) -> list[Any]:
    return [kind, *map(source.choice, _GIVEN.get(kind, ()))]
