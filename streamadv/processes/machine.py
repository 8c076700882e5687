"""The processes of a run on one machine: workers that are started again, and commands that end with each other."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from .. import logs
from ..units import counted
from .kept import Kept
from .worker import Worker

LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run beside a server.

    environment: of every process. modules: imported by advantage workers. commands: run at once, each a list of words.
    metrics_port: of the first worker, the others have those after it; 0: each takes a free one.
    """

    environment: Mapping[str, str]
    groupers: int = 1
    workers: int = 1
    modules: Sequence[str] = ()
    commands: Sequence[Sequence[str]] = ()
    metrics_port: int = 0

    def __str__(self) -> str:
        parts = [counted(self.groupers, "grouper"), counted(self.workers, "advantage worker")]
        if self.commands:
            parts.append(counted(len(self.commands), "command"))
        return ", ".join(parts)


class Signals:
    """SIGINT and SIGTERM of this process, from here on: the first one is noted, the second ends the process at once.

    What the process has started ends with it.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._noted = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = signal.Signals(number)
        self._noted.set()
        say(f"{self.number.name}: ending commands and workers")

    def wait(self, seconds: float) -> bool:
        """Wait for a signal. Returns whether there was one."""
        return self._noted.wait(seconds)


def run_machine(plan: Plan, signals: Signals, check_server: Callable[[], object]) -> int:
    """Start everything, look after it, end everything. Returns the exit status.

    That is the status of the first command that fails, 0 when all have ended, and 128 and the number of a signal; 0 for
    a signal without commands. check_server: called often; what it raises ends everything. Raises ProcessEndedError for
    a worker that cannot be kept running.
    """
    crew = _Crew(plan)
    ending = signal.SIGTERM
    try:
        crew.start()
        while True:
            if signals.wait(LOOK_S):
                assert signals.number is not None
                ending = signals.number
                return 128 + ending if plan.commands else 0
            check_server()
            crew.look_after_workers()
            status = crew.status_of_commands()
            if status is not None:
                return status
    finally:
        crew.end(ending)


class _Crew:
    """Workers and commands."""

    def __init__(self, plan: Plan) -> None:
        self._commands = _kept_commands(plan)
        self._workers = []
        for place, (name, words) in enumerate(_workers_of(plan)):
            port = plan.metrics_port and plan.metrics_port + place
            environment = {**plan.environment, "STREAMADV_METRICS_PORT": str(port)}
            self._workers.append(Worker(name, words, environment, _prefixed(name, 2)))

    def start(self) -> None:
        for worker in self._workers:
            worker.start()
        for command in self._commands:
            command.start()

    def look_after_workers(self) -> None:
        """Start again what has ended, when it is due. Raises ProcessEndedError."""
        for worker in self._workers:
            if news := worker.look_after():
                say(news)

    def status_of_commands(self) -> int | None:
        """The status of the first command that failed; 0 when all have ended; None while some run, or without any."""
        statuses = [command.exit_status for command in self._commands]
        for command, status in zip(self._commands, statuses, strict=True):
            if status:
                say(f"{command.name} ended with status {status}")
                return status
        return 0 if statuses and None not in statuses else None

    def end(self, number: signal.Signals) -> None:
        """Commands first, by the signal that was given; workers then finish what is in hand."""
        for command in self._commands:
            command.send(number)
        for command in self._commands:
            command.wait()
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait()


def say(text: str) -> None:
    """One line on stderr."""
    os.write(2, f"{logs.announcement(text, 'machine', who='up')}\n".encode())  # signal handlers call this


def _workers_of(plan: Plan) -> list[tuple[str, list[str]]]:
    """Their names, and what follows `streamadv worker` on their command lines."""
    imports = [word for module in plan.modules for word in ("--import", module)]
    workers = []
    for stage, number, more in (("grouper", plan.groupers, []), ("advantage", plan.workers, imports)):
        for index in range(number):
            name = stage if number == 1 else f"{stage}-{index}"
            workers.append((name, [stage, *more]))
    return workers


def _kept_commands(plan: Plan) -> list[Kept]:
    if len(plan.commands) == 1:
        (command,) = plan.commands
        return [Kept(name_of(command), command, plan.environment, None)]
    environment = {**plan.environment, "PYTHONUNBUFFERED": "1"}  # into a pipe, lines would come late
    return [
        Kept(name, command, environment, _prefixed(name, 1))
        for name, command in zip(names_of(plan.commands), plan.commands, strict=True)
    ]


def names_of(commands: Sequence[Sequence[str]]) -> list[str]:
    """A short name for each command, no two the same."""
    names = [name_of(command) for command in commands]
    total, seen = Counter(names), Counter[str]()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if total[name] == 1 else f"{name}-{seen[name]}")
    return unique


def name_of(command: Sequence[str]) -> str:
    """A short name: of the script or the module that Python runs, else of the program."""
    program = PurePath(command[0]).name
    if program.startswith("python"):
        words = list(command[1:])
        if "-m" in words[:-1]:
            return words[words.index("-m") + 1]
        script = next((word for word in words if word.endswith(".py")), None)
        if script is not None:
            return PurePath(script).stem
    return program


def _prefixed(name: str, output: int) -> Callable[[str, bool], object]:
    """Writes lines with the name in front, each in one piece. output: descriptor for what is written to stdout.

    A log record in JSON stays as it is.
    """

    def show(line: str, is_stderr: bool) -> None:
        shown = line if is_stderr and line.startswith(logs.JSON_BEGINS) else f"{name} | {line}"
        os.write(2 if is_stderr else output, f"{shown}\n".encode(errors="backslashreplace"))

    return show
