"""`streamadv rewind`: computes a batch that was trained on again, as it was or with another chain."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..archive.folder import open_folder
from ..extras import TO_COMPUTE, require
from ..messages import printable
from . import FAILED, add_import_option, add_one_shot_options, joined
from .compute import read_chain
from .files import in_columns

if TYPE_CHECKING:
    from ..archive.folder import Source

COLUMNS = ("data source", "groups", "that learn", "tokens", "effective", "opposite sign")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "rewind",
        help="computes a batch that was trained on again",
        description="Computes batch K again from its groups that are kept, by the chain in its record, and says "
        "bit-identical, or where the first difference is (exit status 1). With --chain it prints what another chain "
        "would have changed: groups with a token that moves the policy, tokens that are trained on, the effective "
        "sample size in tokens by their weights, and tokens whose advantage has the opposite sign.",
    )
    parser.add_argument("--batch", type=int, required=True, metavar="K", help="number of the batch")
    parser.add_argument("--chain", metavar="CHAIN", help="another chain: a JSON file, or a preset's name")
    parser.add_argument(
        "--archive",
        type=Path,
        metavar="FOLDER",
        help="read the groups from the files of the command archive, without a server",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)"
    )
    add_import_option(parser)
    add_one_shot_options(parser)
    parser.set_defaults(packages=TO_COMPUTE, run=rewind)


def rewind(arguments: argparse.Namespace) -> int:
    from ..algorithms.device import choose_device  # imports torch
    from ..archive import compare
    from ..archive.rewind import find_batch, first_difference
    from ..archive.rewind import rewind as computed

    device = choose_device(arguments.device)
    with _source(arguments) as source:
        batch = find_batch(source, arguments.batch)
        print("\n".join(map(printable, batch.about())), flush=True)
        if arguments.chain is None:
            again = computed(source, batch, device)
            difference = first_difference(batch, again)
            print(printable(f"first difference: {difference}" if difference else "bit-identical"))
            return FAILED if difference else 0
        path = Path(arguments.chain)
        is_file = path.suffix == ".json" or path.is_file()
        record = compare.with_chain(batch, read_chain(path, "--chain") if is_file else arguments.chain)
        changes = compare.compare(source, batch, computed(source, batch, device, record))
    rows = [COLUMNS]
    for source_name, change in changes.items():
        before, after = change.before, change.after
        learn, tokens = f"{before.groups} -> {after.groups}", f"{before.tokens} -> {after.tokens}"
        effective = f"{before.effective:.1f} -> {after.effective:.1f}"
        opposite = f"{change.signs} of {change.compared}"
        rows.append((source_name or "-", str(change.groups), learn, tokens, effective, opposite))
    print(in_columns(rows, numbers=True))
    return 0


@contextmanager
def _source(arguments: argparse.Namespace) -> Iterator[Source]:
    from ..archive.folder import FolderSource, RunSource

    if arguments.archive is not None:
        require("rewind --archive", "pyarrow")
        yield FolderSource(open_folder(arguments.archive))
        return
    with joined(arguments, reading=True) as run:
        yield RunSource(run)
