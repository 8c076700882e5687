"""`streamadv bench pipeline`: every stage as a process, beside the ceilings and the peers, in turns."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from streamadv.errors import ProcessEndedError
from streamadv.run.run import delete_run
from streamadv.store.connection import Connection

from .crew import Crew, Window, middle
from .lines import GROUP_SIZE, WAYS, Line, Way
from .others import pipelinerl_crews, transferqueue_crew, transferqueue_python
from .slowest import Watch

#: The chain of the lines with peers: theirs move the same columns then, and no more.
PEERS_BESIDE: Final = "grpo"

#: What is measured unless something else is asked for: chain, tokens, ways of pushing.
CASES: Final[tuple[tuple[str, int, tuple[Way, ...]], ...]] = (
    ("grpo", 512, WAYS),
    ("grpo", 4096, ("push", "ahead")),
    ("grpo", 32768, ("push",)),
    ("gae+kl", 4096, ("push",)),
)

#: Heading and key of each column of the table; "cpu" is processor time per trajectory, of all processes and the server.
COLUMNS: Final = {
    "cpu us": "cpu_microseconds_of_all",
    "ceiling us": "ceiling_cpu_microseconds_of_all",
    "ceiling/": "cpu_ratio_to_ceiling",
    "packets/": "cpu_ratio_to_packet_ceiling",
    "lists/": "cpu_ratio_to_pipelinerl_lists",
    "arrays/": "cpu_ratio_to_pipelinerl_arrays",
    "pickle/": "cpu_ratio_to_pipelinerl_pickle",
    "traj/s": "per_second",
    "x ceiling": "ratio_to_ceiling",
    "x arrays": "ratio_to_pipelinerl_arrays",
    "x pickle": "ratio_to_pipelinerl_pickle",
    "x TQ": "ratio_to_transferqueue",
    "x TQ one": "ratio_to_transferqueue_one",
    "slowest ms": "slowest_script_milliseconds",
}


def record(line: Line, way: str, pipeline: Window, compared: Mapping[str, Window]) -> dict[str, Any]:
    """One record of the JSON. More is better in all ratios: own rate over another's, another's cost over the own."""
    rate, spent = pipeline.per_second, _microseconds(pipeline)
    found = {
        "name": f"{line.name} {way}",
        "chain": line.kind,
        "tokens": line.tokens,
        "way": way,
        "cpu_microseconds_of_all": sum(spent.values()),
        "cpu_microseconds": spent,
        "per_second": rate,
        "million_tokens_per_second": rate * line.tokens / 1e6,
    }
    for name, window in compared.items():
        found[f"{name}_per_second"] = window.per_second
        found[f"ratio_to_{name}"] = rate / window.per_second
        if window.cpu:
            others = _microseconds(window)
            found[f"{name}_cpu_microseconds_of_all"] = sum(others.values())
            found[f"{name}_cpu_microseconds"] = others
            found[f"cpu_ratio_to_{name}"] = sum(others.values()) / sum(spent.values())
    return found


def _microseconds(window: Window) -> dict[str, float]:
    """Processor time per trajectory, by process; "producer ahead" is the producer that pushes so."""
    return {name.partition(" ")[0]: 1e6 * spent for name, spent in window.cpu.items()}


def stages(line: Line) -> dict[str, list[str]]:
    """Commands of the pipeline's processes, in data order."""
    return {"producer": _load("producer", line), **_takers(line)}


def _takers(line: Line) -> dict[str, list[str]]:
    return {
        "grouper": ["-m", "streamadv", "worker", "grouper"],
        "advantage": ["-m", "streamadv", "worker", "advantage"],
        "trainer": _load("trainer", line),
    }


def _load(role: str, line: Line, *words: str) -> list[str]:
    return ["-m", "benchmarks.load", role, line.to_json(), *words]


def ceiling_crew(url: str, line: Line, members: int) -> Crew:
    """The ceiling with so many trajectories in a hash, not started."""
    module = ["-m", "benchmarks.ceiling"]
    roles = ("writer", "reader")
    return Crew({role: [*module, role, line.to_json(), str(members)] for role in roles}, url, "writer")


def measure_pipeline(
    url: str,
    cases: Sequence[tuple[str, int, tuple[Way, ...]]],
    seconds: float,
    repeat: int,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """One record for each chain, size and way of pushing: medians of `repeat` windows of `seconds` each.

    Pipeline, ceilings and, where the trainer needs no computed columns, PipelineRL's way take turns on the same server,
    so that whatever else the machine does meets all. TransferQueue has its own processes, which are never quiet: it
    comes after them. `say` gets a line about what is left out.
    """
    python = transferqueue_python(say) if any(kind == PEERS_BESIDE for kind, *_ in cases) else None
    for kind, size, ways in cases:
        line = Line(kind, size, f"bench-{secrets.token_hex(6)}")
        with Watch(url) as watch:
            windows = measure_line(url, line, ways, watch, seconds, repeat)
        if python is not None and kind == PEERS_BESIDE:
            try:
                windows |= measure_transferqueue(url, line, python, seconds, repeat)
            except ProcessEndedError as error:  # what was measured before it stays
                say(f"TransferQueue is left out at {line.name}: {error}")
        own = {way: windows.pop(way) for way in ways}
        for way, window in own.items():
            yield record(line, way, window, windows) | watch.figures(way)


def measure_line(
    url: str, line: Line, ways: Sequence[Way], watch: Watch, seconds: float, repeat: int
) -> dict[str, Window]:
    """A window for each way of pushing and for what is measured in turns with them; `watch` notes what scripts took."""
    with ExitStack() as stack:
        stack.callback(clean_up, url, line)
        pipeline = pipeline_crew(url, line, ways)
        others = {
            "ceiling": ceiling_crew(url, line, 1),
            "packet_ceiling": ceiling_crew(url, line, GROUP_SIZE),
        }
        if line.kind == PEERS_BESIDE:
            others |= pipelinerl_crews(url, line)
        for crew in (pipeline, *others.values()):
            stack.enter_context(crew)
        for crew in (pipeline, *others.values()):
            crew.wait_until_ready()
        windows: dict[str, list[Window]] = {name: [] for name in (*ways, *others)}
        for _ in range(repeat):
            for way in ways:
                watch.begin()
                windows[way].append(pipeline.measure(seconds, seconds / 2, source=f"producer {way}"))
                watch.end(way)
            for name, crew in others.items():
                windows[name].append(crew.measure(seconds, seconds / 2))
    return {name: middle(measured) for name, measured in windows.items()}


def measure_transferqueue(
    url: str, line: Line, python: Path, seconds: float, repeat: int
) -> dict[str, Window]:
    """Batches put and got, and single trajectories put; without processor time, because Ray's processes are its own."""
    with transferqueue_crew(url, line, python) as crew:
        crew.wait_until_ready()
        together = [crew.measure(seconds, seconds / 2) for _ in range(repeat)]
        alone = [crew.measure(seconds, seconds / 2, "one") for _ in range(repeat)]
    windows = {"transferqueue": middle(together), "transferqueue_one": middle(alone)}
    return {name: replace(window, cpu={}) for name, window in windows.items()}


def pipeline_crew(url: str, line: Line, ways: Sequence[Way] = ("push",)) -> Crew:
    """The whole pipeline with a producer for each way of pushing, not started."""
    producers = {f"producer {way}": _load("producer", line, way) for way in ways}
    return Crew(producers | _takers(line), url, *producers, run=line.run, ready=len(ways) + 1)


def clean_up(url: str, line: Line) -> None:
    """Leave a server that is not ours as it was."""
    with Connection(url) as connection:
        delete_run(connection, line.run)
        keys = connection.scripts.scan_iter(match=f"streamadv-bench:{line.run}:*", count=1000)
        for key in keys:
            connection.scripts.unlink(key)
