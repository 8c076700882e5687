"""Commands that a supervisor runs, each with all the processes it starts: none outlives the supervisor.

A worker, or a program, is started again when it has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from .. import clock
from ..errors import ProcessEndedError

KEEPER: Final = Path(__file__).with_name("keeper.py")
#: Seconds that a command gets to end in order before it is killed.
GRACE_S: Final = 10.0


#: Exit statuses of a worker that refuses its settings: it would refuse them again.
REFUSALS: Final = (1, 2)
#: Seconds before a worker is started again: at first, doubled with every further end in a row, and at most.
FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0
#: A worker that ran for so many seconds has worked: its next end is a new accident.
WORKED_S: Final = 60.0
#: Ends in a row, each soon after its start, that are a fault and no accident.
MOST_ENDS: Final = 8


class Kept:
    """One command. Start it from a thread that lives as long as the process: on Linux it ends with that thread.

    show: called in threads with each line of its output and whether that is of stderr; None: it has the supervisor's
    own input and output. until_done: not started again once it has ended with status 0.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        show: Callable[[str, bool], object] | None,
        until_done: bool = False,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._show = show
        self._until_done = until_done
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self.done = False
        self.starts = 0
        self._started = 0.0
        self._ends = 0  # in a row, without WORKED_S in between
        self._due: float | None = None  # when it has ended and is to be started again

    def start(self) -> None:
        """Start it, or start it again after it has ended."""
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), str(GRACE_S)]
        piped = self._show is not None
        self._process = subprocess.Popen(
            [*keeper, *self._command],
            stdin=subprocess.DEVNULL if piped else None,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.PIPE if piped else None,
            text=True,
            errors="backslashreplace",
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends all in order
        )
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, pipe is self._process.stderr), daemon=True)
            for pipe in (self._process.stdout, self._process.stderr)
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()
        self._started, self._due = clock.now(), None
        self.starts += 1

    @property
    def pid(self) -> int | None:
        """Of its keeper, with which it ends; None unless it runs."""
        return None if self._process is None or self.exit_status is not None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; 128 and the number of the signal that ended it."""
        if self._process is None:
            return None
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status  # < 0: its keeper was killed

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and what it has started; it is killed if it has not ended GRACE_S later."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL: it gets no chance to clean up."""
        if self._process is not None:
            self._process.kill()

    def wait(self) -> None:
        """Wait until it has ended and its output is shown. Call `send` before."""
        if self._process is None:
            return
        try:
            self._process.wait(GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(1.0)  # somebody outside its group may still have the pipe

    def _read(self, pipe: IO[str], is_stderr: bool) -> None:
        assert self._show is not None
        with suppress(ValueError, OSError), pipe:
            for line in pipe:
                self._show(line.rstrip("\n"), is_stderr)

    @property
    def waits(self) -> bool:
        """Whether it has ended and is started again later."""
        return self._due is not None

    def look_after(self) -> str | None:
        """Start it again when that is due; call this often. Returns what has happened to it, for people.

        Raises ProcessEndedError for a worker that refuses to start, or keeps ending.
        """
        now = clock.now()
        if self.done:
            return None
        if self._due is not None:
            if now >= self._due:
                self.start()
            return None
        status = self.exit_status
        if status is None:
            return None
        self.wait()
        if status == 0 and self._until_done:
            self.done = True
            return None
        self._ends = 1 if now - self._started >= WORKED_S else self._ends + 1
        if self._ends >= MOST_ENDS or (status in REFUSALS and self.starts == 1):
            raise ProcessEndedError(f"{self.name} ended with status {status}: its last lines say why")
        delay = min(LONGEST_S, FIRST_S * 2.0 ** (self._ends - 1))
        self._due = now + delay
        return f"{self.name} ended with status {status}, is started again in {delay:g} s"


def worker_command(words: Sequence[str]) -> list[str]:
    """Of one `streamadv worker`. words: what follows on its command line."""
    return [sys.executable, "-m", "streamadv", "worker", *words]
