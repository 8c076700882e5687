"""The archiver in a world: its files have a line of JSON for each group, and it may be killed at each of its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import doors
from ..archive.folder import Folder, create_folder
from ..archive.follow import Archive, Archived, Form
from ..run.manifest import RunSettings
from ..store.keys import RunKeys
from .roles import opened

#: Seconds between two steps, in which it may be killed.
STEP_S: Final = 0.5


class Record(NamedTuple):
    """A group that has been archived."""

    group_id: str
    outcome: str
    trajectories: int
    entry: str


def archiver(run: str, settings: RunSettings, path: Path, wrote: Callable[[], object]) -> None:
    """The process that archives the run into a folder. wrote: called after each file."""
    joined = opened(run, settings)
    folder = create_folder(path, joined.keys)
    form = Form("jsonl", _File, lambda file: {json.loads(line)[0] for line in file.read_text().splitlines()})
    with Archive(joined, _SteppedFolder(path, folder.keys, wrote), form) as archive:
        archive.follow(doors.Event())


def read_records(path: Path) -> list[Record]:
    """What the whole files have."""
    if not path.is_dir():
        return []
    files = sorted(path.glob("*.jsonl"))
    return [Record(*json.loads(line)) for file in files for line in file.read_text().splitlines()]


class _SteppedFolder(Folder):
    """Killed processes of a world never let go of a lock, so there is none."""

    def __init__(self, path: Path, keys: RunKeys, wrote: Callable[[], object]) -> None:
        super().__init__(path, keys)
        self._wrote = wrote

    def lock(self) -> None:
        self.remove_unfinished()

    def finish(self, shard: int, first: Any, last: Any, suffix: str) -> Path:
        doors.sleep(STEP_S)
        path = super().finish(shard, first, last, suffix)
        doors.sleep(STEP_S)
        self._wrote()
        return path


class _File:
    def __init__(self, path: Path, kinds: Mapping[str, str]) -> None:
        self._path = path
        path.write_text("")

    def write(self, groups: Sequence[Archived]) -> None:
        doors.sleep(STEP_S)
        with self._path.open("a") as file:
            for archived in groups:
                group = archived.group
                count = group.count - len(group.left_out)
                file.write(f"{json.dumps(Record(group.group_id, group.outcome, count, archived.entry.id))}\n")

    def close(self) -> None:
        doors.sleep(STEP_S)
