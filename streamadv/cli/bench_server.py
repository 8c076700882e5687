"""`streamadv bench pipeline` and the others that measure a server and the processes around it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
        "processor time and trajectories per second through all stages as processes, beside the ceiling",
        "What a trajectory costs in producer, grouper, advantage worker, trainer and server, and how many pass in a "
        "second, in turns with the same columns moved as often by plain redis-py. One line a chain, size and way of "
        "pushing; with --chain, --tokens or --way all their combinations, without: the usual ones.",
    )
    add_windows(pipeline, 1.5)
    _add_sizes(pipeline, "512 4096 32768")
    _add_chains(pipeline)
    pipeline.add_argument(
        "--way",
        nargs="+",
        metavar="WAY",
        help="push (groups begun and pushed one after another), ahead (with the next group's admission), many "
        "(four groups a call) or asyncio (one trajectory a push, 256 under way); default: push",
    )
    stages = _add(
        kinds,
        "stages",
        run_stages,
        "each stage alone: rate, and processor time per trajectory",
        "Producer, grouper, naming, advantage worker and trainer one after the other, each with nothing else at work.",
    )
    _add_repeat(stages, "rounds")
    _add_sizes(stages, "512 4096 32768")
    _add_chains(stages)
    backlog = _add(
        kinds,
        "backlog",
        run_backlog,
        "cost per trajectory with many open groups and many queued trajectories",
        "Cost per trajectory through all stages with 10^3 to 10^6 groups open, and of a push behind 10^6 queued "
        "trajectories. Needs some 2 GB of memory.",
    )
    _add_repeat(backlog, "rounds")
    backlog.add_argument(
        "--open", type=int, nargs="+", metavar="N", help="groups (default: 1000 10000 100000 1000000)"
    )
    backlog.add_argument("--queued", type=int, metavar="N", help="trajectories (default: 1000000)")
    latency = _add(
        kinds,
        "latency",
        run_latency,
        "rollout end to trainer at 10, 50 and 90 %% of the highest rate",
        "Time from the end of a group's rollouts to the trainer, which takes what is there, at shares of the highest "
        "rate.",
    )
    add_windows(latency, 1.5)
    _add_sizes(latency, "4096")
    memory = _add(
        kinds,
        "memory",
        run_memory,
        "server bytes per payload byte, and what is left after commit",
        "Server memory with trajectories pushed and not yet taken, per byte of their columns; and what is left, per "
        "group, when all are committed.",
    )
    _add_sizes(memory, "512 4096 5000 32768")


def run_pipeline(arguments: argparse.Namespace) -> int:
    from ..bench.lines import TOKENS, WAYS
    from ..bench.pipeline import CASES, COLUMNS, measure_pipeline

    cases: Any = CASES
    if arguments.chain or arguments.tokens or arguments.way:
        ways = tuple(arguments.way or ("push",))
        if unknown := set(ways) - set(WAYS):
            raise SettingError(f"--way is {min(unknown)}, needs one of {', '.join(WAYS)}")
        cases = [(kind, size, ways) for kind in _chains(arguments) for size in _tokens(arguments, TOKENS)]
    seconds, repeat, say = arguments.seconds, arguments.repeat, partial(print, flush=True)
    return _run(arguments, COLUMNS, lambda url: measure_pipeline(url, cases, seconds, repeat, say))


def run_stages(arguments: argparse.Namespace) -> int:
    from ..bench.lines import TOKENS
    from ..bench.stages import COLUMNS, measure_stages

    chains, tokens = _chains(arguments), _tokens(arguments, TOKENS)
    return _run(arguments, COLUMNS, lambda url: measure_stages(url, chains, tokens, arguments.repeat))


def run_backlog(arguments: argparse.Namespace) -> int:
    from ..bench.backlog import COLUMNS, OPEN_GROUPS, QUEUED, measure_backlog

    opened = sorted(arguments.open or OPEN_GROUPS)
    queued = QUEUED if arguments.queued is None else arguments.queued
    check_least("--open", opened[0], 1)
    check_least("--queued", queued, 1000)
    return _run(arguments, COLUMNS, lambda url: measure_backlog(url, opened, queued, arguments.repeat))


def run_latency(arguments: argparse.Namespace) -> int:
    from ..bench.latency import COLUMNS, measure_latency

    tokens = _tokens(arguments, [4096])
    seconds, repeat = arguments.seconds, arguments.repeat
    return _run(arguments, COLUMNS, lambda url: measure_latency(url, tokens, seconds, repeat))


def run_memory(arguments: argparse.Namespace) -> int:
    from ..bench.memory import COLUMNS, SIZES, measure_memory

    tokens = _tokens(arguments, SIZES)
    return _run(arguments, COLUMNS, lambda url: measure_memory(url, tokens))


def _chains(arguments: argparse.Namespace) -> list[str]:
    from ..bench.lines import KINDS

    chains = arguments.chain or list(KINDS)
    if unknown := set(chains) - set(KINDS):
        raise SettingError(f"--chain is {min(unknown)}, needs one of {', '.join(KINDS)}")
    return chains


def _tokens(arguments: argparse.Namespace, default: Sequence[int]) -> Sequence[int]:
    tokens: Sequence[int] = arguments.tokens or default
    check_least("--tokens", min(tokens), 16)
    return tokens


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


def add_windows(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Options of a benchmark that measures within windows of time."""
    parser.add_argument(
        "--seconds", type=float, default=seconds, metavar="S", help=f"of a window (default: {seconds:g})"
    )
    _add_repeat(parser, "windows")


def _add_repeat(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help=f"{what}; figures are medians (default: 3)"
    )


def _add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--tokens", type=int, nargs="+", metavar="T", help=f"per trajectory (default: {default})"
    )


def _add_chains(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chain", nargs="+", metavar="NAME", help="grpo, grpo+kl or gae+kl (default: all three)"
    )


def _run(
    arguments: argparse.Namespace,
    columns: Mapping[str, str],
    measure: Callable[[str], Iterator[dict[str, Any]]],
) -> int:
    """Print a line for each record that `measure(url)` yields; write them all."""
    from ..bench.machine import describe_server, measured_server
    from ..bench.report import print_table, write_json

    check_least("--seconds", getattr(arguments, "seconds", 1), 0.1)
    check_least("--repeat", getattr(arguments, "repeat", 1), 1)
    settings = settings_from(arguments)
    if settings.redis_url is not None and arguments.aof is not None:
        raise SettingError(
            f"--aof {arguments.aof} is for the embedded server: leave it out with a server's URL"
        )
    with measured_server(settings.redis_url, arguments.aof or "no", settings.server_binary) as url:
        machine = describe_server(url)
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        records = print_table(columns, measure(url))
    write_json(arguments.json, machine, records)
    return 0


def check_least(name: str, value: float, least: float) -> None:
    """Raise SettingError for a value of an option that is too small."""
    if value < least:
        raise SettingError(f"{name} is {value:g}, needs {least} at least")
