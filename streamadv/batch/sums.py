"""Members of many groups end to end, and what they add up to group by group: naming and commit go by these numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..grouping.groups_log import LoggedGroup
from ..trajectory.members import MEMBER, ROW, Members, join_records

#: `oldest` of a group none of whose members has a version: no staleness is above any limit.
NO_VERSION: Final = 1 << 62


class GroupSums:
    """G groups; one whose members could not be read has none."""

    def __init__(self, groups: Sequence[LoggedGroup]) -> None:
        tables = [group.members.table for group in groups]
        #: [M]: of all groups, without steps and named rewards.
        self.members = Members(
            join_records(tables, MEMBER), join_records([group.members.rows for group in groups], ROW)
        )
        self._groups = len(groups)
        self._group = np.repeat(np.arange(len(groups)), [len(table) for table in tables])  # [M]

    def count(self, mask: NDArray[np.bool_]) -> list[int]:
        """Members of each group for which mask [M] is true."""
        counts: list[int] = np.bincount(self._group[mask], minlength=self._groups).tolist()
        return counts

    @property
    def oldest(self) -> NDArray[np.int64]:
        """[G]: the oldest version of each group's trainable tokens."""
        oldest = np.full(self._groups, NO_VERSION, np.int64)
        has_version = self.members.has_version
        np.minimum.at(oldest, self._group[has_version], self.members.table["oldest"][has_version])
        return oldest
