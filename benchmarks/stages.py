"""`streamadv bench stages`: each stage alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

from .alone import Alone, Cost
from .lines import Line

#: Batches of a round, so that a stage has something to do.
BATCHES: Final = 4

COLUMNS: Final = {
    "traj/s": "per_second",
    "Mtok/s": "million_tokens_per_second",
    "Mtok/s core": "million_tokens_per_core_second",
    "client us": "client_microseconds",
    "server us": "server_microseconds",
}


def measure_stages(
    url: str, chains: Sequence[str], tokens: Sequence[int], repeat: int
) -> Iterator[dict[str, Any]]:
    """One record for each chain, size and stage: medians of `repeat` rounds after one that is not counted."""
    for kind in chains:
        for size in tokens:
            line = Line(kind, size)
            with Alone(url, line, batches=BATCHES) as alone:
                alone.round()
                rounds = [alone.round() for _ in range(repeat)]
            for stage in rounds[0]:
                yield _record(line, stage, middle_cost([each[stage] for each in rounds]))


def middle_cost(costs: Sequence[Cost]) -> Cost:
    """Medians."""
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def _record(line: Line, stage: str, cost: Cost) -> dict[str, Any]:
    return {
        "name": f"{line.name} {stage}",
        "chain": line.kind,
        "tokens": line.tokens,
        "stage": stage,
        "per_second": 1e6 / cost.wall,
        "million_tokens_per_second": line.tokens / cost.wall,
        "million_tokens_per_core_second": line.tokens / cost.client,
        "client_microseconds": cost.client,
        "server_microseconds": cost.server,
    }
