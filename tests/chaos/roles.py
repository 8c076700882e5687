"""Processes of a chaos run with leases short enough to be outlived: `role NAME SETUP_FILE NUMBER`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from streamadv.run import Run, open_run
from streamadv.store.connection import Connection
from streamadv.store.retry import patiently

from .setup import Setup
from .victim import Hook

SCORER = "judge"


def main(words: Sequence[str], reached: Hook) -> int:
    """Run one role until it ends or gets a signal."""
    name, setup, number = words[0], Setup.load(Path(words[1])), int(words[2])
    if name == "producer":
        from .producers import run_producer

        return run_producer(setup, number)
    if name == "trainer":
        from .trainer import run_trainer

        return run_trainer(setup, reached)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if name == "scorer":
        from streamadv.grouping.scorer import Scorer

        scorer = Scorer(
            setup.url, setup.run, SCORER, lease_s=setup.lease_s, batch_size=4, settings=setup.run_settings
        )
        scorer.run(lambda trajectories: [float(t.rollout_index) for t in trajectories], stop)
    elif name == "grouper":
        from streamadv.grouping.grouper import run_grouper

        run_grouper(_join(setup), stop, lease_s=setup.lease_s)
    else:
        from streamadv.advantage.worker import run_worker

        run_worker(_join(setup), stop, device="cpu", lease_s=setup.lease_s)
    return 0


def _join(setup: Setup) -> Run:
    connection = Connection(setup.url)
    return patiently(lambda: open_run(connection, setup.run, setup.run_settings), "chaos", setup.run)
