"""The library's own processes, as functions to start in a world."""

from __future__ import annotations

from .. import doors
from ..advantage.worker import run_worker
from ..grouping.grouper import run_grouper
from ..run import Run, open_run
from ..run.manifest import RunSettings
from ..store.connection import Connection
from ..store.retry import RETRYABLE, Outage
from .wire import URL


def grouper(run: str = "default", settings: RunSettings | None = None) -> None:
    """The process that makes groups of rollouts."""
    run_grouper(opened(run, settings), doors.Event())


def advantage_worker(run: str = "default", settings: RunSettings | None = None) -> None:
    """A process that computes advantages."""
    run_worker(opened(run, settings), doors.Event(), device="cpu")


def opened(name: str, settings: RunSettings | None) -> Run:
    """The run, once the server answers: what a worker process does before its loop."""
    connection = Connection(URL)
    outage = Outage("worker", name)
    while True:
        connection.wait_until_ready()
        try:
            return open_run(connection, name, settings)
        except RETRYABLE as error:
            outage.pause_after(error)
