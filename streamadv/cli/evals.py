"""`streamadv evals`: what evaluation groups have shown, by data source and round or policy version."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..status.evaluations import Evaluation, read_evaluations
from . import add_one_shot_options, joined
from .files import in_columns

COLUMNS = (
    "data source", "round", "version", "mean", "std error", "best", "min", "max", "rollouts", "groups", "failed",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "evals",
        help="shows what evaluation groups have shown, by data source and round or version",
        description="Shows the rewards of groups that were begun with role='eval' and have ended, by the round that "
        "they name or else by version; a round shows the versions that it was played with. 'std error' is that "
        "of the mean, between groups; 'best' is the mean over groups of the best reward in each.",
    )
    add_one_shot_options(parser, "one JSON object with a list")
    parser.set_defaults(run=show_evaluations)


def show_evaluations(arguments: argparse.Namespace) -> None:
    """Print all that are stored of the run."""
    with joined(arguments, reading=True) as run:
        evaluations = read_evaluations(run)
    if arguments.json:
        print(json.dumps({"run": run.name, "evaluations": list(map(asdict, evaluations))}))
    elif not evaluations:
        print(f"run {run.name}: no group of role eval has ended yet")
    else:
        print(in_columns([COLUMNS, *map(_cells, evaluations)], numbers=True))


def _cells(evaluation: Evaluation) -> tuple[str, ...]:
    numbers = (evaluation.mean, evaluation.std_error, evaluation.best, evaluation.min, evaluation.max)
    return (
        evaluation.data_source or "-",
        evaluation.round or "-",
        evaluation.versions or "-",
        *("-" if number is None else f"{number:.4g}" for number in numbers),
        str(evaluation.trajectories),
        str(evaluation.groups),
        str(evaluation.failed),
    )
