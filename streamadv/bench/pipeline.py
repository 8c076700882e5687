"""`streamadv bench pipeline`: every stage as a process, beside the ceiling and the peers, in turns."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from ..connection import Connection
from ..inventory import delete_run
from ..run import find_run
from .crew import Crew, Window, middle
from .lines import Line

#: Heading and key of each column of the table; cpu: microseconds of processor time per trajectory, of all processes.
COLUMNS: Final = {
    "traj/s": "per_second",
    "Mtok/s": "million_tokens_per_second",
    "ceiling": "ceiling_per_second",
    "x ceiling": "ratio_to_ceiling",
    "cpu us": "cpu_microseconds_of_all",
    "cpu ceil.": "ceiling_cpu_microseconds_of_all",
}


def record(line: Line, pipeline: Window, others: Mapping[str, Window]) -> dict[str, Any]:
    """One record of the JSON; ratios are those of trajectories per second."""
    rate = pipeline.per_second
    found = {
        "name": line.name,
        "chain": line.kind,
        "tokens": line.tokens,
        "per_second": rate,
        "million_tokens_per_second": rate * line.tokens / 1e6,
        "cpu_microseconds_of_all": 1e6 * sum(pipeline.cpu.values()),
        "cpu_microseconds": {name: 1e6 * spent for name, spent in pipeline.cpu.items()},
    }
    for name, window in others.items():
        found[f"{name}_per_second"] = window.per_second
        found[f"ratio_to_{name}"] = rate / window.per_second
        found[f"{name}_cpu_microseconds_of_all"] = 1e6 * sum(window.cpu.values())
        found[f"{name}_cpu_microseconds"] = {who: 1e6 * spent for who, spent in window.cpu.items()}
    return found


def stages(line: Line) -> dict[str, list[str]]:
    """Commands of the pipeline's processes, in data order."""
    load = ["-m", "streamadv.bench.load"]
    return {
        "producer": [*load, "producer", line.to_json()],
        "grouper": ["-m", "streamadv", "worker", "grouper"],
        "advantage": ["-m", "streamadv", "worker", "advantage"],
        "trainer": [*load, "trainer", line.to_json()],
    }


def ceiling(line: Line) -> dict[str, list[str]]:
    """Commands of the ceiling's processes."""
    module = ["-m", "streamadv.bench.ceiling"]
    return {role: [*module, role, line.to_json()] for role in ("writer", "reader")}


def measure_pipeline(
    url: str, chains: Sequence[str], tokens: Sequence[int], seconds: float, repeat: int
) -> Iterator[dict[str, Any]]:
    """One result for each chain and size, as they are done: medians of `repeat` windows of `seconds` each.

    Pipeline, ceiling and peers take turns on the same server, so that whatever else the machine does meets all.
    """
    for kind in chains:
        for size in tokens:
            yield measure_line(url, Line(kind, size, f"bench-{secrets.token_hex(6)}"), seconds, repeat)


def measure_line(url: str, line: Line, seconds: float, repeat: int) -> dict[str, Any]:
    """One line of the table."""
    with ExitStack() as stack:
        stack.callback(clean_up, url, line)
        crews = {
            "streamadv": stack.enter_context(pipeline_crew(url, line)),
            "ceiling": stack.enter_context(Crew(ceiling(line), url, "writer", {})),
        }
        windows: dict[str, list[Window]] = {name: [] for name in crews}
        for crew in crews.values():
            crew.wait_until_ready()
        for _ in range(repeat):
            for name, crew in crews.items():
                windows[name].append(crew.measure(seconds, min(seconds, 1.0)))
    medians = {name: middle(found) for name, found in windows.items()}
    return record(line, medians.pop("streamadv"), medians)


def pipeline_crew(url: str, line: Line) -> Crew:
    """The whole pipeline, not started."""
    return Crew(stages(line), url, "producer", {"STREAMADV_RUN": line.run})


def clean_up(url: str, line: Line) -> None:
    """Leave a server that is not ours as it was."""
    with Connection(url) as connection:
        delete_run(find_run(connection, line.run))
        client = connection.scripts
        keys = [f"streamadv-bench:{line.run}:{name}" for name in ("permits", "slices")]
        client.delete(*keys)
