"""Interchange files: one trajectory per line, as JSON in the form of `schema.Trajectory.to_json`.

Files are data from outside: readers bound a line before they parse it, and report every problem as a TrajectoryError
of one line, `file:line: field: problem`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from pydantic_core import from_json, to_json

from ..errors import TrajectoryError
from ..messages import one_line
from .schema import Trajectory, parse_trajectory

#: 4 MiB of columns (the default limit of a trajectory) are some 25 MB as JSON lists.
MAX_LINE_BYTES: Final = 64 << 20
POLL_S: Final = 0.2


def poll() -> bool:
    """A `wait` of `read_trajectories`: sleeps POLL_S and returns False, so reading never stops."""
    return threading.Event().wait(POLL_S)


def read_trajectories(
    path: Path, wait: Callable[[], bool] | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Trajectory]:
    """The trajectories of the interchange file `path`, in file order. Blank lines are skipped.

    With `wait` a writer may still append: at the end of the file the reader calls `wait()`, and reads on until it
    returns True (`threading.Event.wait` fits). It then takes a last line without a newline for an unfinished one;
    without `wait` such a line must be whole JSON. Raises TrajectoryError.
    """
    with open_for_reading(path) as file:
        for number, line in _lines(file, path, wait, max_line_bytes):
            where = f"{path}:{number}"
            yield parse_trajectory(parse_json(line, where), where)


def write_trajectory(file: IO[bytes], trajectory: Trajectory) -> None:
    """Append one line to `file`, in a single write.

    Only extra columns may hold NaN or infinity. The file says `NaN` and `Infinity`, the form of Python's json module.
    """
    file.write(to_json(trajectory.to_json(), inf_nan_mode="constants") + b"\n")


def recover(path: Path) -> dict[str, set[int]]:
    """Prepare the output file `path` for appending, and return its contents: group_id -> rollout indices.

    Removes a last line without a newline, because a crash has cut it off. The writer may have died between two
    trajectories of a group, and a complete group may have fewer members than its size, so only the indices tell what
    the writer has to add when the group is delivered again. What is no regular file counts as empty. Raises
    TrajectoryError, and leaves the file unchanged, if `path` is no interchange file.
    """
    if not path.is_file():
        return {}
    written: dict[str, set[int]] = {}
    whole = 0  # bytes up to the last newline
    with open_for_reading(path, "r+b") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"{path}:{number}"
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE_BYTES or not (written or _may_begin_record(line)):
                    raise TrajectoryError(f"{where}: is no trajectory: choose another output file")
                break
            whole += len(line)
            if not line.isspace():
                group_id, rollout_index = _identity(parse_json(line, where), where)
                written.setdefault(group_id, set()).add(rollout_index)
        file.truncate(whole)
        file.flush()
        os.fsync(file.fileno())
    return written


def open_for_reading(path: Path, mode: str = "rb") -> IO[Any]:
    """Open `path`. Raises TrajectoryError with the path in place of an OSError."""
    try:
        return path.open(mode)
    except OSError as error:
        raise TrajectoryError(f"{path}: cannot be read: {error.strerror}") from error


def parse_json(text: bytes, where: str) -> Any:
    """The value of a JSON text. Raises TrajectoryError, also for invalid UTF-8 and for deep nesting."""
    try:
        return from_json(text)
    except ValueError as error:
        raise TrajectoryError(f"{where}: is no valid JSON: {one_line(str(error))}") from error


def _lines(
    file: IO[bytes], path: Path, wait: Callable[[], bool] | None, max_line_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Non-blank lines with their numbers; `wait` None = nobody appends any more."""
    number, line = 1, b""
    while True:
        line += file.readline(max_line_bytes + 1 - len(line))
        where = f"{path}:{number}"
        if len(line) > max_line_bytes:
            raise TrajectoryError(
                f"{where}: is longer than {max_line_bytes} bytes: split the file into lines, "
                f"one trajectory each, or shorten the trajectory"
            )
        if line.endswith(b"\n"):
            if not line.isspace():
                yield number, line
            number, line = number + 1, b""
        elif wait is None:
            if line.strip():
                try:
                    parse_json(line, where)
                except TrajectoryError as error:
                    raise TrajectoryError(
                        f"{where}: is cut off (no newline at its end): remove it, or follow the file if it still grows"
                    ) from error
                yield number, line
            return
        else:
            if file.seekable() and os.fstat(file.fileno()).st_size < file.tell():
                raise TrajectoryError(f"{where}: the file was cut while it was followed: start again")
            if wait():
                return


def _may_begin_record(line: bytes) -> bool:
    """Whether `line` can be the beginning of what write_trajectory writes."""
    start = b'{"group_id":"'
    return line.startswith(start) or start.startswith(line)


def _identity(record: Any, where: str) -> tuple[str, int]:
    if isinstance(record, dict):
        group_id, rollout_index = record.get("group_id"), record.get("rollout_index")
        if isinstance(group_id, str) and type(rollout_index) is int:
            return group_id, rollout_index
    raise TrajectoryError(f"{where}: is no trajectory (group_id, rollout_index): choose another output file")
