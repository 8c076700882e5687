"""The library's own processes, as functions to start in a world."""

from __future__ import annotations

from .. import doors
from ..advantage.worker import run_worker
from ..grouping.grouper import run_grouper
from ..run import Run, open_run
from ..run.manifest import RunSettings
from ..settings import run_name
from ..store.connection import Connection
from ..store.retry import patiently
from .wire import URL


def grouper(run: str | None = None, settings: RunSettings | None = None) -> None:
    """The process that makes groups of rollouts."""
    run_grouper(opened(run, settings), doors.Event())


def advantage_worker(run: str | None = None, settings: RunSettings | None = None) -> None:
    """A process that computes advantages."""
    run_worker(opened(run, settings), doors.Event(), device="cpu")


def opened(run: str | None, settings: RunSettings | None) -> Run:
    """The run, once the server answers: what a worker process does before its loop. None: as a producer means it."""
    name = run_name(run)
    connection = Connection(URL)
    connection.wait_until_ready()
    return patiently(lambda: open_run(connection, name, settings), "worker", name)
