"""Where kept groups are read from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ..run import Run
from ..run.packets import FetchedPacket, fetch_columns
from ..status.seen import KeptEntry, kept_entries
from ..store.replies import as_text
from ..trajectory.columns import KNOWN_COLUMNS, Array
from ..trajectory.packet import StoredPacket
from .folder import Folder

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
