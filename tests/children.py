"""Processes in tests: children of a few lines (`send` and what they need is there), and what a process has started."""

from __future__ import annotations

import os
from pathlib import Path
from queue import SimpleQueue

from benchmarks.children import Child, Message

SEND = "import json, signal, sys\ndef send(kind, **f): print(json.dumps(dict(f, kind=kind)), flush=True)\n"


def child(name: str, code: str, directory: Path, inbox: SimpleQueue[Message]) -> Child:
    environment = dict(os.environ)
    log = directory / f"{name}.log"
    return Child(name, ["-c", SEND + code], environment=environment, log=log, inbox=inbox)


def descendants(pid: int) -> dict[int, str]:
    """Process id -> command line, of all that a process or one of its threads has started, directly or not."""
    found: dict[int, str] = {}
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, thread.read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found |= {child: command, **descendants(child)}
    return found


def worker_of(pid: int, words: str = " worker ") -> int | None:
    """The worker that a process has started, not its keeper. words: of its command line."""
    commands = descendants(pid).items()
    return next((each for each, said in commands if words in said and "keeper.py" not in said), None)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
