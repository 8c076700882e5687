"""`streamadv schema`: the JSON schema of a trajectory."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..trajectory.schema import trajectory_json_schema


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "schema",
        help="prints the JSON schema of a trajectory",
        description="Prints the JSON schema of a trajectory, one of which is a line of the interchange file.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    print(json.dumps(trajectory_json_schema(), indent=2))
