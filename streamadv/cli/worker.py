"""`streamadv worker grouper`, `worker advantage` and `worker scorer`: one worker process."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from ..extras import TO_COMPUTE
from ..plugins import function_of
from ..trajectory.columns import KNOWN_COLUMNS
from ..trajectory.fields import check_names
from . import add_import_option, add_process_options, settings_from
from .parser import names

STAGES = {
    "grouper": "takes pushed trajectories into groups and ends groups",
    "advantage": "computes rewards, returns and advantages of named batches",
    "scorer": "brings rewards by a function of yours",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("worker", help="runs one worker process")
    stages = parser.add_subparsers(title="stages", metavar="STAGE", required=True)
    for stage, text in STAGES.items():
        worker = stages.add_parser(
            stage, help=text, description=f"One process that {text}. Start any number."
        )
        add_process_options(worker)
        if stage == "advantage":
            worker.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to compute")
            add_import_option(worker)
            worker.set_defaults(packages=TO_COMPUTE)
        if stage == "scorer":
            add_scorer_options(worker)
        worker.set_defaults(run=run, stage=stage)


def add_scorer_options(parser: argparse.ArgumentParser) -> None:
    """The function, and how it is called; an option that is not given is left to the `Scorer`."""
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="called with a list of trajectories (streamadv.UnscoredTrajectory), returns a score for each; the "
        "module may be in the current directory",
    )
    parser.add_argument(
        "--name", help="which of the run's scorers it is (default: its own name, or the only one)"
    )
    parser.add_argument("--columns", type=_columns, metavar="A,B", help="that it reads (default: all)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="trajectories of one call (default 32)")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="of one call (default 120)")
    parser.add_argument(
        "--tries", type=int, metavar="N", help="at a trajectory alone before it is unscorable (default 3)"
    )
    parser.add_argument(
        "--whole-groups",
        action="store_true",
        default=None,
        help="each call gets one group, when all its rollouts have ended",
    )
    parser.add_argument(
        "--lease-s", type=float, metavar="S", help="until others take over from a dead process (default 15)"
    )


def _columns(text: str) -> list[str]:
    """Type of an option: names of columns."""
    columns = names(text)
    try:
        check_names([name for name in columns if name not in KNOWN_COLUMNS])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return columns


def run(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"workers.{arguments.stage}")
    options: dict[str, Any] = {}
    if arguments.stage == "scorer":
        own = ("name", "columns", "batch_size", "timeout_s", "tries", "whole_groups", "lease_s")
        options = {name: value for name in own if (value := getattr(arguments, name)) is not None}
        options["function"] = function_of(arguments.function)
    return int(module.main(settings_from(arguments), **options))
