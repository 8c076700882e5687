"""`streamadv bench pipeline`: every stage as a process, beside the ceiling and the peers, in turns."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from ..run import find_run
from ..status.audit import delete_run
from ..store.connection import Connection
from .crew import Crew, Window, middle
from .lines import Line
from .others import pipelinerl_crews, transferqueue_crew, transferqueue_python

#: The chain of the lines with peers: theirs move the same columns then, and no more.
PEERS_BESIDE: Final = "grpo"

#: Heading and key of each column of the table; cpu: microseconds of processor time per trajectory, of all processes.
COLUMNS: Final = {
    "traj/s": "per_second",
    "Mtok/s": "million_tokens_per_second",
    "ceiling": "ceiling_per_second",
    "x ceiling": "ratio_to_ceiling",
    "x PRL lists": "ratio_to_pipelinerl_lists",
    "x arrays": "ratio_to_pipelinerl_arrays",
    "x TQ": "ratio_to_transferqueue",
    "x TQ one": "ratio_to_transferqueue_one",
    "cpu us": "cpu_microseconds_of_all",
    "cpu ceil.": "ceiling_cpu_microseconds_of_all",
}


def record(line: Line, pipeline: Window, compared: Mapping[str, Window]) -> dict[str, Any]:
    """One record of the JSON; ratios are those of trajectories per second."""
    rate = pipeline.per_second
    rates = {
        "name": line.name,
        "chain": line.kind,
        "tokens": line.tokens,
        "per_second": rate,
        "million_tokens_per_second": rate * line.tokens / 1e6,
        "cpu_microseconds_of_all": 1e6 * sum(pipeline.cpu.values()),
        "cpu_microseconds": {name: 1e6 * spent for name, spent in pipeline.cpu.items()},
    }
    for name, window in compared.items():
        rates[f"{name}_per_second"] = window.per_second
        rates[f"ratio_to_{name}"] = rate / window.per_second
        rates[f"{name}_cpu_microseconds_of_all"] = 1e6 * sum(window.cpu.values())
        rates[f"{name}_cpu_microseconds"] = {who: 1e6 * spent for who, spent in window.cpu.items()}
    return rates


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
    url: str,
    chains: Sequence[str],
    tokens: Sequence[int],
    seconds: float,
    repeat: int,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """One record for each chain and size, as they are done: medians of `repeat` windows of `seconds` each.

    Pipeline, ceiling and, where the trainer needs no computed columns, PipelineRL's way take turns on the same server,
    so that whatever else the machine does meets all. TransferQueue has its own processes, which are never quiet: it
    comes after them. `say` gets a line about what is left out.
    """
    python = transferqueue_python(say) if PEERS_BESIDE in chains else None
    for kind in chains:
        for size in tokens:
            line = Line(kind, size, f"bench-{secrets.token_hex(6)}")
            windows = measure_line(url, line, seconds, repeat)
            if python is not None and kind == PEERS_BESIDE:
                windows |= measure_transferqueue(url, line, python, seconds, repeat)
            yield record(line, windows.pop("streamadv"), windows)


def measure_line(url: str, line: Line, seconds: float, repeat: int) -> dict[str, Window]:
    """`streamadv` and what is measured in turns with it."""
    with ExitStack() as stack:
        stack.callback(clean_up, url, line)
        crews = {"streamadv": pipeline_crew(url, line), "ceiling": Crew(ceiling(line), url, "writer")}
        if line.kind == PEERS_BESIDE:
            crews |= pipelinerl_crews(url, line)
        for crew in crews.values():
            stack.enter_context(crew)
        for crew in crews.values():
            crew.wait_until_ready()
        windows: dict[str, list[Window]] = {name: [] for name in crews}
        for _ in range(repeat):
            for name, crew in crews.items():
                windows[name].append(crew.measure(seconds, seconds / 2))
    return {name: middle(measured) for name, measured in windows.items()}


def measure_transferqueue(
    url: str, line: Line, python: Path, seconds: float, repeat: int
) -> dict[str, Window]:
    """Batches put and got, and single trajectories put."""
    with transferqueue_crew(url, line, python) as crew:
        crew.wait_until_ready()
        together = [crew.measure(seconds, seconds / 2) for _ in range(repeat)]
        alone = [crew.measure(seconds, seconds / 2, "one") for _ in range(repeat)]
    return {"transferqueue": middle(together), "transferqueue_one": middle(alone)}


def pipeline_crew(url: str, line: Line) -> Crew:
    """The whole pipeline, not started."""
    return Crew(stages(line), url, "producer", run=line.run)


def clean_up(url: str, line: Line) -> None:
    """Leave a server that is not ours as it was."""
    with Connection(url) as connection:
        delete_run(find_run(connection, line.run))
        keys = connection.scripts.scan_iter(match=f"streamadv-bench:{line.run}:*", count=1000)
        for key in keys:
            connection.scripts.unlink(key)
