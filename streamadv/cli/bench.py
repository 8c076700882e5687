"""`streamadv bench`: how fast it is, beside what others do and what the machine can do at best."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError
from ..extras import TO_COMPUTE
from ..processes.malloc import keep_freed_memory
from . import bench_scaling, bench_server

#: A device is kept busy by so many tokens only.
LARGE_TOKENS: Final = 64 * 2**20

#: Heading and key of each column of the table.
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


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measures speed, as ratios in one run",
        description="Measures speed as ratios to the ways of others and to what the machine can do at best, all in "
        "one run.",
    )
    parser.set_defaults(packages=TO_COMPUTE)
    kinds = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    algorithms = kinds.add_parser(
        "algorithms",
        help="estimators beside verl's way, ROLL's way and a copy of the bytes they touch",
        description="Advantages of ragged multi-turn sequences in interleaved groups of 8: this project, verl's "
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
    algorithms.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    algorithms.set_defaults(run=run_algorithms)
    bench_server.add_parsers(kinds)
    bench_scaling.add_parser(kinds)


def run_algorithms(arguments: argparse.Namespace) -> int:
    """Print the table; exit status 0. Raises DisagreementError if two ways give different numbers."""
    import torch

    from ..bench.cases import ABSENT
    from ..bench.measure import describe_machine, measure_all, measure_large
    from ..bench.others import NO_PEERS
    from ..bench.report import print_table

    for name in ("repeat", "threads"):
        bench_server.check_least(f"--{name}", getattr(arguments, name), 1)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: torch finds no CUDA device here, use --device cpu")
    keep_freed_memory()  # as the advantage worker does; the peers have it too
    before = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        machine = describe_machine(arguments.device)
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print(f"{arguments.sequences} sequences of up to {arguments.tokens} tokens; medians in ms")
        if ABSENT:
            print(NO_PEERS)
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
