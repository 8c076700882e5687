"""What every worker process does around its loop."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Final, NoReturn

from streamadv import metrics, tracing
from streamadv.logs import announcement
from streamadv.messages import log_fields
from streamadv.processes.memory import collect_rarely
from streamadv.run import Run, open_run
from streamadv.run.consumer import GROUPER
from streamadv.settings import Settings
from streamadv.status.read import read_server
from streamadv.store.connection import Connection
from streamadv.store.retry import patiently

logger = logging.getLogger(__name__)

#: Seconds in which the server answers a probe.
PROBE_S: Final = 2.0


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; the second signal ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        # Not by logging, which this may interrupt in the middle of a line and then fails.
        text = f"{signal.Signals(number).name}: finishing what is in hand"
        os.write(2, f"{announcement(text, 'stopping')}\n".encode())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


def leave() -> NoReturn:
    """End this process with status 0 at once: taking down torch takes seconds on a busy machine."""
    tracing.flush()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def join_run(settings: Settings, stop: threading.Event, stage: str) -> Run:
    """Serve metrics and probes, wait for the server, create or join the run. `say_ready` is for when all else is right.

    stage: who waits, in the log. A signal ends the wait with KeyboardInterrupt.
    """
    connection, probe = Connection(settings.url), Connection(settings.url, reply_timeout=PROBE_S)
    has_joined = False

    def not_ready() -> str | None:
        probe.check()
        return None if has_joined else f"run {settings.run} is not joined yet"

    metrics.serve(settings.metrics_port, settings.run, settings.metrics_host, not_ready)

    def pause(seconds: float) -> None:
        if stop.wait(seconds):
            raise KeyboardInterrupt

    def join() -> Run:
        connection.wait_until_ready(on_wait=lambda _: pause(0))
        run = open_run(connection, settings.run)
        warn_of_server(run, stage)
        return run

    run = patiently(join, stage, settings.run, sleep=pause)
    has_joined = True
    return run


def warn_of_server(run: Run, stage: str) -> None:
    """Say that the server may lose data: every stage if it evicts, the grouper if it keeps nothing on disk."""
    server = read_server(run)
    for risk in (server.evicts, server.forgets if stage == GROUPER else None):
        if risk is not None:
            logger.warning("the server %s", risk, extra=log_fields("server_loses_data", run=run.name))


def say_ready(run: Run) -> None:
    """The process begins its work: nothing in its settings keeps it from that."""
    fields = log_fields("joined", run=run.name)
    logger.info("ready: run %s on %s", run.name, run.connection.safe_url, extra=fields)
    collect_rarely()
