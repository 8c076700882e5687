"""`streamadv bench pipeline` and the others that measure a server and the processes around it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError
from . import add_log_options, settings_from

AOF: Final = ("no", "everysec", "always")


def add_parsers(kinds: Any) -> None:
    """Add the benchmarks to `streamadv bench`."""
    pipeline = _add(
        kinds,
        "pipeline",
        run_pipeline,
        "trajectories per second through all stages as processes, beside the ceiling",
        "Trajectories per second through producer, grouper, advantage worker and trainer as processes, in turns "
        "with the same columns moved as often by plain redis-py. One line a chain and size.",
    )
    _add_windows(pipeline)
    pipeline.add_argument(
        "--tokens", type=int, nargs="+", metavar="T", help="per trajectory (default: 512 4096 32768)"
    )
    pipeline.add_argument(
        "--chain", nargs="+", metavar="NAME", help="grpo, grpo+kl or gae+kl (default: all three)"
    )


def run_pipeline(arguments: argparse.Namespace) -> int:
    """Print the table line by line; exit status 0."""
    from ..bench.lines import KINDS, TOKENS
    from ..bench.pipeline import COLUMNS, measure_pipeline

    tokens = arguments.tokens or TOKENS
    chains = arguments.chain or list(KINDS)
    _check("--tokens", min(tokens), 8)
    if unknown := set(chains) - set(KINDS):
        raise SettingError(f"--chain is {min(unknown)}, needs one of {', '.join(KINDS)}")
    return _run(
        arguments,
        COLUMNS,
        lambda url: measure_pipeline(
            url, chains, tokens, arguments.seconds, arguments.repeat, lambda text: print(text, flush=True)
        ),
    )


def _add(
    kinds: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=description)
    parser.add_argument(
        "--redis",
        dest="redis_url",
        metavar="URL",
        help="server to measure (STREAMADV_REDIS_URL; default: an embedded one)",
    )
    parser.add_argument("--aof", choices=AOF, help="append-only file of the embedded server (default: no)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    add_log_options(parser)
    parser.set_defaults(run=run)
    return parser


def _add_windows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of a window (default: 2)")
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="windows; figures are medians (default: 3)"
    )


def _run(
    arguments: argparse.Namespace,
    columns: Mapping[str, str],
    measure: Callable[[str], Iterator[dict[str, Any]]],
) -> int:
    """Print a line for each record that `measure(url)` yields; write them all."""
    from ..bench.machine import describe_server, measured_server
    from ..bench.report import heading, row, write_json

    for name in ("seconds", "repeat"):
        if hasattr(arguments, name):
            _check(f"--{name}", getattr(arguments, name), 1)
    settings = settings_from(arguments)
    if settings.redis_url is not None and arguments.aof is not None:
        raise SettingError(
            f"--aof {arguments.aof} is for the embedded server: leave it out with a server's URL"
        )
    with measured_server(settings.redis_url, arguments.aof or "no", settings.server_binary) as url:
        machine = describe_server(url)
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print(heading(columns), flush=True)
        records = []
        for record in measure(url):
            print(row(columns, record), flush=True)
            records.append(record)
    write_json(arguments.json, machine, records)
    return 0


def _check(name: str, value: float, least: int) -> None:
    if value < least:
        raise SettingError(f"{name} is {value:g}, needs {least} at least")
