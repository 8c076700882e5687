"""`streamadv evals`: what evaluation groups have shown, by data source and round or policy version."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..status.evaluations import read_evaluations
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
    with joined(arguments, reading=True) as run:
        evaluations = read_evaluations(run)
    if arguments.json:
        print(json.dumps({"run": run.name, "evaluations": list(map(asdict, evaluations))}))
    elif not evaluations:
        print(f"run {run.name}: no group of role eval has ended yet")
    else:
        rows: list[tuple[str, ...]] = [COLUMNS]
        for each in evaluations:
            names = (each.data_source or "-", each.round or "-", each.versions or "-")
            figures = (each.mean, each.std_error, each.best, each.min, each.max)
            shown = ("-" if figure is None else f"{figure:.4g}" for figure in figures)
            rows.append((*names, *shown, *map(str, (each.trajectories, each.groups, each.failed))))
        print(in_columns(rows, numbers=True))
