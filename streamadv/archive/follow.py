"""Follows the stream `kept` of each shard of a run, and writes what ends into the files of a folder.

The files are the truth: an entry is archived once a whole file has it. In a run with the setting `archive` the mark in
each shard follows the files, the scripts forget nothing behind it (`lua/lib/trim.lua`), and reading begins at it. Else
reading begins where the files end, and what has gone before it was read is missing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

from redis.exceptions import NoPermissionError

from .. import clock, metrics
from ..errors import SettingError, StreamadvError, WireError
from ..run import Run, Shard
from ..run.packets import fetch_columns
from ..status.kept import columns_of_group, trajectories_of, why
from ..status.seen import KeptEntry, SeenGroup
from ..store.keys import RUNS, EntryId
from ..store.replies import as_count, as_int, as_text
from ..store.retry import RETRYABLE, Outage
from ..trajectory.columns import Array
from ..trajectory.packet import column_kind
from ..trajectory.schema import Column, Trajectory
from .folder import NO_ENTRY, Folder

STAGE: Final = "archive"
#: Entries of one read, and payload bytes that are in memory at once.
PAGE: Final = 32
PAGE_BYTES: Final = 16 << 20
#: A file is finished when it has so many bytes of payloads, or so many seconds after its first group.
FILE_BYTES: Final = 256 << 20
FILE_S: Final = 10.0
#: In a run with the setting `archive`, also at this share of what the shard may keep.
FILE_SHARE: Final = 1 / 8
#: Pause after a look that found nothing.
POLL_S: Final = 0.5


class Archived(NamedTuple):
    """A kept group with all that is read of it."""

    entry: KeptEntry
    group: SeenGroup
    trajectories: Sequence[Trajectory]
    problem: str | None
    """Why members have no tokens."""


class File(Protocol):
    """A file that is being written."""

    def write(self, groups: Sequence[Archived]) -> None:
        """Append groups."""

    def close(self) -> None:
        """All of it is written."""


class Form(NamedTuple):
    """How files are written."""

    suffix: str
    create: Callable[[Path, Mapping[str, str]], File]
    """Given the kinds of extra columns."""
    read_ids: Callable[[Path], set[str]]
    """The groups of a file."""


def created_at(run: Run) -> int | None:
    """When the run was created, in ms since 1970; None where that is not known, or this user may not know."""
    with suppress(NoPermissionError):
        created: Any = run.connection.scripts.hget(RUNS, run.name)
        return as_int(created)
    return None


class Archive:
    """Writes the archive of a run into a folder. Use with `with`."""

    def __init__(self, run: Run, folder: Folder, form: Form) -> None:
        self._run = run
        self._folder = folder
        folder.lock()
        self._shards = [ShardArchive(run, shard, folder, form) for shard in run.shards]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave what is unfinished: the next one begins where the files end."""
        self._folder.close()

    @property
    def count(self) -> Counter[str]:
        """The groups, trajectories and files of this process."""
        return sum((shard.count for shard in self._shards), Counter())

    def look(self) -> bool:
        """Write what has ended since the last look. False if there was nothing.

        Raises SettingError once the run is made anew: its groups may have ids that the files have already.
        """
        self._run.refresh()
        created_ms = self._folder.created_ms
        if created_ms is not None and created_at(self._run) not in (None, created_ms):
            raise SettingError(
                f"{self._folder.path}: has the archive of run {self._run.name} as it was before it was deleted or "
                "lost, and made anew: give it another folder"
            )
        return bool([shard for shard in self._shards if shard.look()])

    def finish(self) -> None:
        """Give every file its name, also those that are short."""
        for shard in self._shards:
            shard.finish()

    def follow(self, stop: threading.Event) -> None:
        """Look until `stop` is set. Waits while the server is away."""
        metrics.begin_stage(STAGE, "archive")
        outage = Outage(STAGE, self._run.name, sleep=stop.wait)
        while not stop.is_set():
            found = True
            with outage.attempt():
                found = self.look()
            if not found:
                stop.wait(POLL_S)
        with suppress(*RETRYABLE):  # then the next one begins where this one was
            self.finish()


class ShardArchive:
    """The archive of one shard."""

    def __init__(self, run: Run, shard: Shard, folder: Folder, form: Form) -> None:
        self._run, self._shard, self._folder, self._form = run, shard, folder, form
        self.count = Counter[str]()
        self._file: File | None = None
        self._kinds: dict[str, str] = {}
        self._bytes, self._since = 0, 0.0
        self._first = NO_ENTRY
        self._read_to: EntryId | None = None
        """The last entry that was read; None: where to begin is to be found out."""
        self._last_group = b""
        """The group of that entry; empty = none has been read since it began."""
        self._marked = NO_ENTRY
        """What the mark of the shard says, in a run with the setting `archive`."""
        self._ids: set[str] = set()
        """Groups of the file."""
        self._ids_before: set[str] = set()
        """Groups of the file before it."""
        self._returning: set[str] = set()
        """Groups that the files had beyond the mark: what a server has lost of them may end again at any time."""

    def look(self) -> bool:
        """Read a page and write it. False if there was nothing to do."""
        if self._read_to is None:
            self._read_to = self._begin()
        elif self._run.manifest.archive and not self._is_mark_right(self._mark()):
            return True
        page = self._page(self._read_to)
        if page is None:
            self._begin_again()
            return True
        for part in _parts(page):
            self._write(part)
        archive, keep_bytes = self._run.manifest.archive, self._run.manifest.keep_bytes
        share = int(keep_bytes * FILE_SHARE / len(self._run.keys.salts)) if archive else FILE_BYTES
        if self._file is None:
            is_due = archive and self._read_to != self._marked
        else:
            is_due = self._bytes >= min(FILE_BYTES, share) or clock.now() - self._since >= FILE_S
        if is_due:
            self.finish()
        return bool(page)

    def finish(self) -> None:
        """Give the file its name, and move the mark."""
        self._finish_file()
        to = self._read_to
        if to is not None and self._run.manifest.archive and to != self._marked:
            before = "" if self._marked == NO_ENTRY else str(self._marked)
            mark = _entry_of(self._shard.call("archived", [before, str(to), self._last_group]))
            if self._is_mark_right(mark) and mark != to:  # the server has lost the entry
                self._begin_again()

    def _begin_again(self) -> None:
        """The server has lost entries that were read: their groups end again, at any time, or never."""
        self._finish_file()
        self._read_to, self._last_group = None, b""

    def _finish_file(self) -> None:
        if self._file is not None and self._read_to is not None:
            self._file.close()
            self._file, self._bytes = None, 0
            self._folder.finish(self._shard.index, self._first, self._read_to, self._form.suffix)
            self._ids, self._ids_before = set(), self._ids
            self.count["files"] += 1

    def _begin(self) -> EntryId:
        """Where to read on."""
        files = [file for file in self._folder.files() if file.shard == self._shard.index]
        end = max((file.last for file in files), default=NO_ENTRY)
        begin = self._marked = self._mark() if self._run.manifest.archive else end
        newest: Any = self._shard.connection.scripts.xrevrange(self._shard.keys.kept, count=1)
        if newest and EntryId.of(newest[0][0].decode()) < begin:
            begin = NO_ENTRY  # lost by a server whose clock was set back: those to come have places before it
        later = [file for file in files if file.last > begin]
        self._returning.update(*(self._form.read_ids(file.path) for file in later))
        self._ids_before = set().union(*(self._form.read_ids(file.path) for file in files[-1:]))
        return begin

    def _mark(self) -> EntryId:
        return _entry_of(self._shard.connection.scripts.hget(self._shard.keys.trainer, "archived"))

    def _is_mark_right(self, mark: EntryId) -> bool:
        """Whether the mark is where this archive has moved it. Else it begins again at the mark.

        Raises StreamadvError if another archive has moved it on.
        """
        if mark == self._read_to and self._file is None:
            self._marked = mark
        elif mark > self._marked:
            raise StreamadvError(
                f"run {self._run.name}: another `streamadv archive` has taken its groups up to {mark}, this one those "
                f"up to {self._marked}: a run has one, stop the other"
            )
        if mark != self._marked:  # the server has lost it
            self._begin_again()
        return self._read_to is not None

    def _page(self, after: EntryId) -> list[KeptEntry] | None:
        """The entries that follow. None if the server no longer has the one that was read last."""
        key, has_read = self._shard.keys.kept, bool(self._last_group)
        first, count = (str(after), PAGE + 1) if has_read else (f"({after}", PAGE)
        found: Any = self._shard.connection.scripts.xrange(key, first, "+", count)
        entries = [KeptEntry(self._shard.index, entry.decode(), fields) for entry, fields in found]
        if has_read and [(each.id, _id_of(each)) for each in entries[:1]] != [(str(after), self._last_group)]:
            return None
        return entries[has_read:]

    def _write(self, entries: Sequence[KeptEntry]) -> None:
        """Append what the files do not have: a group ends once, also if a server has lost that and it ends again."""
        known = (self._ids, self._ids_before, self._returning)
        fresh = [entry for entry in entries if not any(entry.group_id in ids for ids in known)]
        groups = [self._read(entry) for entry in fresh]
        if groups:
            kinds = _readable(self._run.manifest.columns)
            if kinds != self._kinds:
                self._finish_file()
            if self._file is None:
                path = self._folder.unfinished(self._shard.index)
                self._file, self._kinds = self._form.create(path, kinds), kinds
                self._first, self._since = EntryId.of(fresh[0].id), clock.now()
            self._file.write(groups)
            self._ids.update(entry.group_id for entry in fresh)
        self._read_to, self._last_group = EntryId.of(entries[-1].id), _id_of(entries[-1])
        self._bytes += sum(map(_size, fresh))
        self.count.update(groups=len(groups), trajectories=sum(len(group.trajectories) for group in groups))

    def _read(self, entry: KeptEntry) -> Archived:
        """A group with its tokens."""
        run, group = self._run, entry.seen()
        try:
            own = columns_of_group(run, group)
            packets = list(fetch_columns(run, group.packets, None, header=True))
        except WireError as error:
            return Archived(entry, group, (), str(error))
        problem = group.problem or next((each.problem for each in packets if each.problem), None)
        found = [_with(own, each) for each in trajectories_of(group, packets, why(group, run.manifest))]
        return Archived(entry, group, found, problem)


def _parts(entries: Sequence[KeptEntry]) -> Iterator[list[KeptEntry]]:
    """Entries that fit into memory together."""
    part, total = list[KeptEntry](), 0
    for entry in entries:
        if part and total + _size(entry) > PAGE_BYTES:
            yield part
            part, total = [], 0
        part.append(entry)
        total += _size(entry)
    if part:
        yield part


def _entry_of(mark: Any) -> EntryId:
    return EntryId.of(as_text(mark)) if mark else NO_ENTRY


def _id_of(entry: KeptEntry) -> bytes:
    return entry.fields.get(b"group_id", b"")


def _size(entry: KeptEntry) -> int:
    return as_count(entry.fields.get(b"bytes", b"0"))


def _readable(kinds: Mapping[str, str]) -> dict[str, str]:
    """Extra columns whose kind is one."""
    found = {}
    for name, kind in kinds.items():
        with suppress(WireError):
            column_kind(name, kinds)
            found[name] = kind
    return found


def _with(own: Mapping[str, Array], trajectory: Trajectory) -> Trajectory:
    """The trajectory whose rows also have the columns of its group, as a trainer sees them."""
    if not own:
        return trajectory
    columns = {name: Column(data=array, per_token=False) for name, array in own.items()}
    rows = [row.model_copy(update={**columns, **row.extras}) for row in trajectory.rows]
    return trajectory.model_copy(update={"rows": rows})
