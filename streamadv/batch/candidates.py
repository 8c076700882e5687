"""Candidates of rank 0: groups that it has read from the groups logs and not named yet."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from ..grouping.groups_log import LoggedGroup, Pointer, parse_groups, read_entries
from ..run import Run


class Candidates:
    """Groups for the next batches, oldest first.

    Invariant: every entry of a shard's log up to its cursor is a candidate, in a named batch, or was dropped.
    """

    def __init__(self, run: Run, named: Iterable[Pointer]) -> None:
        """named: groups of the batches that the session began with, which are in the logs still."""
        self._run = run
        #: With their ids: a server whose clock was set back, and that has lost entries, gives their places to others.
        self._named = set(map(_place, named))
        #: Last entry read of each shard's groups log. Every session reads from the start: a shard that lost recent
        #: writes has older groups again, see "Going back in time" in docs/reference/guarantees.md.
        self.cursors = dict.fromkeys(range(len(run.keys.salts)), "0-0")
        self._groups: dict[int, list[LoggedGroup]] = {shard: [] for shard in self.cursors}  # in log order
        self._read_whole: set[int] = set()  # shards whose log was read to its end once

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __iter__(self) -> Iterator[LoggedGroup]:
        return heapq.merge(*self._groups.values(), key=attrgetter("position"))

    @property
    def has_read_all(self) -> bool:
        """Whether it has come to the end of every log, at least once."""
        return len(self._read_whole) == len(self.cursors)

    def read_on(self, limit: int) -> None:
        """Read until there are `limit` candidates of each shard, or its log ends."""
        for shard, groups in self._groups.items():
            while (missing := limit - len(groups)) > 0:
                page = read_entries(self._run, shard, self.cursors[shard], missing)
                cursor = page[-1][1].decode() if page else self.cursors[shard]
                new = [entry for entry in page if (*entry[:2], entry[2].get(b"group_id")) not in self._named]
                parsed = parse_groups(self._run.keys, new)
                groups += parsed  # with the cursor at once: an interrupt before it loses nothing
                self.cursors[shard] = cursor
                if len(page) < missing:
                    self._read_whole.add(shard)
                    break

    def committed(self, groups: Iterable[Pointer]) -> None:
        """They are gone from the logs: a group that a server has lost may come again to the place that it had."""
        self._named.difference_update(map(_place, groups))

    def remove(self, groups: Collection[LoggedGroup] | Collection[Pointer]) -> None:
        """Take groups off the list, which were seen on it: they were named, or dropped."""
        removed = {(group.shard, group.entry) for group in groups}
        for shard, candidates in self._groups.items():
            self._groups[shard] = [group for group in candidates if (shard, group.entry) not in removed]


def _place(pointer: Pointer) -> tuple[int, bytes, bytes]:
    return pointer.shard, pointer.entry.encode(), pointer.group_id.encode()
