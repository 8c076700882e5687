"""Child processes with a pipe each way: what is measured is told its pace, and says what it has done."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from streamadv.launcher import ending_with_parent, log_tail
from streamadv.processes import messages

STOP_SECONDS: Final = 5.0  # from SIGTERM to SIGKILL
LOG_TAIL_LINES: Final = 3

Message = tuple[str, dict[str, Any]]  # name of the child, and the message


class Child:
    """One child process. Start it from the main thread only: on Linux it ends with the thread that started it.

    Its messages (JSON lines on stdout) go into `inbox`, everything else that it writes into `log`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: dict[str, str],
        log: Path,
        inbox: SimpleQueue[Message],
    ) -> None:
        self.name = name
        self._command = list(command)
        self.environment = environment
        self._log = log
        self._inbox = inbox
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._told_to_end = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None until it has ended and all its messages are in the inbox. Negative: the signal that ended it."""
        if self._process is None or (self._listener is not None and self._listener.is_alive()):
            return None
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, or start it again after it has ended."""
        with self._log.open("a") as log:
            # SIGKILL, because the supervisor's server is gone too: a child that finishes what it has begun would wait
            # for that server for ever.
            process = subprocess.Popen(
                ending_with_parent([sys.executable, *self._command], signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends its children in order
            )
        self._process = process
        self._told_to_end = False
        self._listener = threading.Thread(target=self._listen, args=(process,), name=self.name, daemon=True)
        self._listener.start()

    def ask(self, line: str) -> None:
        """Write one line to its stdin. Does nothing if it has ended."""
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # the supervisor notices by `exit_status`

    def kill(self) -> None:
        """Send SIGKILL: it gets no chance to clean up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM, once: it finishes what it has begun. A second one would cut that short."""
        if self._process is not None and not self._told_to_end:
            self._told_to_end = True
            self._process.terminate()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if it has not ended within STOP_SECONDS."""
        self.terminate()
        if self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def log_tail(self) -> str:
        """The last lines of its log, on one line."""
        return log_tail(self._log, LOG_TAIL_LINES)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self._log.open("a", buffering=1) as log:  # a line is there before the message after it is
            for line in process.stdout:
                message = messages.parse(line)
                if message is None:
                    log.write(line)
                else:
                    self._inbox.put((self.name, message))


def stop_all(children: Collection[Child]) -> None:
    """Ask all to end, then wait for each: see `Child.stop`."""
    for child in children:
        child.terminate()
    for child in children:
        child.stop()
