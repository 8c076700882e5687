"""The tables of the server benchmarks, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

NAME_WIDTH = 26


def print_table(columns: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Print a line for each record as soon as it is there; returns all. A figure that a record lacks is a dash.

    columns: heading and key of each figure.
    """
    print(f"{'':{NAME_WIDTH}}" + "".join(f"{name:>{_width(name)}}" for name in columns), flush=True)
    printed = []
    for record in records:
        cells = (_cell(record.get(key), _width(name)) for name, key in columns.items())
        print(f"{record['name']:{NAME_WIDTH}}" + "".join(cells), flush=True)
        printed.append(record)
    return printed


def write_json(path: Path | None, machine: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """`machine`, `aof` and `results`."""
    if path is not None:
        written = {"machine": machine, "aof": machine["aof"], "results": list(records)}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _width(name: str) -> int:
    return max(11, len(name) + 2)


def _cell(value: float | None, width: int) -> str:
    if value is None:
        return f"{'-':>{width}}"
    return f"{value:{width}.0f}" if abs(value) >= 100 else f"{value:{width}.3g}"
