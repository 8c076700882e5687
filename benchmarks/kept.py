"""`streamadv bench kept`: what it costs that groups are kept to be looked at, in turns with a run that keeps none."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

from streamadv.run import open_run
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection

from .crew import Window, middle
from .lines import Line
from .pipeline import clean_up, pipeline_crew

#: Heading and key of each column of the table; "cpu" is processor time per trajectory, of all processes and the server.
COLUMNS: Final = {
    "cpu us": "cpu_microseconds_of_all",
    "/ nothing": "ratio_to_nothing",
    "traj/s": "per_second",
}
#: So much is full within a window, so that the oldest groups go all the time.
FULL_BYTES: Final = 4 << 20
RUNS: Final = {
    "nothing": RunSettings(keep_bytes=0),
    "defaults": RunSettings(),
    "everything": RunSettings(keep={"trained": 1.0}, keep_bytes=FULL_BYTES),
}


def measure_kept(
    url: str, chains: Sequence[str], tokens: Sequence[int], seconds: float, repeat: int
) -> Iterator[dict[str, Any]]:
    """One record for each chain, size and way of keeping, over `repeat` windows in turns on the same server.

    The ratio is the median of those of each turn, so that what else the machine does meets both sides.
    """
    for kind in chains:
        for size in tokens:
            lines = {name: Line(kind, size, f"bench-{secrets.token_hex(6)}") for name in RUNS}
            windows = _measure(url, lines, seconds, repeat)
            spent = {
                name: [1e6 * sum(each.cpu.values()) for each in measured]
                for name, measured in windows.items()
            }
            for name, measured in windows.items():
                ratios = [own / other for own, other in zip(spent[name], spent["nothing"], strict=True)]
                window = middle(measured)
                yield {
                    "name": f"{lines[name].name}, {name}",
                    "chain": kind,
                    "tokens": size,
                    "kept": name,
                    "cpu_microseconds_of_all": statistics.median(spent[name]),
                    "ratio_to_nothing": statistics.median(ratios),
                    "per_second": window.per_second,
                    "cpu_microseconds": {each: 1e6 * value for each, value in window.cpu.items()},
                }


def _measure(url: str, lines: dict[str, Line], seconds: float, repeat: int) -> dict[str, list[Window]]:
    """The windows of each run, turn by turn; a turn begins where the one before has ended."""
    with ExitStack() as stack:
        crews = {}
        for name, line in lines.items():
            with Connection(url) as connection:
                open_run(connection, line.run, RUNS[name])
            stack.callback(clean_up, url, line)
            crews[name] = pipeline_crew(url, line)
        for crew in crews.values():
            stack.enter_context(crew)
            crew.wait_until_ready()
        windows: dict[str, list[Window]] = {name: [] for name in crews}
        for turn in range(repeat):
            for name in crews if turn % 2 else reversed(crews):
                windows[name].append(crews[name].measure(seconds, seconds / 2))
    return windows
