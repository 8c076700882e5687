"""A whole pipeline at work in threads of this process, while a test does something to its servers.

Producers push without end until told to finish; the trainer's weights are the list of what it was trained on, and a
checkpoint is a copy of it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamadv.advantage.worker import run_worker
from streamadv.errors import NoBatchError
from streamadv.grouping.grouper import run_grouper
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer, logic
from streamadv.run import Run, open_run
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection
from streamadv.store.retry import patiently
from streamadv.trainer.queue import TrainerQueue

from .clusters import until
from .support import ledger, problems, threads, trajectory, unscored

SIZE = 2
#: Works on tokens and on the whole batch: workers read from all shards, results travel in hashes of their own.
CHAIN = {"estimator": "gae", "whiten_advantages": True}
VALUES = [0.5] * 5


class Flow:
    """One run on one server, cluster or master."""

    def __init__(self, url: str, run: str, shards: int) -> None:
        self.url = url
        self.name = run
        self.settings = RunSettings(shards=shards, scorers=("judge",), max_trajectory_bytes=1 << 16)
        self.pushed: list[tuple[str, int]] = []  # acknowledged
        self.trained: list[tuple[str, int]] = []
        self.batches = 0
        self.errors: list[BaseException] = []  # that ended a stage
        self.producing = threading.Event()
        self.over = threading.Event()  # the trainer has seen the end of the run

    @contextmanager
    def going(self) -> Iterator[None]:
        """All stages at work; leaving lets the run end first."""
        self.producing.set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logic, "HEARTBEAT_S", 0.2)
            stages = (self._group, self._score, self._compute, self._train, self._produce, self._aproduce)
            with threads(*(self._noting(stage) for stage in stages)):
                yield
                self.producing.clear()
                self._until(self.over.is_set, "the run has ended")

    def progress(self, batches: int = 2) -> None:
        """Wait until so many more batches have been trained."""
        goal = self.batches + batches
        self._until(lambda: self.batches >= goal, f"{batches} more batches")

    def _until(self, true: Callable[[], bool], what: str) -> None:
        until(lambda: self.errors or true(), what)
        if self.errors:
            raise self.errors[0]

    def _noting(self, stage: Callable[[threading.Event], None]) -> Callable[[threading.Event], None]:
        """The stage; what ends it is seen by who waits for progress."""

        def run(stop: threading.Event) -> None:
            try:
                stage(stop)
            except BaseException as error:
                self.errors.append(error)

        return run

    def join(self) -> Run:
        connection = Connection(self.url)
        return patiently(lambda: open_run(connection, self.name, self.settings), "test", self.name)

    def check(self) -> None:
        """Nothing lost, nothing twice, nothing left."""
        run = self.join()
        assert [item for item, count in Counter(self.trained).items() if count > 1] == []
        assert set(self.trained) == set(self.pushed)
        counted = ledger(run)
        assert counted["pushed"] == counted["trained"] == len(self.trained), counted
        assert problems(run) == []
        run.connection.close()

    def _group(self, stop: threading.Event) -> None:
        run_grouper(self.join(), stop, lease_s=0.5)

    def _compute(self, stop: threading.Event) -> None:
        run_worker(self.join(), stop, device="cpu", lease_s=0.5)

    def _score(self, stop: threading.Event) -> None:
        scorer = Scorer(self.url, self.name, "judge", lease_s=0.5, settings=self.settings)
        scorer.run(lambda trajectories: [float(t.rollout_index) for t in trajectories], stop)

    def _train(self, stop: threading.Event) -> None:
        queue = TrainerQueue(
            self.url,
            self.name,
            batch_groups=4,
            max_staleness=2,
            drop_after=1000,
            chain=CHAIN,
            pushed=("values",),
            commit="manual",
            settings=self.settings,
        )
        while not stop.is_set():
            try:
                batch = queue.next_batch(timeout=1.0)
            except NoBatchError:
                continue
            if batch is not None:
                self.trained += [(each.group_id, each.rollout_index) for each in batch.references]
                self.batches += 1
                queue.trained(batch)
            if batch is None or batch.version % 2:
                queue.commit(queue.state_dict())
            if batch is None:
                self.over.set()
                break
        queue.close()

    def _produce(self, stop: threading.Event) -> None:
        with Producer(self.url, self.name, settings=self.settings) as pusher:
            for number in itertools.count():
                if stop.is_set() or not self.producing.is_set():
                    break
                group = pusher.begin_group(SIZE, group_id=f"b{number:05d}")
                items = [self._item(group.group_id, index, number) for index in range(SIZE)]
                for item in items:
                    group.push([item])
                self.pushed += [(item.group_id, item.rollout_index) for item in items]
            pusher.finish()

    def _aproduce(self, stop: threading.Event) -> None:
        async def produce() -> None:
            async with Producer(self.url, self.name, settings=self.settings) as pusher:
                for number in itertools.count():
                    if stop.is_set() or not self.producing.is_set():
                        break
                    group = await pusher.begin_group(SIZE, group_id=f"a{number:05d}")
                    items = [self._item(group.group_id, index, number) for index in range(SIZE)]
                    await group.push(items)
                    self.pushed += [(item.group_id, item.rollout_index) for item in items]
                await pusher.finish()

        asyncio.run(produce())

    @staticmethod
    def _item(group_id: str, index: int, number: int) -> Any:
        make = unscored if number % 3 == 0 else trajectory
        return make(group_id, index, SIZE, values=VALUES)
