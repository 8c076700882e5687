"""Where kept groups are read from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ..run import Run
from ..run.payloads import FetchedPacket, fetch_columns
from ..status.seen import KeptEntry, kept_entries
from ..store.keys import RunKeys
from ..trajectory.packet import StoredPacket


class Source(Protocol):
    """Kept groups, and the payloads that belong to them."""

    @property
    def name(self) -> str:
        """As messages name it."""

    @property
    def keys(self) -> RunKeys:
        """Of the run that the groups are of."""

    def entries(self) -> Iterator[KeptEntry]:
        """All of them, the oldest first in each shard."""

    def fetch(
        self, packets: Sequence[StoredPacket], names: Sequence[str] | None, *, header: bool = False
    ) -> Iterator[FetchedPacket]:
        """As `fetch_columns`."""


class RunSource:
    """The stream `kept` of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.name = f"run {run.name}"
        self.keys = run.manifest.keys

    def entries(self) -> Iterator[KeptEntry]:
        for shard in self._run.shards:
            yield from kept_entries(shard)

    def fetch(
        self, packets: Sequence[StoredPacket], names: Sequence[str] | None, *, header: bool = False
    ) -> Iterator[FetchedPacket]:
        return fetch_columns(self._run, packets, names, header=header)
