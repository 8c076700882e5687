"""Recorded trajectories in other forms. A format is a function from a path to trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..interchange import read_trajectories
from ..schema import Trajectory
from .chat import read_chat
from .tau_bench import read_tau_bench

#: `streamadv replay --format`; only `trajectory` can be followed while it grows.
FORMATS: Final[dict[str, Callable[[Path], Iterator[Trajectory]]]] = {
    "trajectory": read_trajectories,
    "tau-bench": read_tau_bench,
    "chat": read_chat,
}
