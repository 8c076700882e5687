"""The grouper process: takes pushed trajectories into groups, ends groups, exports the run's ledger."""

from __future__ import annotations

from streamadv import metrics
from streamadv.grouping.grouper import run_grouper
from streamadv.run.manifest import RunSettings
from streamadv.settings import Settings
from streamadv.status import read_status

from .process import join_run, stop_on_signals


def main(settings: Settings, wanted: RunSettings | None = None) -> int:
    """Run until SIGTERM or SIGINT."""
    stop = stop_on_signals()
    run = join_run(settings, wanted, stop)
    metrics.register_ledger(lambda: read_status(run).to_json())
    run_grouper(run, stop)
    return 0
