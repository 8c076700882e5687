"""Child processes: started, heard, killed and started again, and all gone when their supervisor is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from . import messages

STOP_SECONDS: Final = 5.0  # from SIGTERM to SIGKILL
LOG_TAIL_LINES: Final = 3

# Linux ends a child with the supervisor, however that one died. The request belongs to the calling process and
# survives exec, so a small launcher makes it and then becomes the child. SIGKILL: with the supervisor its server is
# gone, and a child that finishes what it has begun would wait for it for ever.
_LAUNCHER: Final = (
    "import ctypes, os, sys\n"
    "parent, *command = sys.argv[1:]\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
    "if os.getppid() != int(parent): sys.exit('the supervisor has ended')\n"
    "os.execv(command[0], command)\n"
)

Message = tuple[str, dict[str, Any]]  # name of the child, what it sent


class Child:
    """One process under supervision. Start it from the main thread only: on Linux it ends with that thread.

    Its messages (JSON lines on stdout) go into `inbox`, everything else it writes into `log`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: dict[str, str],
        log: Path,
        inbox: SimpleQueue[Message],
        numbered: bool = False,
    ) -> None:
        self.name = name
        self.starts = 0
        self._command = list(command)
        self._numbered = numbered  # the number of this start is the last argument
        self._environment = environment
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
        """Once it has ended and all its messages are in the inbox; negative: the signal that ended it."""
        if self._process is None or (self._listener is not None and self._listener.is_alive()):
            return None
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, or start it again after it has ended."""
        command = [sys.executable, *self._command, *([str(self.starts)] if self._numbered else [])]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        with self._log.open("a") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends the others in order
            )
        self._process = process
        self._told_to_end = False
        self.starts += 1
        self._listener = threading.Thread(target=self._listen, args=(process,), name=self.name, daemon=True)
        self._listener.start()

    def ask(self, line: str) -> None:
        """Write one line to its stdin; nothing happens if it has ended."""
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # noticed by whoever watches it

    def kill(self) -> None:
        """SIGKILL: it gets no chance to clean up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """SIGTERM, once: it may finish what it has begun (a second one would cut that short)."""
        if self._process is not None and not self._told_to_end:
            self._told_to_end = True
            self._process.terminate()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it has not ended in time."""
        self.terminate()
        if self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def log_tail(self) -> str:
        """The end of what it wrote, on one line."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return " | ".join(line.strip() for line in lines[-LOG_TAIL_LINES:] if line.strip()) or "(empty log)"

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self._log.open("a") as log:
            for line in process.stdout:
                message = messages.parse(line)
                if message is None:
                    log.write(line)
                else:
                    self._inbox.put((self.name, message))
