"""The exporter process: the facts of a run as metrics, whatever becomes of its groupers."""

from __future__ import annotations

from streamadv import metrics
from streamadv.settings import Settings
from streamadv.status import export_run
from streamadv.store.connection import Connection

from .process import PROBE_S, stop_on_signals


def main(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT. Reads only; the run may begin later."""
    stop = stop_on_signals()
    metrics.begin_stage("exporter", "exporter")
    export_run(settings.url, settings.run)
    probe = Connection(settings.url, reply_timeout=PROBE_S)
    metrics.serve(settings.metrics_port, settings.run, settings.metrics_host, probe.check)
    stop.wait()
    return 0
