"""`streamadv bench`: the benchmarks of a checkout, which are no part of the package."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError

CHECKOUT: Final = Path(__file__).parents[2]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measures speed, as ratios in one run (in a checkout)",
        description="Measures speed as ratios to the ways of others and to what the machine can do at best, all in "
        "one run. The benchmarks are in benchmarks/ of the source.",
    )
    if (CHECKOUT / "benchmarks" / "peers").is_dir():
        if str(CHECKOUT) not in sys.path:
            sys.path.insert(0, str(CHECKOUT))
        importlib.import_module("benchmarks.commands").add_parsers(parser)
        return
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=say_where)


def say_where(arguments: argparse.Namespace) -> None:
    """Raises SettingError."""
    raise SettingError(
        "streamadv bench is in benchmarks/ of the source, not in the package: run it in a checkout"
    )
