"""`streamadv bench scaling`: costs by process, and what larger rates would need."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from . import add_log_options, settings_from
from .bench_server import add_windows, check_least

#: Heading and key of each column of the plans.
PLANS: Final = {
    "traj/s": "trajectories_per_second",
    "producers": "producer",
    "shards": "shards",
    "groupers": "grouper",
    "advantage": "advantage",
    "ranks": "trainer",
    "runs": "runs",
    "Gbit/s in": "gigabits_in",
    "Gbit/s out": "gigabits_out",
}


def add_parser(kinds: Any) -> None:
    """Add `scaling` to `streamadv bench`."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "scaling",
        help="processor time and bytes per trajectory on one to three cluster primaries, and what they predict",
        description="Processor time and bytes per trajectory of each process, on Redis Clusters of one to three "
        "primaries of its own, with workers that join and die; a model of it, checked against what was measured; "
        "and the processes it predicts for a million tokens per second and more.",
    )
    add_windows(parser, 3.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    add_log_options(parser)
    parser.set_defaults(run=run_scaling)


def run_scaling(arguments: argparse.Namespace) -> int:
    """Print both tables; exit status 0."""
    from ..bench.machine import describe_server, measured_server
    from ..bench.report import print_table, write_json
    from ..bench.scaling import COLUMNS, KIND, MIDDLE, UTILISATION, measure_scaling

    for name in ("seconds", "repeat"):
        check_least(f"--{name}", getattr(arguments, name), 1)
    binary = settings_from(arguments).server_binary
    with measured_server(None, "no", binary) as url:
        machine = describe_server(url)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"chain {KIND}; processor time in microseconds per trajectory")
    *records, model = measure_scaling(arguments.seconds, arguments.repeat, binary)
    print_table(COLUMNS, records)
    print(f"\nfor trajectories of {MIDDLE} tokens, each process using {UTILISATION:.0%} of a core")
    print_table(
        PLANS, ({**plan, "name": f"{plan['tokens_per_second']:.0e} tokens/s"} for plan in model["plans"])
    )
    write_json(arguments.json, machine, [*records, model])
    return 0
