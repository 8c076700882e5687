"""`streamadv bench kept`: what it costs that groups are kept to be looked at, in turns with a run that keeps none."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

from streamadv.run.manifest import RunSettings

from .alone import Alone
from .lines import Line

#: Heading and key of each column of the table: processor time of all stages and the server, per trajectory.
COLUMNS: Final = {
    "cpu us": "cpu_microseconds",
    "/ nothing": "ratio_to_nothing",
    "low": "low_quartile",
    "high": "high_quartile",
}
BATCHES: Final = 4
#: So much is full within a round, so that the oldest groups go all the time.
FULL_BYTES: Final = 4 << 20
RUNS: Final = {
    "nothing": RunSettings(keep_bytes=0),
    "defaults": RunSettings(),
    "everything": RunSettings(keep={"trained": 1.0}, keep_bytes=FULL_BYTES),
}


def measure_kept(
    url: str, chains: Sequence[str], tokens: Sequence[int], repeat: int
) -> Iterator[dict[str, Any]]:
    """One record for each chain, size and way of keeping, over `repeat` rounds after one that is not counted.

    The ratio is the median of those of each round, with their quartiles, so that what else the machine does meets both.
    """
    for kind in chains:
        for size in tokens:
            line = Line(kind, size)
            spent = _measure(url, line, repeat)
            for name, own in spent.items():
                ratios = [each / other for each, other in zip(own, spent["nothing"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                yield {
                    "name": f"{line.name}, {name}",
                    "chain": kind,
                    "tokens": size,
                    "kept": name,
                    "cpu_microseconds": statistics.median(own),
                    "ratio_to_nothing": middle,
                    "low_quartile": low,
                    "high_quartile": high,
                }


def _measure(url: str, line: Line, repeat: int) -> dict[str, list[float]]:
    """Processor time of a trajectory in microseconds, by run and round."""
    spent: dict[str, list[float]] = {name: [] for name in RUNS}
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Alone(url, line, batches=BATCHES, settings=settings))
            for name, settings in RUNS.items()
        }
        for number in range(repeat + 1):
            for name in runs if number % 2 else reversed(runs):
                costs = [*runs[name].round().values(), runs[name].housekeep()]
                spent[name] += [sum(cost.client + cost.server for cost in costs)] if number else []
    return spent
