"""One stage at a time, in this process and on a server that does nothing else: what each costs by itself."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Self

import torch

from streamadv.advantage.worker import run_worker
from streamadv.errors import NoBatchError, ProcessEndedError
from streamadv.grouping.grouper import run_grouper
from streamadv.grouping.housekeeping import Housekeeping
from streamadv.producer.producer import Producer
from streamadv.run import Run, open_run
from streamadv.run.manifest import RunSettings
from streamadv.run.run import delete_run
from streamadv.store.connection import Connection
from streamadv.store.keys import ShardKeys
from streamadv.trainer.queue import TrainerQueue

from .crew import STALL_S
from .lines import GROUP_SIZE, KINDS, Line, make_groups

POLL_S: Final = 0.005


class Cost(NamedTuple):
    """Of one trajectory, in microseconds: on the clock, of this process, of the server."""

    wall: float
    client: float
    server: float


class Alone:
    """A run of its own whose stages are worked one after the other. Context manager; deletes the run at the end.

    The trainer does not pace.
    """

    def __init__(
        self, url: str, line: Line, *, batches: int = 1, settings: RunSettings | None = None
    ) -> None:
        bounds = {"max_trajectory_bytes": max(1024, 32 * line.tokens), "max_bytes": 1 << 50}
        settings = (settings or RunSettings()).model_copy(update=bounds)
        self.line = line
        self.connection = Connection(url)
        self.name = f"bench-{secrets.token_hex(6)}"
        self.run: Run = open_run(self.connection, self.name, settings)
        self.keys: ShardKeys = self.run.keys.home
        self._batches = batches
        self._pool = make_groups(line)
        self._producer = Producer(self.connection, self.name)
        self._queue: TrainerQueue | None = None

    def __enter__(self) -> Self:
        self._producer.open()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._queue is not None:
            self._queue.close()
        self._producer.close()
        delete_run(self.connection, self.run.name)
        self.connection.close()

    @property
    def groups(self) -> int:
        """Of one round: all batches full."""
        return self._batches * self.line.batch_groups

    def round(self) -> dict[str, Cost]:
        """Every stage once, from push to commit."""
        return {
            "producer": self.push(),
            "grouper": self.group(),
            "name": self.name_batches(),
            "advantage": self.compute(),
            "trainer": self.train(),
        }

    def push(self) -> Cost:
        """The groups of a round, each admitted and pushed in one piece."""
        before = self._clocks()
        for number in range(self.groups):
            group = self._producer.begin_group(GROUP_SIZE)
            group.push(self._pool[number % len(self._pool)])
        return self._cost_since(before)

    def group(self) -> Cost:
        """All that is in the rollouts stream."""
        return self._work(lambda stop: run_grouper(self.run, stop), self.keys.rollouts)

    def housekeep(self) -> Cost:
        """What a grouper does each second."""
        before = self._clocks()
        Housekeeping(self.run).round()
        return self._cost_since(before)

    def name_batches(self) -> Cost:
        """Batch records and their work, for all groups of the round."""
        queue = self._trainer()
        before = self._clocks()
        try:
            queue.next_batch(timeout=0)
        except NoBatchError:
            return self._cost_since(before)
        raise ProcessEndedError(f"batch of run {self.name} was there before it was computed")

    def compute(self) -> Cost:
        """All named work."""
        return self._work(lambda stop: run_worker(self.run, stop, device="cpu"), self.keys.work)

    def train(self) -> Cost:
        """Take, mark and commit all batches."""
        queue = self._trainer()
        before = self._clocks()
        for _ in range(self._batches):
            batch = queue.next_batch(timeout=STALL_S)
            assert batch is not None  # the producer has not finished
            queue.trained(batch)
            queue.commit(queue.state_dict())
        return self._cost_since(before)

    def _trainer(self) -> TrainerQueue:
        if self._queue is None:
            kind = KINDS[self.line.kind]
            self._queue = TrainerQueue(
                self.connection,
                self.name,
                batch_groups=self.line.batch_groups,
                prefetch=self._batches - 1,
                max_staleness=None,
                chain=kind.chain,
                pushed=kind.late,
            )
        return self._queue

    def _work(self, target: Callable[[threading.Event], object], stream: str) -> Cost:
        """Run `target` until the stream is empty."""
        stop = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            before = self._clocks()
            try:
                work = thread.submit(target, stop)
                while self.connection.scripts.xlen(stream) and not work.done():
                    stop.wait(POLL_S)
                cost = self._cost_since(before)
            finally:
                stop.set()
            work.result()
        return cost

    def _cost_since(self, before: tuple[float, ...]) -> Cost:
        count = self.groups * GROUP_SIZE
        return Cost(*(1e6 * (b - a) / count for a, b in zip(before, self._clocks(), strict=True)))

    def _clocks(self) -> tuple[float, float, float]:
        info: Any = self.connection.scripts.info("cpu")
        return (time.perf_counter(), time.process_time(), info["used_cpu_sys"] + info["used_cpu_user"])
