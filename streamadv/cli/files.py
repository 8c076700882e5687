"""Files of trajectories, as commands read them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..errors import SettingError, TrajectoryError
from ..extras import require
from ..trajectory.adapters import FORMATS, likely_format
from ..trajectory.schema import Trajectory
from .progress import lines_in

DEFAULT_FORMAT = "trajectory"


def add_format_option(parser: argparse.ArgumentParser) -> None:
    """How the file is written; read it with `trajectories_of`."""
    parser.add_argument("--format", choices=sorted(FORMATS), help=f"of the file (default: {DEFAULT_FORMAT})")


def trajectories_of(path: Path, given: str | None) -> Iterator[Trajectory]:
    """The trajectories of a file, or of an archive's folder. given: the format, None without --format.

    Raises TrajectoryError, which names the format that the file seems to have.
    """
    if path.is_dir():
        if given is not None:
            raise SettingError(
                f"--format {given} is of a file, {path} is a folder: leave it out for an archive"
            )
        yield from _archived(path)
        return
    try:
        yield from FORMATS[given or DEFAULT_FORMAT](path)
    except TrajectoryError as error:
        likely = likely_format(path) if given is None else None
        if likely in (None, DEFAULT_FORMAT):
            raise
        raise TrajectoryError(f"{error}; the file looks like {likely}: give --format {likely}") from None


def number_in(path: Path, given: str | None) -> int | None:
    """Trajectories in a file, for a progress bar; None where only reading it tells."""
    is_lines = (given or DEFAULT_FORMAT) == DEFAULT_FORMAT and not path.is_dir()
    return lines_in(path) if is_lines else None


def _archived(path: Path) -> Iterator[Trajectory]:
    """What `streamadv archive` has written into a folder, the oldest files first."""
    require(f"{path}: an archive", "pyarrow")
    from ..archive.folder import open_folder
    from ..archive.table import read_trajectories

    for file in sorted(open_folder(path).files(), key=lambda file: file.first):
        yield from read_trajectories(file.path)
