"""`streamadv archive`: writes what went by into Parquet files."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from ..archive.folder import create_folder
from ..messages import counted
from . import add_process_options, connect, settings_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "archive",
        help="writes what went by into Parquet files",
        description="Follows the groups that the run keeps (settings keep and keep_bytes), and writes them into whole "
        "files of FOLDER until a signal; started again it goes on where the files end. In a run with the setting "
        "archive no group is missing, and none begins while too much waits to be written. streamadv replay FOLDER "
        "pushes it again, streamadv rewind --archive FOLDER computes its batches.",
    )
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FOLDER",
        dest="folder",
        help="of this run alone; made if need be",
    )
    parser.add_argument("--once", action="store_true", help="write what is there, then end")
    add_process_options(parser)
    parser.set_defaults(run=run, packages=("pyarrow",))


def run(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    if not arguments.once:
        return int(importlib.import_module("workers.archiver").main(settings, arguments.folder))
    from ..archive.follow import Archive, created_at
    from ..archive.table import PARQUET
    from ..run import find_run

    with connect(arguments) as connection:
        found = find_run(connection, settings.run)
        folder = create_folder(arguments.folder, found.keys, created_at(found))
        with Archive(found, folder, PARQUET) as archive:
            while archive.look():
                pass
            archive.finish()
            count = archive.count
    groups, rollouts = counted(count["groups"], "group"), counted(count["trajectories"], "rollout")
    print(f"archived {groups}, {rollouts} in {counted(count['files'], 'file')}")
    return 0
