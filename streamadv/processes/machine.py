"""The processes of a run on one machine: workers, which are started again, and commands, which end with each other."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

from .. import logs
from ..messages import counted
from .worker import GRACE_S, Kept, worker_command

LOOK_S: Final = 0.1
ENDING: Final = f"ending commands, then workers: what has not ended after {GRACE_S:g} s is killed"

#: Takes each line of a process, and whether it is of stderr; called in threads.
Show = Callable[[str, bool], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run beside a server.

    environment: of every process. modules: imported by advantage workers. scorers: functions as MODULE:FUNCTION, a
    scorer for each. gateway: arguments of `streamadv gateway`, empty for none. commands: run at once, each a list of
    words. metrics_port: of the first worker, the others have those after it; 0: each takes a free one. programs:
    commands by name, each started again until it ends with status 0. show: what takes the output of a worker or
    program, by its name; None: it is written with the name in front. tell: what takes news of them; None: stderr.
    """

    environment: Mapping[str, str]
    groupers: int = 1
    workers: int = 1
    modules: Sequence[str] = ()
    scorers: Sequence[str] = ()
    gateway: Sequence[str] = ()
    commands: Sequence[Sequence[str]] = ()
    metrics_port: int = 0
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    show: Callable[[str], Show] | None = None
    tell: Callable[[str], object] | None = None

    @property
    def processes(self) -> dict[str, Sequence[str]]:
        """Commands of workers, then programs, by name."""
        imports = [word for module in self.modules for word in ("--import", module)]
        workers: dict[str, Sequence[str]] = {}
        for stage, number, more in (("grouper", self.groupers, []), ("advantage", self.workers, imports)):
            for index in range(number):
                name = stage if number == 1 else f"{stage}-{index}"
                workers[name] = worker_command([stage, *more])
        for function in self.scorers:
            name = scorer_name(function)
            workers[name] = worker_command(["scorer", function, "--name", name])
        if self.gateway:
            workers["gateway"] = [sys.executable, "-m", "streamadv", "gateway", *self.gateway]
        return {**workers, **self.programs}

    @property
    def ports(self) -> dict[str, int]:
        """Of `/metrics`, by the name of a worker or program."""
        first = self.metrics_port
        return {name: first and first + place for place, name in enumerate(self.processes)}

    def __str__(self) -> str:
        parts = [counted(self.groupers, "grouper"), counted(self.workers, "advantage worker")]
        if self.scorers:
            parts.append(counted(len(self.scorers), "scorer"))
        if self.gateway:
            parts.append("a gateway")
        if self.commands:
            parts.append(counted(len(self.commands), "command"))
        return ", ".join(parts)


class Signals(threading.Event):
    """SIGINT and SIGTERM of this process, from here on: the first one sets it, the second ends the process at once.

    What the process has started ends with it. who: in front of what is said on stderr. text, event: what is said, and
    logged, of the first one.
    """

    number: signal.Signals | None = None

    def __init__(self, who: str | None, text: str = ENDING, event: str = "machine") -> None:
        super().__init__()
        self.who, self._text, self._event = who, text, event
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = signal.Signals(number)
        self.set()
        say(f"{self.number.name}: {self._text}", self.who, self._event)


def run_machine(plan: Plan, signals: Signals, look: Callable[[Mapping[str, Kept]], object]) -> int:
    """Start everything, look after it, end everything. Returns the exit status.

    That is the status of the first command that fails, 0 when all commands and programs have ended, and 128 and the
    number of a signal; 0 for a signal without commands. look: called often with workers and programs by name; what it
    raises ends everything. Raises ProcessEndedError for a worker or program that cannot be kept running.
    """
    commands = _kept_commands(plan)
    workers: dict[str, Kept] = {}
    for name, words in plan.processes.items():
        environment = {**plan.environment, "STREAMADV_METRICS_PORT": str(plan.ports[name])}
        show = plan.show(name) if plan.show else _prefixed(name, 2)
        workers[name] = Kept(name, words, environment, show, until_done=name in plan.programs)
    ending = signal.SIGTERM
    try:
        for each in (*workers.values(), *commands):
            each.start()
        while True:
            if signals.wait(LOOK_S):
                assert signals.number is not None
                ending = signals.number
                return 128 + ending if plan.commands else 0
            look(workers)
            for worker in workers.values():
                if news := worker.look_after():
                    (plan.tell or say)(news)
            statuses = [command.exit_status for command in commands]
            for command, status in zip(commands, statuses, strict=True):
                if status:
                    say(f"{command.name} ended with status {status}")
                    return status
            ended = [status == 0 for status in statuses] + [workers[name].done for name in plan.programs]
            if ended and all(ended):
                return 0
    finally:
        # Commands first, by the signal that was given; workers then finish what is in hand.
        for together, number in ((commands, ending), (workers.values(), signal.SIGTERM)):
            for each in together:
                each.send(number)
            for each in together:
                each.wait()


def say(text: str, who: str | None = "up", event: str = "machine") -> None:
    """One line on stderr. Signal handlers call this: a log they may have interrupted in a line would fail."""
    os.write(2, f"{logs.announcement(text, event, who=who)}\n".encode())


def scorer_name(function: str) -> str:
    """Of the scorer that calls MODULE:FUNCTION."""
    return function.rpartition(":")[2]


def _kept_commands(plan: Plan) -> list[Kept]:
    names = [name_of(command) for command in plan.commands]
    if len(names) == 1:
        return [Kept(names[0], plan.commands[0], plan.environment, None)]
    environment = {**plan.environment, "PYTHONUNBUFFERED": "1"}  # into a pipe, lines would come late
    kept = []
    for place, (name, command) in enumerate(zip(names, plan.commands, strict=True)):
        if names.count(name) > 1:
            name = f"{name}-{names[: place + 1].count(name)}"
        kept.append(Kept(name, command, environment, _prefixed(name, 1)))
    return kept


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
