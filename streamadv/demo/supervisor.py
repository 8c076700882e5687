"""Conducts the demo on the machine of `streamadv up`: kills three of its processes at 40 %, and tells what happens."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from ..errors import ProcessEndedError
from ..processes import messages
from ..processes.machine import Plan, Show, Signals, run_machine
from ..processes.worker import Kept
from ..run import open_run
from ..run.manifest import RunSettings
from ..status import Status, read_status
from ..store.connection import Connection
from ..store.embedded import EmbeddedServer
from ..store.urls import environment_with
from .environment import write_tokenizer
from .progress import Kill, Progress
from .settings import ADVANTAGE_WORKERS, ROLLOUT_PROCESSES, DemoSettings
from .view import View

KILL_AT: Final = 0.4  # of the updates asked for
KILLED: Final = ("rollouts-0", "advantage-0", "grouper")
GROUP_DEADLINE_S: Final = 15.0  # a round takes a fraction of a second; then a killed process's groups end
STALL_S: Final = 60.0  # without an update, an evaluation or an end
STATUS_EVERY_S: Final = 0.5
LOG_TAIL_LINES: Final = 3


def demonstrate(
    settings: DemoSettings,
    url: str | None,
    view: View,
    signals: Signals,
    *,
    kill: bool,
    server_binary: str | None = None,
    metrics_port: int = 0,
    page: Callable[[str, str], AbstractContextManager[str]] | None = None,
) -> Progress:
    """Run the whole demo, on an embedded server unless a URL is given; returns what came of it.

    metrics_port: of `/metrics` of the first process, see `Plan`. page: serves the run's page, by URL and run,
    while it is open. Every process has ended when this returns or raises.
    Raises KeyboardInterrupt after a signal, ProcessEndedError when a process keeps ending or nothing moves for STALL_S,
    ServerError when no server can be started.
    """

    def unless_interrupted(_: object) -> None:
        if signals.number is not None:
            raise KeyboardInterrupt

    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedServer(binary=server_binary)).url
        connection = stack.enter_context(Connection(url))
        connection.wait_until_ready(on_wait=unless_interrupted)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamadv-demo-")))
        run = open_run(
            connection,
            settings.run,
            RunSettings(
                zero_variance_filter=True,
                group_deadline_s=GROUP_DEADLINE_S,
                tokenizer=str(write_tokenizer(directory)),
            ),
        )
        conductor = Conductor(Progress(settings), lambda: read_status(run), view, kill=kill)
        if page is not None:
            view.say(f"view {stack.enter_context(page(url, settings.run))}")
        settings.write(directory)
        plan = plan_of(settings, url, directory, conductor.listener, view.say, metrics_port)
        conductor.conduct(plan, signals)
        unless_interrupted(None)
        return conductor.progress


def plan_of(
    settings: DemoSettings,
    url: str,
    directory: Path,
    show: Callable[[str], Show] | None = None,
    tell: Callable[[str], object] | None = None,
    metrics_port: int = 0,
) -> Plan:
    """The processes; show, tell: see `Plan`. The URL goes by environment: arguments are public on a machine."""

    def program(module: str, *words: str) -> Sequence[str]:
        return [sys.executable, "-m", f"streamadv.demo.{module}", str(directory), *words]

    return Plan(
        {
            **environment_with(url, os.environ),
            "STREAMADV_RUN": settings.run,
            "STREAMADV_DEVICE": "cpu",  # batches are small
            "OMP_NUM_THREADS": "1",  # six torch processes share the machine
        },
        workers=ADVANTAGE_WORKERS,
        metrics_port=metrics_port,
        programs={
            **{f"rollouts-{index}": program("rollouts", str(index)) for index in range(ROLLOUT_PROCESSES)},
            "trainer": program("trainer"),
            "evaluate": program("evaluate"),
        },
        show=show,
        tell=tell,
    )


class Conductor:
    """Hears what the processes say, kills some of them, and keeps the view up to date."""

    def __init__(
        self, progress: Progress, read_status: Callable[[], Status], view: View, *, kill: bool
    ) -> None:
        self.progress = progress
        self._read_status = read_status
        self._view = view
        self._kill_due = kill
        self._began = self._moved = self._status_due = time.monotonic()
        self._inbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._tails: dict[str, deque[str]] = {}
        self._starts: dict[str, int] = {}

    def listener(self, name: str) -> Show:
        """Takes the lines of a process: messages, and its log."""
        tail = self._tails[name] = deque(maxlen=LOG_TAIL_LINES)

        def hear(line: str, is_stderr: bool) -> None:
            message = None if is_stderr else messages.parse(line)
            if message is None:
                tail.append(line.strip())
            else:
                self._inbox.put(message)

        return hear

    def conduct(self, plan: Plan, signals: Signals) -> None:
        """Run the plan until its programs have ended, or a signal comes. Raises ProcessEndedError with ends of logs."""
        if plan.metrics_port:
            ports = ", ".join(f"{name} {port}" for name, port in plan.ports.items() if name != "evaluate")
            self._view.say(f"run {self.progress.settings.run}, /metrics on 127.0.0.1: {ports}")
        try:
            run_machine(plan, signals, self.look)
        except ProcessEndedError as error:
            tails = "; ".join(f"{name}: {' | '.join(tail)}" for name, tail in self._tails.items() if tail)
            raise ProcessEndedError(f"{error}: {tails}") from None
        self._kill_due = False
        self._hear_all({})
        self.progress.phase = "done"
        self._show()

    def look(self, workers: Mapping[str, Kept]) -> None:
        """Take in what has happened since the last look."""
        started = [name for name, worker in workers.items() if worker.starts != self._starts.get(name)]
        if started:
            self._starts = {name: worker.starts for name, worker in workers.items()}
            self._view.say("started " + ", ".join(f"{name} ({workers[name].pid})" for name in started))
        self._hear_all(workers)
        if time.monotonic() - self._moved > STALL_S:
            raise ProcessEndedError(f"no update for {STALL_S:g} s while {self.progress.phase}")
        if time.monotonic() >= self._status_due:
            self._status_due = time.monotonic() + STATUS_EVERY_S
            self._show()

    def _hear_all(self, workers: Mapping[str, Kept]) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            self._moved = time.monotonic()
            self.progress.hear(message)
            match message["kind"]:
                case "published" if self.progress.phase == "starting":
                    self.progress.phase = "learning"
                case "update":
                    self._after_update(int(message["version"]), workers)
                case "evaluation":
                    self._view.say(
                        f"version {message['version']}: success rate {message['success_rate']:.1%}"
                    )
                case "finished":
                    self.progress.phase = "evaluating"

    def _after_update(self, version: int, workers: Mapping[str, Kept]) -> None:
        updates = self.progress.settings.updates
        if self._kill_due and version >= KILL_AT * updates:
            self._kill_due = False
            for name in KILLED:
                worker = workers[name]
                if worker.pid is not None:
                    self.progress.kills.append(Kill(name, worker.pid, version))
                    worker.kill()
            killed = ", ".join(f"{kill.process} ({kill.pid})" for kill in self.progress.kills)
            self._view.say(f"version {version}: kill -9 of {killed}")
        if version >= updates and self.progress.phase == "learning":
            self.progress.phase = "draining"
            self._view.say(f"{version} updates: rollouts finish, what is under way is still trained")

    def _show(self) -> None:
        self.progress.seconds = seconds = time.monotonic() - self._began
        self.progress.read(self._read_status(), seconds)
        self._view.show(self.progress)
