"""What a process exports: the instruments of the stages that it runs, and collectors that were added."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class Registry(Collector):
    """Sets of instruments and single collectors, in the order in which they were added. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[Collector] = []
        #: Called before the numbers leave: by whoever counts what it has noted only then.
        self.settlers: list[Callable[[], object]] = []

    def add(self, *parts: Collector) -> None:
        """Export these too; what is exported already stays as it is."""
        with self._lock:
            self._parts += [part for part in parts if part not in self._parts]

    def remove(self, part: Collector) -> None:
        """Export this no longer."""
        with self._lock:
            if part in self._parts:
                self._parts.remove(part)

    def collect(self) -> Iterator[Metric]:
        for settle in self.settlers:
            settle()
        with self._lock:
            parts = list(self._parts)
        for part in parts:
            yield from part.collect()
