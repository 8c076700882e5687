"""`streamadv exporter`: serves what `streamadv status` shows of a run to Prometheus."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from . import add_process_options, settings_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "exporter",
        help="serves the facts of a run as metrics",
        description="Serves what the command status shows of a run at /metrics, read from the server once per scrape, "
        "as each grouper does too. It writes nothing, and goes on while nothing else of the run is there.",
    )
    add_process_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return int(importlib.import_module("workers.exporter").main(settings_from(arguments)))
