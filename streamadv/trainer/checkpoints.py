"""Checkpoints: a folder for each version, with the queue's state in a file beside what the training loop saves there.

`folder/<version>` is whole, or it is not there. A folder that is incomplete or no longer needed has a hidden name.
The next checkpoint removes such folders, whatever killed the process before.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from .. import doors
from ..batch.progress import Progress, check_state
from ..errors import CheckpointError, SettingError
from ..messages import brief, log_fields, one_line
from .together import Together

logger = logging.getLogger(__name__)

STATE_FILE: Final = "streamadv.json"

#: Where a job begins without a checkpoint: in a run that was never trained, or never committed.
NEW: Final = "new"
BEGINNING: Final = "beginning"

_VERSION: Final = re.compile(r"0|[1-9][0-9]{0,14}")
_LEFT: Final = re.compile(r"\.([0-9]+)\.(unfinished|replaced|removed)(\.[0-9a-f]+)?")


def folder_of(folder: object) -> Path:
    """The argument `folder`. Raises SettingError for what is no path."""
    if not isinstance(folder, str | os.PathLike):
        raise SettingError(f"folder is {brief(folder)}, needs a path")
    return Path(folder)


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Write a queue's state, whole or not at all, into the folder of a checkpoint, which is made if need be."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    with doors.whole_file(checkpoint / STATE_FILE) as unfinished:
        unfinished.write_text(json.dumps(state))


def read_state(checkpoint: Path, remedy: str = "in a folder that all ranks see") -> dict[str, Any]:
    """The queue's state in a checkpoint. Raises SettingError, which ends with the `remedy`, if there is none."""
    try:
        state: Any = json.loads((checkpoint / STATE_FILE).read_text())
        if not isinstance(state, dict):
            raise ValueError("it holds no state")
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(
            f"checkpoint {checkpoint}: its {STATE_FILE} cannot be read ({one_line(str(error))}): resume from one that "
            f"this trainer has saved, {remedy}"
        ) from None
    return state


def newest(folder: Path) -> int | None:
    """The newest version of which a whole checkpoint is there. Rank 0 calls it, alone."""
    with _told(folder):
        for path, version, kind in _left(folder):
            # What was to be replaced, by a checkpoint that never came, is the one of its version.
            if kind == "replaced" and not (folder / str(version)).exists():
                path.rename(folder / str(version))
        return max(_versions(folder), default=None)


def find_start(folder: Path, run: str, version: int, committed: int) -> str:
    """On rank 0: from which version the job goes on, else NEW or BEGINNING. Raises SettingError where it cannot.

    version, committed: of the run. A run that was committed has its checkpoint somewhere.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder: give the folder of the run's checkpoints, it is made if need be"
        )
    found = newest(folder)
    if found is None and committed:
        raise SettingError(
            f"run {run} was trained to version {committed} before, and {folder} has no checkpoint: give the folder of "
            f"its checkpoints, another run=, or `streamadv runs delete --run {run}`"
        )
    return str(found) if found is not None else BEGINNING if version else NEW


def read_start(folder: Path, run: str, start: str) -> tuple[Path | None, dict[str, Any] | None]:
    """Path and state of the checkpoint that `find_start` has named, None where there is none. Raises SettingError."""
    if start in (NEW, BEGINNING):
        return None, None if start == NEW else Progress.beginning(run)
    state = read_state(folder / start)
    check_state(state, run)
    return folder / start, state


@contextmanager
def saving(
    folder: Path,
    keep: int,
    state: Mapping[str, Any],
    together: Together,
    look: Callable[[], object],
    commit: Callable[[Mapping[str, Any]], None],
) -> Iterator[Path]:
    """What `TrainerQueue.checkpoint` does on one rank.

    look: raises where this rank may not go on, as another trainer has the run, or another batch is trained elsewhere.
    """
    version, leads = state["version"], together.leads
    unfinished = _hidden(folder, version, "unfinished")  # rank 0's is the one of all
    together.begin()
    try:
        with together.step() as step:
            step.says = str(version)
            if leads:
                step.says += f" {unfinished.name}"
                look()
                with _told(folder):
                    _begin(folder, state["run"], version)
                    unfinished.mkdir()
        versions = [said.partition(" ")[0] for said in step.heard]
        if len(set(versions)) > 1:
            raise SettingError(
                f"ranks are at versions {', '.join(versions)}: call checkpoint on each after the same batch"
            )
        unfinished = folder / step.heard[0].partition(" ")[2]
        with together.step():
            if not leads:  # after rank 0, so that it need not wait for it
                look()
            yield unfinished
            with _told(folder):
                _sync_all(unfinished)
        with together.step(alone=True):
            if leads:
                look()  # all ranks have written, maybe for long
                with _told(folder):
                    _finish(unfinished, folder, version, state)
                commit(state)
                _remove_old(folder, version, keep)
    except BaseException:
        if leads:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _versions(folder: Path) -> list[int]:
    """Of the whole checkpoints, in no order. Only a name that is a number belongs to one."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [
        int(name) for name in names if _VERSION.fullmatch(name) and (folder / name / STATE_FILE).is_file()
    ]


def _hidden(folder: Path, version: int, why: str) -> Path:
    """A name that nobody else has: a trainer that was replaced may still be writing."""
    return folder / f".{version}.{why}.{doors.random_bytes(4).hex()}"


def _left(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """What killed processes have left: its path, version and kind."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if match := _LEFT.fullmatch(path.name):
            yield path, int(match[1]), match[2]


def _begin(folder: Path, run: str, version: int) -> None:
    """Have a folder that the checkpoint may go into; what killed processes have left there is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    last = newest(folder)
    if last is not None and (other := read_state(folder / str(last)).get("run")) != run:
        raise SettingError(
            f"{folder} holds checkpoints of run {other!r}: give run {run!r} a folder of its own"
        )
    if last is not None and last > version:
        raise SettingError(
            f"{folder} holds checkpoint {last}, and this trainer is at version {version}: go on from it by "
            f"queue.resume(folder), or give another folder"
        )
    if (folder / str(version)).exists() and last != version:
        raise SettingError(
            f"{folder / str(version)} is there and is no checkpoint: give another folder, or remove it"
        )
    _remove_left(folder)


def _finish(unfinished: Path, folder: Path, version: int, state: Mapping[str, Any]) -> None:
    """All that the ranks have saved is on the disk: from the rename on it is the checkpoint."""
    whole = folder / str(version)
    # In no new folder: this one may be removed meanwhile.
    with doors.whole_file(unfinished / STATE_FILE) as file:
        file.write_text(json.dumps(state))
    if whole.exists():
        whole.rename(_hidden(folder, version, "replaced"))
    unfinished.rename(whole)
    doors.sync(folder)


def _remove_old(folder: Path, version: int, keep: int) -> None:
    """A checkpoint loses its name first: one that is removed in part is none. Nothing is raised after the commit."""
    older = sorted(old for old in _versions(folder) if old < version)
    try:
        for old in older[: max(0, len(older) + 1 - keep)]:
            (folder / str(old)).rename(_hidden(folder, old, "removed"))
    except OSError as error:
        _warn_of_rest(folder, error)
    _remove_left(folder)


def _remove_left(folder: Path) -> None:
    for path, version, _ in _left(folder):
        try:
            gone = path.rename(_hidden(folder, version, "removed"))  # whole: somebody may still write there
            gone.unlink() if gone.is_symlink() else shutil.rmtree(gone)
        except OSError as error:
            _warn_of_rest(path, error)


def _warn_of_rest(path: Path, error: OSError) -> None:
    fields = log_fields("checkpoint_not_removed", role="trainer")
    logger.warning("%s: an old checkpoint cannot be removed: %s", path, one_line(str(error)), extra=fields)


def _sync_all(folder: Path) -> None:
    """Other ranks may be writing there: what is gone meanwhile was theirs."""
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                doors.sync(Path(path) / name)
        with suppress(FileNotFoundError):
            doors.sync(Path(path))


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: {one_line(str(error))}: see to its disk and rights") from None
