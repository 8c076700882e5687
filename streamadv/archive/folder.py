"""A folder with the archive of a run: whole files, whose names say which entries of the stream `kept` they have.

A file gets its name once it is on the disk, so that a crash leaves either all of it or nothing. What it has is not
written again: its name begins with the shard and ends with the ids of its first and its last entry.

Kept groups are read from such a folder, or from a run: a `Source`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .. import doors
from ..errors import SettingError
from ..run import Run
from ..run.packets import FetchedPacket, fetch_columns
from ..status.seen import KeptEntry, kept_entries
from ..store.keys import EntryId, RunKeys
from ..store.replies import as_int, as_text
from ..trajectory.columns import KNOWN_COLUMNS, Array
from ..trajectory.packet import StoredPacket

#: What a folder is the archive of: a JSON object with the run's name, salts and creation. Whoever writes locks it.
ABOUT: Final = "_archive.json"  # readers of a folder of Parquet files pass over names that begin so
_NAME: Final = re.compile(r"kept\.([0-9]+)\.([0-9]+-[0-9]+)\.([0-9]+-[0-9]+)\.(\w+)")
_UNFINISHED: Final = ".unfinished"
#: Before every entry.
NO_ENTRY: Final = EntryId(0, 0)


class ArchiveFile(NamedTuple):
    """One whole file."""

    shard: int
    first: EntryId
    last: EntryId
    path: Path


class Folder:
    """The files of one run. Made by `open_folder` and `create_folder`."""

    def __init__(self, path: Path, keys: RunKeys, created_ms: int | None = None) -> None:
        self.path = path
        self.keys = keys
        self.created_ms = created_ms
        """When the run was created; None = not known."""
        self._lock: Any = None

    def files(self) -> list[ArchiveFile]:
        """All whole files, by shard and first entry."""
        found = []
        for path in self.path.iterdir():
            if name := _NAME.fullmatch(path.name):
                first, last = EntryId.of(name[2]), EntryId.of(name[3])
                found.append(ArchiveFile(int(name[1]), first, last, path))
        return sorted(found)

    def unfinished(self, shard: int) -> Path:
        """Where a shard's next file is written."""
        return self.path / f"_kept.{shard}{_UNFINISHED}"

    def finish(self, shard: int, first: EntryId, last: EntryId, suffix: str) -> Path:
        """Give the unfinished file of a shard its name, once it is on the disk."""
        unfinished = self.unfinished(shard)
        doors.sync(unfinished)
        whole = self.path / f"kept.{shard}.{first}.{last}.{suffix}"
        unfinished.rename(whole)
        doors.sync(self.path)
        return whole

    def lock(self) -> None:
        """Write alone, until `close`; what a process that was killed has begun is removed.

        Raises SettingError while another process writes.
        """
        self._lock = (self.path / ABOUT).open("rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(
                f"{self.path}: another process writes this archive: stop it, or give another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """What a process that was killed has begun."""
        for path in self.path.glob(f"*{_UNFINISHED}"):
            path.unlink()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def open_folder(path: Path) -> Folder:
    """The archive in a folder. Raises SettingError if there is none."""
    try:
        about = json.loads((path / ABOUT).read_text())
        keys = RunKeys(str(about["run"]), tuple(map(int, about["salts"])))
        return Folder(path, keys, as_int(about.get("created_ms")))
    except OSError as error:
        raise SettingError(
            f"{path}: no archive is there ({error.strerror}): `streamadv archive --to FOLDER` writes one"
        ) from None
    except (ValueError, TypeError, KeyError):
        raise SettingError(f"{path / ABOUT}: does not say whose archive it is: give another folder") from None


def create_folder(path: Path, keys: RunKeys, created_ms: int | None = None) -> Folder:
    """The folder for the archive of a run, which may be there. Raises SettingError for that of another run.

    created_ms: when the run was created; None = not known.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / ABOUT).exists():
        beginning = path / f"{ABOUT}.{os.getpid()}{_UNFINISHED}"
        about = {"run": keys.run, "salts": list(keys.salts), "created_ms": created_ms}
        beginning.write_text(json.dumps(about))
        doors.sync(beginning)
        with suppress(FileExistsError):
            (path / ABOUT).hardlink_to(beginning)  # unless another process was first
        beginning.unlink()
    folder = open_folder(path)
    if folder.keys != keys:
        raise SettingError(
            f"{path}: has the archive of run {folder.keys.run}, {len(folder.keys.salts)} shards, not of run "
            f"{keys.run}, {len(keys.salts)} shards: give each run a folder"
        )
    return folder


# Where kept groups are read from

#: Characters of a group's list of packets.
MAX_LINES: Final = 1 << 24


class RunSource:
    """The stream `kept` of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.name = f"run {run.name}"
        self.keys = run.manifest.keys

    def entries(self) -> Iterator[KeptEntry]:
        """All of them, the oldest first in each shard."""
        for shard in self._run.shards:
            yield from kept_entries(shard)

    def fetch(self, packets: Sequence[StoredPacket], names: Sequence[str]) -> Iterator[FetchedPacket]:
        """The named columns of packets of these entries, as `fetch_columns` has them."""
        return fetch_columns(self._run, packets, names)


class FolderSource:
    """The archive of a run."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._places: dict[str, tuple[Path, str]] = {}  # of the packets of entries that were read
        self.name = f"archive {folder.path}"
        self.keys = folder.keys

    def entries(self) -> Iterator[KeptEntry]:
        from .table import read_entries  # pyarrow, which reading a run does not need

        for file in self._folder.files():
            for entry in read_entries(file.path):
                for line in as_text(entry.fields.get(b"payloads", b""), MAX_LINES).splitlines():
                    self._places[line.partition(" ")[0]] = file.path, entry.group_id
                yield entry

    def fetch(self, packets: Sequence[StoredPacket], names: Sequence[str]) -> Iterator[FetchedPacket]:
        from .table import Place, read_columns

        wanted = [name for name in KNOWN_COLUMNS if name in names]
        groups: dict[Path, set[str]] = {}
        for path, group_id in map(self._places.__getitem__, (packet.key for packet in packets)):
            groups.setdefault(path, set()).add(group_id)
        rows: dict[Place, list[dict[str, Array]]] = {}
        for path, of_file in groups.items():
            rows |= read_columns(path, of_file, wanted)
        for packet in packets:
            group_id = self._places[packet.key][1]
            indices = packet.members.table["index"].tolist()
            found = [row for index in indices for row in rows.get((group_id, index), [])]
            if len(found) != len(packet.members.rows["tokens"]):
                yield FetchedPacket(packet, {}, problem="its rows are not in the archive")
                continue
            common = set.intersection(*map(set, found))
            yield FetchedPacket(
                packet, {name: np.concatenate([row[name] for row in found]) for name in common}
            )


#: Kept groups, and the payloads that belong to them.
Source = RunSource | FolderSource
