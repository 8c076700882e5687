"""Candidates of rank 0: groups that it has read from the groups logs and not named yet."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator

from ..grouping.groups_log import LoggedGroup, Pointer, read_log
from ..run import Run


class Candidates:
    """Groups for the next batches, oldest first.

    Invariant: every entry of a shard's log up to `seen` is a candidate, in a named batch, or was dropped.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        #: Last entry read of each shard's groups log. Every session reads from the start: a shard that lost recent
        #: writes has older groups again, see "Going back in time" in docs/reliability.md.
        self.cursors = dict.fromkeys(range(len(run.keys.salts)), "0-0")
        self._groups: list[LoggedGroup] = []
        self._read_to_end: set[int] = set()  # shards

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[LoggedGroup]:
        return iter(self._groups)

    @property
    def has_read_all(self) -> bool:
        """Whether it has come to the end of every log, at least once."""
        return len(self._read_to_end) == len(self.cursors)

    def read_on(self, limit: int, named: Container[tuple[int, str]]) -> None:
        """Read until there are `limit` candidates of each shard, or its log ends.

        named: shard and entry of groups in batches. A new session reads them again.
        """
        for shard in self.cursors:
            missing = limit - sum(group.shard == shard for group in self._groups)
            while missing > 0:
                page = read_log(self._run, shard, self.cursors[shard], missing)
                if page:
                    self.cursors[shard] = page[-1].entry
                new = [group for group in page if (shard, group.entry) not in named]
                self._groups += new
                if len(page) < missing:
                    self._read_to_end.add(shard)
                    break
                missing -= len(new)
        self._groups.sort(key=lambda group: group.position)

    def remove(self, pointers: Collection[Pointer]) -> None:
        """Take groups off the list: they were named, or dropped."""
        self._groups = [group for group in self._groups if group.pointer not in pointers]
