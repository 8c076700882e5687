"""The grouper process: takes pushed trajectories into groups, ends groups, exports the facts of the run."""

from __future__ import annotations

from streamadv import metrics
from streamadv.grouping.grouper import run_grouper
from streamadv.run.consumer import GROUPER
from streamadv.settings import Settings
from streamadv.status import export_run

from .process import join_run, say_ready, stop_on_signals


def main(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT."""
    stop = stop_on_signals()
    metrics.begin_stage(GROUPER, "grouper")
    export_run(settings.url, settings.run)
    run = join_run(settings, stop, GROUPER)
    say_ready(run)
    run_grouper(run, stop)
    return 0
