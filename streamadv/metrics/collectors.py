"""Collectors beside those of prometheus_client: groups of instruments, a histogram that takes arrays, and waits.

A wait counts while it lasts: a scrape in the middle of it shows the time so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .. import clock
from ..doors import renewed_at_fork

#: Returns (who, reason) of everybody in this process who is blocked now; the first word of who is a stage.
Blockers = Callable[[], Iterable[tuple[str, str]]]
OTHER_STAGE: Final = "other"


@cache
def child(instrument: Any, *labels: str) -> Any:
    """`instrument.labels(...)`, looked up once."""
    return instrument.labels(*labels)


class Registry(Collector):
    """Sets of instruments and single collectors, in the order in which they were added. Any thread may call."""

    def __init__(self) -> None:
        self._lock = renewed_at_fork(threading.Lock())
        self._parts: list[Collector] = []
        #: Called before the numbers leave: by whoever counts what it has noted only then.
        self.settlers: list[Callable[[], object]] = []

    def add(self, *parts: Collector) -> None:
        """Export these too; what is exported already stays as it is."""
        with self._lock:
            self._parts += [part for part in parts if part not in self._parts]

    def collect(self) -> Iterator[Metric]:
        for settle in self.settlers:
            settle()
        with self._lock:
            parts = list(self._parts)
        for part in parts:
            yield from part.collect()


class ArrayHistogram(Collector):
    """A histogram fed with arrays: one search for a whole array (the client's own takes 1.4 µs a value).

    With a negative bound it has buckets only, no `_sum` and `_count` (the OpenMetrics rule: a sum that can
    fall is no counter); the count is `_bucket{le="+Inf"}`.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = np.array(bounds, dtype=np.float64)
        self._labels = [*(floatToGoString(bound) for bound in bounds), "+Inf"]  # type: ignore[no-untyped-call]
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._lock = renewed_at_fork(threading.Lock())

    def observe(self, values: NDArray[np.float64], weight: int = 1) -> None:
        """Count `values` [K], all finite, `weight` times each."""
        counts = weight * np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        total = weight * float(values.sum())
        with self._lock:
            self._counts += counts
            self._sum += total

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            cumulated, total = self._counts.cumsum().tolist(), self._sum
        buckets = list(zip(self._labels, cumulated, strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)


class Waits(Collector):
    """Waits by stage: `total` of those that are over, and when those that go on began."""

    def __init__(self, stages: Iterable[str]) -> None:
        """stages: those that have samples; it may grow."""
        self._stages = stages
        self._lock = renewed_at_fork(threading.Lock())
        self._total: dict[str, float] = {}
        self._began: dict[str, dict[object, float]] = {}

    @contextmanager
    def wait(self, stage: str) -> Iterator[None]:
        """Around a wait of this stage, in any thread."""
        token = object()
        with self._lock:
            self._began.setdefault(stage, {})[token] = clock.now()
        try:
            yield
        finally:
            with self._lock:
                waited = clock.now() - self._began[stage].pop(token)
                self._total[stage] = self._total.get(stage, 0.0) + waited

    def collect(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "streamadv_wait_seconds",
            "Time spent waiting, counted while it lasts: of a producer for admission or room, of a rank of the "
            "trainer for its next batch, of a worker for entries. Its rate is the number that wait.",
            labels=["stage"],
        )
        longest = GaugeMetricFamily(
            "streamadv_waiting_seconds",
            "How long the longest such wait lasts now, 0 while none does.",
            labels=["stage"],
        )
        with self._lock:
            now = clock.now()
            for stage in self._stages:
                going_on = [now - began for began in self._began.get(stage, {}).values()]
                total.add_metric([stage], self._total.get(stage, 0.0) + sum(going_on))
                longest.add_metric([stage], max(going_on, default=0.0))
        yield total
        yield longest


class Blocked(Collector):
    """Why this process waits, as `blockers` says at the scrape. Only reasons that hold have a sample."""

    def __init__(self, stages: Iterable[str]) -> None:
        """stages: those that a sample may name; it may grow."""
        self.blockers: Blockers = tuple
        self._stages = stages

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "streamadv_blocked",
            '1 while this stage of the process waits for this reason, for more than a second; "Troubleshooting" lists '
            "reasons and remedies. Reasons that do not hold have no series.",
            labels=["stage", "reason"],
        )
        stages, found = set(self._stages), set()
        for who, reason in self.blockers():
            stage = who.partition(" ")[0]
            found.add((stage if stage in stages else OTHER_STAGE, reason))
        for pair in sorted(found):
            family.add_metric(pair, 1.0)
        yield family
