"""Recorded trajectories in other forms. A format is a function from a path to trajectories.

`records.py` reads files as numbered records; `chat.py` takes any list of messages, `tau_bench.py` runs of tau-bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ...errors import TrajectoryError
from ..interchange import read_trajectories
from ..schema import Trajectory
from .chat import read_chat
from .records import first_record
from .tau_bench import read_tau_bench

#: `streamadv replay --format`; only `trajectory` can be followed while it grows.
FORMATS: Final[dict[str, Callable[[Path], Iterator[Trajectory]]]] = {
    "trajectory": read_trajectories,
    "tau-bench": read_tau_bench,
    "chat": read_chat,
}

#: The field that tells a format: its records have it, and those of the formats before it here do not.
_TELLING: Final = {"traj": "tau-bench", "messages": "chat", "input_ids": "trajectory"}


def likely_format(path: Path) -> str | None:
    """The format that the first record of a file seems to have; None if it has none of them, or cannot be read."""
    try:
        record = first_record(path)
    except TrajectoryError:
        return None
    return next((name for field, name in _TELLING.items() if field in record), None)
