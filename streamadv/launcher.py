"""Starting processes that end with the one that starts them, however that one ends; and reading their logs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Linux ends a process with the thread that started it, also when that one is killed with SIGKILL. A process asks for
# this itself, and the request survives exec: so a small launcher makes it and then becomes the program. Nothing runs
# between fork and exec in a process that may have threads.
_LAUNCHER: Final = (
    "import ctypes, os, sys\n"
    "parent, number, *command = sys.argv[1:]\n"
    "ctypes.CDLL(None).prctl(1, int(number))\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != int(parent): sys.exit('the parent process has ended')\n"
    "os.execv(command[0], command)\n"
)


def ending_with_parent(command: Sequence[str], number: signal.Signals) -> list[str]:
    """What to start instead of `command` (program by its path, arguments): it gets the signal when its parent ends.

    Elsewhere than on Linux, `command` itself.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(number)), *command]


def log_tail(log: Path, lines: int) -> str:
    """The last lines of a log, on one line."""
    found = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in found[-lines:] if line.strip()) or "(empty log)"
