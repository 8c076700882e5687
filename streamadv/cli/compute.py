"""`streamadv compute`: rewards to advantages over an interchange file, with the pipeline's own chain."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import doors
from ..errors import SettingError, TrajectoryError
from ..extras import TO_COMPUTE
from ..messages import counted
from ..trajectory.interchange import write_trajectory
from ..trajectory.schema import Role, Trajectory
from . import add_import_option
from .files import Advance, add_format_option, number_in, progress, trajectories_of

if TYPE_CHECKING:
    from ..algorithms import ChainResult, PackedBatch


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compute",
        help="advantages for a file of trajectories, without Redis",
        description="Writes the trajectories of a file with advantages and returns, computed by the chain that the "
        "pipeline uses. Those that are unusable, have no reward or are for evaluation are written as they are.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="trajectories, one JSON object a line")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    add_format_option(parser)
    add_chain_options(parser)
    parser.set_defaults(
        run=lambda given: run(given.file, given.output, given.preset, given.config, given.format),
        packages=TO_COMPUTE,
    )


def add_chain_options(parser: argparse.ArgumentParser) -> None:
    """Options that choose the advantage chain; read them with `chain_from`."""
    add_import_option(parser)
    chain = parser.add_mutually_exclusive_group()
    chain.add_argument("--preset", default="grpo", help="chain by name (default: grpo)")
    chain.add_argument("--config", type=Path, help="chain from a JSON file")


def chain_from(preset: str, config: Path | None) -> str | dict[str, Any]:
    """What `build_chain` takes: the preset's name, or the configuration in the file."""
    return preset if config is None else read_chain(config, "--config")


def run(
    file: Path, output: Path, preset: str = "grpo", config: Path | None = None, form: str | None = None
) -> int:
    """Write the lines of `file` to `output`, those that count for training with `advantages` and `returns`.

    Trajectories that are unusable (aborted, failed), unscorable (reward null) or for evaluation pass unchanged. Returns
    the exit status 0. Raises TrajectoryError naming the file and where in it, SettingError for a wrong chain or an
    output that cannot be written; then there is no output.
    """
    # torch: only commands that compute load it.
    from ..algorithms import build_chain, pack_trajectories, run_chain

    if output.resolve() == file.resolve():
        raise SettingError(f"--output {output} is the input: choose another file")
    if not output.absolute().parent.is_dir():
        raise SettingError(f"--output {output}: there is no folder {output.absolute().parent}")
    chain = build_chain(chain_from(preset, config))
    with progress("read", number_in(file, form)) as advance:
        numbered = dict(enumerate(_read(file, form, advance), 1))
    usable = {
        number: each
        for number, each in sorted(
            numbered.items(), key=lambda item: (item[1].group_id, item[1].rollout_index)
        )
        if each.status.usable and each.reward is not None and each.role is not Role.EVAL
    }
    if not usable:
        raise TrajectoryError(f"{file}: holds no trajectory with a reward")
    names = ["response_mask", *chain.needs]
    for number, each in usable.items():
        missing = [name for name in names if name not in each.rows[0].columns]
        if missing:
            raise TrajectoryError(
                f"{file}: trajectory {number}: column {missing[0]} is missing, the chain needs it: write it, or choose "
                "another preset"
            )
    batch = pack_trajectories(list(usable.values()), names)
    finished = _finished(usable.values(), batch, run_chain(chain, batch))
    numbered |= zip(usable, finished, strict=True)
    with progress("written", len(numbered)) as advance:
        _write(output, numbered.values(), advance)
    groups, all_of_them = (
        counted(batch.num_groups, "group"),
        counted(len(numbered), "trajectory", "trajectories"),
    )
    print(f"computed {len(usable)} of {all_of_them} in {groups}: {output}")
    return 0


def read_chain(path: Path, option: str) -> dict[str, Any]:
    """The configuration of a chain in a JSON file. Raises SettingError, which names the option."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(f"{option} {path}: no such file") from None
    except ValueError as error:
        raise SettingError(f"{option} {path}: is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise SettingError(f"{option} {path}: holds {type(data).__name__}, needs an object of chain settings")
    return data


def _read(path: Path, form: str | None, advance: Advance) -> Iterator[Trajectory]:
    seen: dict[tuple[str, int], int] = {}
    for number, trajectory in enumerate(trajectories_of(path, form), 1):
        advance(1)
        where = f"{path}: trajectory {number}"  # not its line: blank ones are skipped
        if trajectory.status.usable and not trajectory.scored:
            raise TrajectoryError(f"{where}: reward is missing: add it, or null for an unscorable one")
        first = seen.setdefault((trajectory.group_id, trajectory.rollout_index), number)
        if first != number:
            raise TrajectoryError(f"{where}: repeats group_id and rollout_index of trajectory {first}")
        yield trajectory


def _write(output: Path, trajectories: Iterable[Trajectory], advance: Advance) -> None:
    """Write `output` whole or not at all."""
    try:
        with doors.whole_file(output) as unfinished, unfinished.open("wb") as target:
            for trajectory in trajectories:
                write_trajectory(target, trajectory)
                advance(1)
    except OSError as error:
        raise SettingError(f"--output {output}: cannot be written: {error.strerror}") from None


def _finished(
    trajectories: Iterable[Trajectory], batch: PackedBatch, result: ChainResult
) -> Iterator[Trajectory]:
    """The trajectories with the chain's outputs in their rows."""
    from ..algorithms import expand

    assert result.advantages is not None  # the chain is not cut
    batch = batch.with_columns(**result.columns)  # a step may have narrowed response_mask
    columns = {**result.columns, "advantages": expand(batch, result.level, result.advantages)}
    returns = result.advantages if result.returns is None else result.returns
    columns["returns"] = expand(batch, result.level, returns)
    bounds = iter(zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist(), strict=False))
    for trajectory in trajectories:
        rows = []
        for row in trajectory.rows:
            start, end = next(bounds)
            update = {name: column[start:end].numpy() for name, column in columns.items()}
            rows.append(row.model_copy(update=update))
        yield trajectory.model_copy(update={"rows": rows})
