"""The benchmarks as commands: `streamadv bench NAME`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from streamadv.cli import add_log_options, settings_from
from streamadv.errors import SettingError
from streamadv.extras import TO_COMPUTE
from streamadv.processes.memory import keep_freed_memory

AOF: Final = ("no", "everysec", "always")

#: A device is kept busy by so many tokens only.
LARGE_TOKENS: Final = 64 * 2**20

#: Heading and key of each column of the tables of `algorithms`.
FIGURES: Final = {
    "ms": "milliseconds",
    "padded": "padded_milliseconds",
    "verl": "verl_milliseconds",
    "x verl": "ratio_to_verl",
    "ROLL": "roll_milliseconds",
    "x ROLL": "ratio_to_roll",
    "copy": "copy_milliseconds",
    "/ copy": "ratio_to_copy",
}
LARGE_FIGURES: Final = {"ms": "milliseconds", "share": "bandwidth_share", "waits": "synchronisations"}

#: The same of the plans of `scaling`.
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


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks to `streamadv bench`."""
    parser.set_defaults(packages=TO_COMPUTE)
    kinds = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    _add_algorithms(kinds)
    _add_pipeline(kinds)
    stages = _add_server(
        kinds,
        "stages",
        run_stages,
        "each stage alone: rate, and processor time per trajectory",
        "Producer, grouper, naming, advantage worker and trainer one after the other, each with nothing else at work.",
    )
    _add_repeat(stages, "rounds")
    _add_sizes(stages, "512 4096 32768")
    _add_chains(stages)
    kept = _add_server(
        kinds,
        "kept",
        run_kept,
        "processor time per trajectory in runs that keep groups to be looked at, beside one that keeps none",
        "Processor time per trajectory of all processes and the server, in turns: with keep_bytes=0, at the defaults, "
        "and with every group kept in a budget that is always full.",
    )
    _add_repeat(kept, "rounds")
    _add_sizes(kept, "512 4096")
    _add_chains(kept)
    latency = _add_server(
        kinds,
        "latency",
        run_latency,
        "rollout end to trainer at 10, 50 and 90 %% of the highest rate",
        "Time from the end of a group's rollouts to the trainer, which takes what is there, at shares of the highest "
        "rate.",
    )
    _add_windows(latency, 1.5)
    _add_sizes(latency, "4096")
    memory = _add_server(
        kinds,
        "memory",
        run_memory,
        "server bytes per payload byte, and what is left after commit",
        "Server memory with trajectories pushed and not yet taken, per byte of their columns; and what is left, per "
        "group, when all are committed.",
    )
    _add_sizes(memory, "512 4096 5000 32768")
    scaling = _add(
        kinds,
        "scaling",
        run_scaling,
        "processor time and bytes per trajectory on one to three cluster primaries, and what they predict",
        "Processor time and bytes per trajectory of each process, on Redis Clusters of one to three "
        "primaries of its own, with workers that join and die; a model of it, checked against what was measured; "
        "and the processes it predicts for a million tokens per second and more.",
    )
    _add_windows(scaling, 3.0)
    add_log_options(scaling)


def _add_algorithms(kinds: Any) -> None:
    algorithms = _add(
        kinds,
        "algorithms",
        run_algorithms,
        "estimators beside verl's way, ROLL's way and a copy of the bytes they touch",
        "Advantages of ragged multi-turn sequences in interleaved groups of 8: this project, verl's "
        "way, ROLL's way, and a memory copy of the bytes touched, after checking that all agree.",
    )
    algorithms.add_argument("--sequences", type=int, default=512, metavar="B", help="rows (default: 512)")
    algorithms.add_argument(
        "--tokens", type=int, default=4096, metavar="T", help="tokens of the longest row (default: 4096)"
    )
    algorithms.add_argument("--repeat", type=int, default=7, metavar="N", help="rounds (default: 7)")
    algorithms.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    algorithms.add_argument(
        "--threads", type=int, default=1, metavar="N", help="torch threads (default: 1, as in the workers)"
    )


def _add_pipeline(kinds: Any) -> None:
    pipeline = _add_server(
        kinds,
        "pipeline",
        run_pipeline,
        "processor time and trajectories per second through all stages as processes, beside the ceiling",
        "What a trajectory costs in producer, grouper, advantage worker, trainer and server, and how many pass in a "
        "second, in turns with the same columns moved as often by plain redis-py. One line a chain, size and way of "
        "pushing; with --chain, --tokens or --way all their combinations, without: the usual ones.",
    )
    _add_windows(pipeline, 1.5)
    _add_sizes(pipeline, "512 4096 32768")
    _add_chains(pipeline)
    pipeline.add_argument(
        "--way",
        nargs="+",
        metavar="WAY",
        help="push (groups begun and pushed one after another), ahead (eight groups begun by one call), many "
        "(four groups a call) or asyncio (one trajectory a push, 256 under way), which push plain arrays; agent, "
        "agent-lists or agent-asyncio push what an agent's loop has: four steps, versions of each token, metadata, and "
        "columns as arrays of numpy's default dtypes, as lists, or one trajectory a push; default: push",
    )


def run_algorithms(arguments: argparse.Namespace) -> int:
    """Print the table; exit status 0. Raises DisagreementError if two ways give different numbers."""
    import torch

    from .measure import describe_machine, measure_all, measure_large
    from .report import print_table

    for name in ("repeat", "threads"):
        _check_least(f"--{name}", getattr(arguments, name), 1)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: torch finds no CUDA device here, use --device cpu")
    keep_freed_memory()  # as the advantage worker does; the peers have it too
    before = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        machine = describe_machine(arguments.device)
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print(f"{arguments.sequences} sequences of up to {arguments.tokens} tokens; medians in ms")
        measured = measure_all(arguments.sequences, arguments.tokens, arguments.repeat, arguments.device)
        records = print_table(FIGURES, (measurement.record() for measurement in measured))
        large = []
        if arguments.device == "cuda":
            print(f"{LARGE_TOKENS} tokens: the share is of the copy bandwidth, and the host waits so often")
            measured = measure_large(LARGE_TOKENS, 4096, arguments.repeat, arguments.device)
            large = print_table(LARGE_FIGURES, (measurement.record() for measurement in measured))
    finally:
        torch.set_num_threads(before)
    if arguments.json is not None:
        sizes = {name: getattr(arguments, name) for name in ("sequences", "tokens", "repeat")}
        written = {"machine": machine, **sizes, "algorithms": records, "large": large}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


def run_pipeline(arguments: argparse.Namespace) -> int:
    from .lines import TOKENS, WAYS
    from .pipeline import CASES, COLUMNS, measure_pipeline

    cases: Any = CASES
    if arguments.chain or arguments.tokens or arguments.way:
        ways = tuple(arguments.way or ("push",))
        if unknown := set(ways) - set(WAYS):
            raise SettingError(f"--way is {min(unknown)}, needs one of {', '.join(WAYS)}")
        cases = [(kind, size, ways) for kind in _chains(arguments) for size in _tokens(arguments, TOKENS)]
    seconds, repeat, say = arguments.seconds, arguments.repeat, partial(print, flush=True)
    return _run(arguments, COLUMNS, lambda url: measure_pipeline(url, cases, seconds, repeat, say))


def run_stages(arguments: argparse.Namespace) -> int:
    from .lines import TOKENS
    from .stages import COLUMNS, measure_stages

    chains, tokens = _chains(arguments), _tokens(arguments, TOKENS)
    return _run(arguments, COLUMNS, lambda url: measure_stages(url, chains, tokens, arguments.repeat))


def run_kept(arguments: argparse.Namespace) -> int:
    from .kept import COLUMNS, measure_kept

    chains, tokens = arguments.chain or ["grpo"], _tokens(arguments, [512, 4096])
    return _run(arguments, COLUMNS, lambda url: measure_kept(url, chains, tokens, arguments.repeat))


def run_latency(arguments: argparse.Namespace) -> int:
    from .latency import COLUMNS, measure_latency

    tokens = _tokens(arguments, [4096])
    seconds, repeat = arguments.seconds, arguments.repeat
    return _run(arguments, COLUMNS, lambda url: measure_latency(url, tokens, seconds, repeat))


def run_memory(arguments: argparse.Namespace) -> int:
    from .memory import COLUMNS, SIZES, measure_memory

    tokens = _tokens(arguments, SIZES)
    return _run(arguments, COLUMNS, lambda url: measure_memory(url, tokens))


def run_scaling(arguments: argparse.Namespace) -> int:
    """Print both tables; exit status 0."""
    from .machine import describe_server, measured_server
    from .report import print_table, write_json
    from .scaling import COLUMNS, KIND, MIDDLE, UTILISATION, measure_scaling

    for name in ("seconds", "repeat"):
        _check_least(f"--{name}", getattr(arguments, name), 1)
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


def _chains(arguments: argparse.Namespace) -> list[str]:
    from .lines import KINDS

    chains = arguments.chain or list(KINDS)
    if unknown := set(chains) - set(KINDS):
        raise SettingError(f"--chain is {min(unknown)}, needs one of {', '.join(KINDS)}")
    return chains


def _tokens(arguments: argparse.Namespace, default: Sequence[int]) -> Sequence[int]:
    tokens: Sequence[int] = arguments.tokens or default
    _check_least("--tokens", min(tokens), 16)
    return tokens


def _add(
    kinds: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.set_defaults(run=run)
    return parser


def _add_server(
    kinds: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, description: str
) -> argparse.ArgumentParser:
    parser = _add(kinds, name, run, text, description)
    parser.add_argument(
        "--redis",
        dest="redis_url",
        metavar="URL",
        help="server to measure (STREAMADV_REDIS_URL; default: an embedded one)",
    )
    parser.add_argument("--aof", choices=AOF, help="append-only file of the embedded server (default: no)")
    add_log_options(parser)
    return parser


def _add_windows(parser: argparse.ArgumentParser, seconds: float) -> None:
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
    from .machine import describe_server, measured_server
    from .report import print_table, write_json

    _check_least("--seconds", getattr(arguments, "seconds", 1), 0.1)
    _check_least("--repeat", getattr(arguments, "repeat", 1), 1)
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


def _check_least(name: str, value: float, least: float) -> None:
    """Raise SettingError for a value of an option that is too small."""
    if value < least:
        raise SettingError(f"{name} is {value:g}, needs {least} at least")
