"""Files of trajectories, as commands read them, and a progress bar on a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Final

from ..errors import SettingError, TrajectoryError
from ..extras import require
from ..messages import printable
from ..trajectory.adapters import FORMATS, likely_format
from ..trajectory.schema import Trajectory

DEFAULT_FORMAT = "trajectory"


def add_format_option(parser: argparse.ArgumentParser) -> None:
    """How the file is written; read it with `trajectories_of`."""
    parser.add_argument("--format", choices=sorted(FORMATS), help=f"of the file (default: {DEFAULT_FORMAT})")


def trajectories_of(path: Path, given: str | None) -> Iterator[Trajectory]:
    """The trajectories of a file, or of an archive's folder, its oldest files first.

    given: the format, None without --format.

    Raises TrajectoryError, which names the format that the file seems to have.
    """
    if path.is_dir():
        if given is not None:
            raise SettingError(
                f"--format {given} is of a file, {path} is a folder: leave it out for an archive"
            )
        require(f"{path}: an archive", "pyarrow")
        from ..archive.folder import open_folder
        from ..archive.table import read_trajectories

        for file in sorted(open_folder(path).files(), key=lambda file: file.first):
            yield from read_trajectories(file.path)
        return
    try:
        yield from FORMATS[given or DEFAULT_FORMAT](path)
    except TrajectoryError as error:
        likely = likely_format(path) if given is None else None
        if likely in (None, DEFAULT_FORMAT):
            raise
        raise TrajectoryError(f"{error}; the file looks like {likely}: give --format {likely}") from None


def number_in(path: Path, given: str | None) -> int | None:
    """Trajectories in a file, for a progress bar; None where only reading it tells, such as of a pipe."""
    try:
        if given not in (None, DEFAULT_FORMAT) or not S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            chunks = iter(lambda: file.read(READ_BYTES), b"")
            return sum(chunk.count(b"\n") for chunk in chunks)
    except OSError:  # whoever reads it says so
        return None


#: Called with how many more are done.
Advance = Callable[[int], object]

READ_BYTES: Final = 1 << 20


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Advance]:
    """Shows on stderr how many of `total` (None: not known) are done, how fast, and for how long."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        "{task.fields[rate]}",
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total, rate="")

        def advance(count: int) -> None:
            shown.advance(task, count)
            now = shown.tasks[0]
            if now.elapsed:
                shown.update(task, rate=f"{now.completed / now.elapsed:.0f}/s")

        yield advance


#: Width of a column at most; a longer name moves the rest of its line.
MAX_WIDTH: Final = 40


def in_columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Rows in columns, fit for a terminal; a short row ends with a text of any length.

    numbers: all columns but the first are right-aligned.
    """
    rows = [list(map(printable, row)) for row in rows]
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [min(MAX_WIDTH, max(map(len, column))) for column in zip(*whole, strict=True)]
    lines = []
    for first, *others in rows:
        cells = zip(others, widths[1:], strict=False)
        aligned = [cell.rjust(width) if numbers else cell.ljust(width) for cell, width in cells]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)
