"""Dying at a named point: the execution of scripts is wrapped, the library itself has no hooks.

Points are `before:<script>` (nothing of it has happened), `after:<script>` (it has happened, the process does not
know), for every script in `streamadv/lua`, and the two gaps that no script marks: `between:fetch-publish` of an
advantage worker and `between:save-commit` of a trainer.

    python -m tests.chaos.victim --at after:take:3 -- worker grouper --redis URL --run NAME

runs that command and kills it with SIGKILL when it comes to the point for the third time. Words behind `--` are
those of the `streamadv` command, or `role NAME ...` (`roles.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis
import redis.client
import redis.cluster

from streamadv.advantage import compute as computing
from streamadv.store import scripts
from streamadv.store.exchange import Client

#: Of a cluster's client; redis-py before 7 has none, nor a cluster.
TransactionStrategy: Any = getattr(redis.cluster, "TransactionStrategy", redis.client.Pipeline)
Hook = Callable[[str], object]

FETCH_PUBLISH: Final = "between:fetch-publish"
SAVE_COMMIT: Final = "between:save-commit"


def script_names() -> list[str]:
    """Every script of the library: a new one is a new point by itself."""
    return list(scripts.files())


def points() -> list[str]:
    """All places a process can be killed at."""
    return [
        *(f"{when}:{name}" for name in script_names() for when in ("before", "after")),
        FETCH_PUBLISH,
        SAVE_COMMIT,
    ]


@contextmanager
def hooked(reached: Hook, gate: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Call `reached(point)` around every script this process runs, and `gate()` before every command."""
    names = {scripts.load(name).sha: name for name in script_names()}

    def around(called: Sequence[str], call: Callable[[], Any]) -> Any:
        gate()
        for name in called:
            reached(f"before:{name}")
        reply = call()
        for name in called:
            reached(f"after:{name}")
        return reply

    def on_commands(self: Any, commands: Any, *rest: Any) -> Any:
        called = [name for command, _ in commands for name in _called(names, command)]
        return around(called, lambda: send(self, commands, *rest))

    def on_cluster_command(self: Any, *args: Any, **options: Any) -> Any:
        return around(_called(names, args), lambda: cluster_send(self, *args, **options))

    def on_transaction(self: Any, *args: Any, **options: Any) -> Any:
        called = [name for command in self._command_queue for name in _called(names, command.args)]
        return around(called, lambda: transact(self, *args, **options))

    def on_push(self: Any, payloads: Any, call: Sequence[Any]) -> Any:
        return around(_called(names, call), lambda: push(self, payloads, call))

    push, send = Client.transact, Client.execute_together
    cluster_send: Any = redis.cluster.RedisCluster.execute_command
    transact: Any = TransactionStrategy.execute
    redis.cluster.RedisCluster.execute_command = on_cluster_command  # type: ignore[method-assign]
    TransactionStrategy.execute = on_transaction
    Client.transact = on_push  # type: ignore[method-assign]
    Client.execute_together = on_commands  # type: ignore[method-assign]
    try:
        with _after_compute(reached):
            yield
    finally:
        redis.cluster.RedisCluster.execute_command = cluster_send  # type: ignore[method-assign]
        TransactionStrategy.execute = transact
        Client.transact = push  # type: ignore[method-assign]
        Client.execute_together = send  # type: ignore[method-assign]


def _called(names: dict[str, str], command: Sequence[Any]) -> list[str]:
    if not command or command[0] not in ("EVAL", "EVALSHA"):
        return []
    text = str(command[1])
    sha = text if command[0] == "EVALSHA" else hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return [names[sha]]


@contextmanager
def _after_compute(reached: Hook) -> Iterator[None]:

    compute = computing.compute

    def on_compute(*args: Any) -> Any:
        result = compute(*args)
        reached(FETCH_PUBLISH)
        return result

    computing.compute = on_compute  # type: ignore[assignment]
    try:
        yield
    finally:
        computing.compute = compute


def killer(at: str, note: Path | None = None) -> Hook:
    """A hook that kills this process at `POINT:N`; the point is added to the file `note` just before."""
    point, _, number = at.rpartition(":")
    if point not in points() or not number.isdigit():
        raise SystemExit(f"--at {at}: give POINT:N, POINT one of {', '.join(points())}")
    lock, left = threading.Lock(), [int(number)]

    def reached(here: str) -> None:
        if here != point:
            return
        with lock:
            left[0] -= 1
            if left[0] == 0:
                if note is not None:
                    with note.open("a") as file:
                        file.write(f"{point}\n")
                os.kill(os.getpid(), signal.SIGKILL)

    return reached


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="run a command and kill it at a named point")
    parser.add_argument("--at", metavar="POINT:N", help="kill at the N-th time it comes to POINT")
    parser.add_argument("--note", type=Path, metavar="FILE", help="append the point to FILE before dying")
    parser.add_argument("words", nargs="+", metavar="COMMAND", help="of streamadv, or role NAME ...")
    arguments = parser.parse_args(argv)
    if arguments.at is None:
        return run_words(arguments.words, lambda point: None)
    reached = killer(arguments.at, arguments.note)
    with hooked(reached):
        return run_words(arguments.words, reached)


def run_words(words: Sequence[str], reached: Hook) -> int:
    """Run a role of `roles.py`, or a command of streamadv; `reached` is for points no script marks."""
    if words[0] == "role":
        from . import roles

        return roles.main(words[1:], reached)
    from streamadv.cli import main as streamadv

    return streamadv(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
