"""`streamadv config`: effective settings and the order of the advantage chain."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..settings import ShownSetting, shown_settings
from . import add_redis_options, flags_of
from .compute import add_chain_options, chain_from


def add_parser(subparsers: Any) -> None:
    """Add the `config` command to the command line."""
    parser = subparsers.add_parser(
        "config",
        help="prints the effective settings and the advantage chain",
        description="Prints every setting with where it comes from (passwords hidden) and the steps of an advantage "
        "chain in order.",
    )
    add_chain_options(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_redis_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print settings and chain."""
    from ..algorithms.chain import build_chain  # imports torch

    settings = shown_settings(flags_of(arguments))
    chain = build_chain(chain_from(arguments.preset, arguments.config))
    print(_as_json(settings, chain.describe()) if arguments.json else _as_text(settings, chain.describe()))
    return 0


def _as_json(settings: dict[str, ShownSetting], chain: list[str]) -> str:
    return json.dumps(
        {"settings": {name: s._asdict() for name, s in settings.items()}, "chain": chain}, indent=2
    )


def _as_text(settings: dict[str, ShownSetting], chain: list[str]) -> str:
    width = max(map(len, settings))
    lines = [
        f"{name:{width}} = {'not set' if s.value is None else s.value}  ({s.source})"
        for name, s in settings.items()
    ]
    return "\n".join([*lines, "", "advantage chain:", *(f"  {step}" for step in chain)])
