"""A folder with the archive of a run: whole files, whose names say which entries of the stream `kept` they have.

A file gets its name once it is on the disk, so that a crash leaves either all of it or nothing. What it has is not
written again: its name begins with the shard and ends with the ids of its first and its last entry.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import doors
from ..errors import SettingError
from ..store.keys import EntryId, RunKeys
from ..store.replies import as_int

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
