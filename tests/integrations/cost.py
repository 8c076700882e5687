"""What the measurements beside TRL and verl share: a run that is fed, and the times of calls."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import streamadv as sa
from streamadv.store.embedded import EmbeddedServer

STEPS, GROUPS, SIZE = 12, 8, 8
RUN = "cost"


@contextmanager
def fed(groups: int, tokens: int, words: range) -> Iterator[str]:
    """URL of a server with groups of random rows, and a grouper and an advantage worker in a process of their own."""
    with EmbeddedServer() as server:
        _push(server.url, groups, tokens, words)
        worker = multiprocessing.get_context("spawn").Process(target=_serve, args=(server.url,), daemon=True)
        worker.start()
        try:
            yield server.url
        finally:
            worker.kill()


def _serve(url: str) -> None:
    from streamadv.advantage.worker import run_worker
    from streamadv.grouping.grouper import run_grouper
    from tests.support import join

    threading.Thread(target=run_grouper, args=(join(url, RUN), threading.Event()), daemon=True).start()
    run_worker(join(url, RUN), threading.Event(), device="cpu")


def _push(url: str, groups: int, tokens: int, words: range) -> None:
    random = np.random.default_rng(0)
    mask = np.r_[np.zeros(tokens // 2, bool), np.ones(tokens - tokens // 2, bool)]
    with sa.Producer(url, run=RUN) as producer:
        for _ in range(groups):
            with producer.group(SIZE) as group:
                for rollout in group:
                    rollout.push(
                        input_ids=random.integers(words.start, words.stop, tokens),
                        response_mask=mask,
                        rollout_log_probs=-2.5 * mask,
                        reward=float(random.random()),
                    )


class Times:
    """Processor time, by a clock of this thread or this process, and wall time of each call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.calls: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; its calls are measured under this name."""

        def call(*arguments: Any, **options: Any) -> Any:
            cpu, wall = self._clock(), time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.calls[name].append((self._clock() - cpu, time.perf_counter() - wall))

        return call

    def watch(self, owner: Any, *names: str) -> None:
        """Measure methods of an object."""
        for name in names:
            setattr(owner, name, self.of(name, getattr(owner, name)))

    def show(self, **calls_a_step: int) -> None:
        """Print medians, of a step where it makes several calls."""
        for name, spent in self.calls.items():
            each = 1000 * calls_a_step.get(name, 1)
            cpu, wall = (each * statistics.median(kind) for kind in zip(*spent, strict=True))
            print(f"{name:24} {cpu:8.1f} ms processor time, {wall:8.1f} ms wall, median of {len(spent)}")
