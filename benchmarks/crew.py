"""Processes under measurement: start them, set their pace, and count what their sink receives."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Self

import redis

from streamadv.errors import ProcessEndedError
from streamadv.store.urls import environment_with

from .children import Child, Message, stop_all
from .pace import GO, WAIT

STALL_S: Final = 60.0
#: A sink that has received nothing for so long has nothing more to come.
QUIET_S: Final = 1.0
#: A window lasts until the sink has reported so often.
LEAST_REPORTS: Final = 6

#: Where the processes find `benchmarks`.
CHECKOUT: Final = str(Path(__file__).parents[1])

_TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Window:
    """What came out at the end within a time of steady work."""

    per_second: float
    cpu: dict[str, float]  # processor seconds per unit, by process
    waits: list[float]  # seconds from rollout end to receipt, where measured
    network: dict[str, float]  # bytes per unit that the servers took "in" and gave "out"


class Crew:
    """Named processes: sources that keep a `Pace`, of which one works at a time, and a sink that sends `received`.

    `sources`: their names. `ready`: how many of all say `ready`. `servers`: URLs of the servers behind `url`, if it
    names a cluster. Context manager: all have ended when it is left. The servers' processor time is counted with
    theirs.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        url: str,
        *sources: str,
        run: str | None = None,
        ready: int = 2,
        servers: Sequence[str] = (),
    ) -> None:
        self._commands = commands
        self._environment = {
            **environment_with(url, os.environ),
            "PYTHONPATH": os.pathsep.join(filter(None, [CHECKOUT, os.environ.get("PYTHONPATH")])),
            "STREAMADV_LOG_LEVEL": "warning",
            "STREAMADV_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            **({} if run is None else {"STREAMADV_RUN": run}),
        }
        self._sources = sources
        self._ready = ready
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._children: dict[str, Child] = {}
        self._stack = ExitStack()
        self._servers = [redis.Redis.from_url(server) for server in servers or [url]]

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="streamadv-bench-"))
        self._stack.callback(stop_all, self._children.values())
        for server in self._servers:
            self._stack.callback(server.close)
        self._folder = Path(folder)
        for name, command in self._commands.items():
            self.add(name, command)
        return self

    def add(self, name: str, command: Sequence[str]) -> None:
        """Start one more process."""
        log = self._folder / f"{name}.log"
        self._children[name] = Child(name, command, environment=self._environment, log=log, inbox=self._inbox)
        self._children[name].start()

    def kill(self, name: str) -> None:
        """One process less, as if its machine had died."""
        self._children.pop(name).kill()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_until_ready(self) -> None:
        """Until those that say `ready` have done so."""
        for _ in range(self._ready):
            while self._hear(STALL_S)["kind"] != "ready":
                pass

    def measure(self, seconds: float, warm_up: float, pace: str = GO, source: str | None = None) -> Window:
        """Work at this pace for so many seconds after a warm-up, then let it run dry. `source`: None = the first."""
        source = source or self._sources[0]
        idle = set(self._sources) - {source}
        self._children[source].ask(pace)
        first = self._receive(time.monotonic() + STALL_S)
        end = time.monotonic() + warm_up
        while first["at"] < end:
            first = self._receive(time.monotonic() + STALL_S)
        before, traffic = self._cpu(), self._traffic()
        last, count, reports = first, 0, 0
        waits: list[float] = []
        while last["at"] < end + seconds or reports < LEAST_REPORTS:
            last = self._receive(time.monotonic() + STALL_S)
            count += last["count"]
            reports += 1
            waits += last.get("waits", ())
        after, traffic_after = self._cpu(), self._traffic()
        self._run_dry(source)
        return Window(
            count / (last["at"] - first["at"]),
            {name: (spent - before[name]) / count for name, spent in after.items() if name not in idle},
            waits,
            {way: (number - traffic[way]) / count for way, number in traffic_after.items()},
        )

    def _run_dry(self, source: str) -> None:
        """Stop the source, and wait for what is under way."""
        self._children[source].ask(WAIT)
        while True:
            try:
                self._hear(QUIET_S)
            except TimeoutError:
                return

    def _receive(self, deadline: float) -> dict[str, Any]:
        while (message := self._hear(deadline - time.monotonic()))["kind"] != "received":
            pass
        return message

    def _hear(self, timeout: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError, and ProcessEndedError when a process has ended."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._inbox.get(timeout=max(0.0, min(0.5, deadline - time.monotonic())))[1]
            except Empty:
                for name, child in self._children.items():
                    if child.exit_status is not None:
                        raise ProcessEndedError(f"{name} ended: {child.log_tail()}") from None
                if time.monotonic() >= deadline:
                    if timeout < STALL_S - 1:
                        raise TimeoutError from None
                    tails = "; ".join(f"{name}: {child.log_tail()}" for name, child in self._children.items())
                    raise ProcessEndedError(f"nothing received for {timeout:.0f} s: {tails}") from None

    def _cpu(self) -> dict[str, float]:
        """Processor seconds spent by each process so far; all servers together."""
        infos: list[Any] = [server.info("cpu") for server in self._servers]
        spent = {"server": sum(info["used_cpu_sys"] + info["used_cpu_user"] for info in infos)}
        return spent | {name: _process_cpu(child.pid) for name, child in self._children.items()}

    def _traffic(self) -> dict[str, int]:
        infos: list[Any] = [server.info("stats") for server in self._servers]
        return {
            "in": sum(info["total_net_input_bytes"] for info in infos),
            "out": sum(info["total_net_output_bytes"] for info in infos),
        }


def middle(windows: Sequence[Window]) -> Window:
    """Medians of several windows."""
    return Window(
        statistics.median(window.per_second for window in windows),
        {name: statistics.median(w.cpu[name] for w in windows) for name in windows[0].cpu},
        [wait for window in windows for wait in window.waits],
        {way: statistics.median(w.network[way] for w in windows) for way in windows[0].network},
    )


def _process_cpu(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK  # user and system time, of all threads
