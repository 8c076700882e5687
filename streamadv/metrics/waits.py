"""What a process waits for, measured while it lasts: a scrape in the middle of a wait shows the time so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import clock

#: Returns (who, reason) of everybody in this process who is blocked now; the first word of who is a stage.
Blockers = Callable[[], Iterable[tuple[str, str]]]
OTHER_STAGE: Final = "other"


class Waits(Collector):
    """Waits by stage: `total` of those that are over, and when those that go on began."""

    def __init__(self, stages: Iterable[str]) -> None:
        """stages: those that have samples; it may grow."""
        self._stages = stages
        self._lock = threading.Lock()
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

    def describe(self) -> Iterator[Metric]:
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        total, longest = self._families()
        with self._lock:
            now = clock.now()
            for stage in self._stages:
                going_on = [now - began for began in self._began.get(stage, {}).values()]
                total.add_metric([stage], self._total.get(stage, 0.0) + sum(going_on))
                longest.add_metric([stage], max(going_on, default=0.0))
        yield total
        yield longest

    def _families(self) -> tuple[CounterMetricFamily, GaugeMetricFamily]:
        return (
            CounterMetricFamily(
                "streamadv_wait_seconds",
                "Time spent waiting, counted while it lasts: of a producer for admission or room, of a rank of the "
                "trainer for its next batch, of a worker for entries. Its rate is the number that wait.",
                labels=["stage"],
            ),
            GaugeMetricFamily(
                "streamadv_waiting_seconds",
                "How long the longest such wait lasts now, 0 while none does.",
                labels=["stage"],
            ),
        )


class Blocked(Collector):
    """Why this process waits, as `blockers` says at the scrape. Only reasons that hold have a sample."""

    def __init__(self, stages: Iterable[str]) -> None:
        """stages: those that a sample may name; it may grow."""
        self.blockers: Blockers = tuple
        self._stages = stages

    def describe(self) -> Iterator[Metric]:
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        family, stages = self._family(), set(self._stages)
        found = {(who.partition(" ")[0], reason) for who, reason in self.blockers()}
        for stage, reason in sorted(
            {(who if who in stages else OTHER_STAGE, reason) for who, reason in found}
        ):
            family.add_metric([stage, reason], 1.0)
        yield family

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "streamadv_blocked",
            '1 while this stage of the process waits for this reason, for more than a second; "Troubleshooting" lists '
            "reasons and remedies. Reasons that do not hold have no series.",
            labels=["stage", "reason"],
        )
