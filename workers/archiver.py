"""The archiver process: writes what a run has kept into files of a folder."""

from __future__ import annotations

from pathlib import Path

from streamadv import metrics
from streamadv.archive.folder import create_folder
from streamadv.archive.follow import STAGE, Archive, created_at
from streamadv.archive.table import PARQUET
from streamadv.settings import Settings

from .process import join_run, say_ready, stop_on_signals


def main(settings: Settings, path: Path) -> int:
    """Run until SIGTERM or SIGINT."""
    stop = stop_on_signals()
    metrics.begin_stage(STAGE, "archive")
    run = join_run(settings, stop, STAGE)
    with Archive(run, create_folder(path, run.keys, created_at(run)), PARQUET) as archive:
        say_ready(run)
        archive.follow(stop)
    return 0
