"""A progress bar on a terminal; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Final

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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
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


def lines_in(path: Path) -> int | None:
    """Lines of a file that is there; None for anything else, such as a pipe."""
    try:
        if not S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            chunks = iter(lambda: file.read(READ_BYTES), b"")
            return sum(chunk.count(b"\n") for chunk in chunks)
    except OSError:  # whoever reads it says so
        return None
