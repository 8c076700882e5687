"""Starts the processes of a chaos run by forking: what they import is there already, so a start takes no time.

Speaks JSON lines on stdin and stdout: `{"words": [...], "log": FILE}` is answered with `{"pid": N}`, `{}` with
`{"ended": [[pid, status], ...]}` (a negative status is a signal). Ends with its stdin and takes all with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

_PR_SET_PDEATHSIG = 1


class Nursery:
    """The parent's end."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # its children die with it
        self._process.communicate()

    def start(self, words: Sequence[str], log: Path) -> int:
        """Run `victim.main(words)` in a process of its own; its pid."""
        pid: int = self._ask({"words": list(words), "log": str(log)})["pid"]
        return pid

    def ended(self) -> list[tuple[int, int]]:
        """(pid, status) of the processes that have ended since it was asked last."""
        return [(pid, status) for pid, status in self._ask({})["ended"]]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        sender, receiver = self._process.stdin, self._process.stdout
        assert sender is not None
        assert receiver is not None
        sender.write(json.dumps(question).encode() + b"\n")
        sender.flush()
        answer: dict[str, Any] = json.loads(receiver.readline())
        return answer


def main() -> None:
    import torch

    from . import producers, roles, trainer, victim  # noqa: F401  what children need is imported once

    torch.set_num_threads(1)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        if question:
            answer: dict[str, Any] = {"pid": _fork(question["words"], question["log"])}
        else:
            answer = {"ended": _reap()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _fork(words: Sequence[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        random.seed()  # else all of them would wait in step
        from .victim import main

        status = main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, state = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(state)))


if __name__ == "__main__":
    main()
