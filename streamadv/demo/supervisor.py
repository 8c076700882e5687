"""Conducts the demo: starts every process, kills three of them at 40 %, starts new ones, and ends in order."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from ..errors import ProcessEndedError
from ..processes.children import Child, Message, stop_all
from ..run import open_run
from ..run.manifest import RunSettings
from ..status import Status, read_status
from ..store.connection import Connection
from ..store.credentials import environment_with
from ..store.embedded import EmbeddedServer
from .progress import Kill, Progress
from .settings import ADVANTAGE_WORKERS, EVALUATE_EVERY, ROLLOUT_PROCESSES, DemoSettings

ROLLOUTS: Final = tuple(f"rollouts-{index}" for index in range(ROLLOUT_PROCESSES))
ADVANTAGE: Final = tuple(f"advantage-{index}" for index in range(ADVANTAGE_WORKERS))
KILL_AT: Final = 0.4  # of the updates asked for
KILLED: Final = ("rollouts-0", "advantage-0", "grouper")
MAX_UNEXPECTED_ENDS: Final = 3  # per process; more is a fault, not an accident
GROUP_DEADLINE_S: Final = 15.0  # a round takes a fraction of a second; then a killed process's groups end
STALL_S: Final = 60.0  # without an update, an evaluation or an end
TICK_S: Final = 0.2
STATUS_EVERY_S: Final = 0.5


class View(Protocol):
    """What the supervisor needs of a view."""

    def show(self, progress: Progress, crew: dict[str, Child]) -> None: ...

    def say(self, text: str) -> None: ...


def demonstrate(
    settings: DemoSettings,
    url: str | None,
    view: View,
    *,
    kill: bool,
    interrupted: threading.Event,
    server_binary: str | None = None,
    metrics_port: int | None = None,
) -> Progress:
    """Run the whole demo, on an embedded server unless a URL is given; returns what came of it.

    metrics_port: of `/metrics` of the first process, see `metrics_ports`; None: each takes a free one.

    Every process has ended when this returns or raises. Raises KeyboardInterrupt once `interrupted` is set,
    ProcessEndedError when one keeps ending or nothing moves for STALL_S, ServerError when no server can be started.
    """
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedServer(binary=server_binary)).url
        connection = stack.enter_context(Connection(url))

        def unless_interrupted(_: object) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt

        connection.wait_until_ready(on_wait=unless_interrupted)
        run = open_run(
            connection,
            settings.run,
            RunSettings(zero_variance_filter=True, group_deadline_s=GROUP_DEADLINE_S),
        )
        return conduct(
            settings,
            url,
            lambda: read_status(run),
            view,
            kill=kill,
            interrupted=interrupted,
            metrics_port=metrics_port,
        )


def metrics_ports(first: int) -> dict[str, int]:
    """The ports at which the processes serve `/metrics`: this one, and those after it."""
    names = [*ROLLOUTS, "grouper", *ADVANTAGE, "trainer"]
    return {name: first + place for place, name in enumerate(names)}


def new_crew(
    settings: DemoSettings,
    url: str,
    directory: Path,
    inbox: SimpleQueue[Message],
    metrics_port: int | None = None,
) -> dict[str, Child]:
    """The processes in data order, not started. The URL goes by environment: arguments are public on a machine."""
    ports = {} if metrics_port is None else metrics_ports(metrics_port)
    environment = {
        **environment_with(url, os.environ),
        "STREAMADV_RUN": settings.run,
        "STREAMADV_DEVICE": "cpu",  # batches are small
        "OMP_NUM_THREADS": "1",  # six torch processes share the machine
    }
    commands = {
        **{name: ["-m", "streamadv.demo.rollouts", str(directory), name[-1]] for name in ROLLOUTS},
        "grouper": ["-m", "streamadv", "worker", "grouper"],
        **{name: ["-m", "streamadv", "worker", "advantage"] for name in ADVANTAGE},
        "trainer": ["-m", "streamadv.demo.trainer", str(directory)],
        "evaluate": ["-m", "streamadv.demo.evaluate", str(directory)],
    }
    return {
        name: Child(
            name,
            command,
            environment={**environment, "STREAMADV_METRICS_PORT": str(ports.get(name, 0))},  # 0: a free one
            log=directory / f"{name}.log",
            inbox=inbox,
            numbered=name in ROLLOUTS,
        )
        for name, command in commands.items()
    }


def conduct(
    settings: DemoSettings,
    url: str,
    read_status: Callable[[], Status],
    view: View,
    *,
    kill: bool,
    interrupted: threading.Event,
    metrics_port: int | None = None,
) -> Progress:
    """Run the processes until the last version is evaluated; all have ended when this returns or raises.

    `read_status` returns the run's status.
    """
    with tempfile.TemporaryDirectory(prefix="streamadv-demo-") as folder:
        directory = Path(folder)
        settings.write(directory)
        inbox: SimpleQueue[Message] = SimpleQueue()
        crew = new_crew(settings, url, directory, inbox, metrics_port)
        if metrics_port is not None:
            ports = ", ".join(f"{name} {port}" for name, port in metrics_ports(metrics_port).items())
            view.say(f"run {settings.run}, /metrics on 127.0.0.1: {ports}")
        conductor = _Conductor(Progress(settings), crew, inbox, read_status, view, kill=kill)
        try:
            conductor.run(interrupted)
        finally:
            stop_all(crew.values())
        conductor.read_status()
        view.show(conductor.progress, crew)
        return conductor.progress


class _Conductor:
    """The loop of `conduct`, and what it has to remember."""

    def __init__(
        self,
        progress: Progress,
        crew: dict[str, Child],
        inbox: SimpleQueue[Message],
        read_status: Callable[[], Status],
        view: View,
        *,
        kill: bool,
    ) -> None:
        self.progress = progress
        self._crew = crew
        self._inbox = inbox
        self._read_status = read_status
        self._view = view
        self._kill_due = kill
        self._began = time.monotonic()
        self._moved = self._began
        self._status_due = self._began
        self._ready: set[str] = set()  # rollout processes that can be asked to stop
        self._ended: set[str] = set()  # processes whose work is done
        self._unexpected: dict[str, int] = {}
        self._asked: int | None = None  # version being evaluated

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def run(self, interrupted: threading.Event) -> None:
        # Rollouts start when there are weights to play with.
        self._start([name for name in self._crew if not name.startswith("rollouts-")])
        while self.progress.phase != "done":
            if interrupted.is_set():
                raise KeyboardInterrupt
            try:
                name, message = self._inbox.get(timeout=TICK_S)
            except Empty:
                pass
            else:
                self._hear(name, message)
            self._watch()
            if time.monotonic() >= self._status_due:
                self._status_due = time.monotonic() + STATUS_EVERY_S
                self.read_status()
                self._view.show(self.progress, self._crew)

    def read_status(self) -> None:
        self.progress.seconds = self._seconds
        self.progress.read(self._read_status(), self._seconds)

    def _hear(self, name: str, message: dict[str, Any]) -> None:
        self._moved = time.monotonic()
        self.progress.hear(message, self._seconds)
        match message["kind"]:
            case "published" if self.progress.phase == "starting":
                self.progress.phase = "learning"
                self._evaluate(0)
                self._start([name for name in self._crew if name.startswith("rollouts-")])
            case "ready":
                self._ready.add(name)
                if self.progress.phase == "draining":
                    self._finish(name)
            case "update":
                self._after_update(int(message["version"]))
            case "evaluation":
                self._asked = None
                self._view.say(f"version {message['version']}: success rate {message['success_rate']:.1%}")
                if self.progress.phase == "evaluating":
                    self._evaluate_last()
            case "finished":
                self._ended.add("trainer")
                self.progress.phase = "evaluating"
                self._evaluate_last()

    def _after_update(self, version: int) -> None:
        settings = self.progress.settings
        if self._kill_due and version >= KILL_AT * settings.updates:
            self._kill_due = False
            self._kill_some(version)
        if version % EVALUATE_EVERY == 0 and self._asked is None:
            self._evaluate(version)
        if version >= settings.updates and self.progress.phase == "learning":
            self.progress.phase = "draining"
            self._view.say(f"{version} updates: rollouts finish, what is under way is still trained")
            for name in sorted(self._ready):
                self._finish(name)

    def _kill_some(self, version: int) -> None:
        for name in KILLED:
            child = self._crew[name]
            if child.running and child.pid is not None:
                self.progress.kills.append(Kill(name, child.pid, version, self._seconds))
                child.kill()
        killed = ", ".join(f"{kill.process} ({kill.pid})" for kill in self.progress.kills)
        self._view.say(f"version {version}: kill -9 of {killed}")
        self._start(KILLED)

    def _start(self, names: Sequence[str]) -> None:
        """Start processes, for the first time or again."""
        for name in names:
            self._ready.discard(name)
            self._crew[name].start()
            if name == "evaluate" and self._asked is not None:
                self._evaluate(self._asked)
        self._view.say("started " + ", ".join(f"{name} ({self._crew[name].pid})" for name in names))

    def _finish(self, name: str) -> None:
        self._ended.add(name)
        self._crew[name].terminate()

    def _evaluate(self, version: int) -> None:
        self._asked = version
        self._crew["evaluate"].ask(str(version))

    def _evaluate_last(self) -> None:
        version = self.progress.version
        if self.progress.success_rate(version) is not None:
            self.progress.phase = "done"
        elif self._asked is None:
            self._evaluate(version)

    def _watch(self) -> None:
        """Start again what ended without being asked to; give up when that does not help."""
        for name, child in self._crew.items():
            status = child.exit_status
            # It may have said that it has finished: hear everything before judging.
            if status is None or name in self._ended or not self._inbox.empty():
                continue
            self._unexpected[name] = self._unexpected.get(name, 0) + 1
            if self._unexpected[name] > MAX_UNEXPECTED_ENDS:
                raise ProcessEndedError(
                    f"{name} keeps ending, last with exit status {status}: {child.log_tail()}"
                )
            self._view.say(f"{name} ended with exit status {status}: {child.log_tail()}")
            self._start([name])
        if time.monotonic() - self._moved > STALL_S:
            tails = "; ".join(f"{name}: {child.log_tail()}" for name, child in self._crew.items())
            raise ProcessEndedError(
                f"no update for {STALL_S:g} s while {self.progress.phase}; logs end with {tails}"
            )
