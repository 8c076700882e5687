"""The groups that rank 0 dropped while it named batches: figures for the trainer, lines of the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

from .. import clock
from ..grouping.groups_log import LoggedGroup
from ..messages import log_fields, summed_up
from .commit import is_oversize

#: Reasons and sources told apart; further sources are "other".
MAX_NAMES: Final = 256
#: Seconds between two lines of the log while no batch can be named.
LOG_INTERVAL_S: Final = 10.0
#: Texts of the reasons, for the log.
MEANING: Final = {
    "repeated": ", another try of their prompts is in the weights",
    "rolled_back": ", played with versions that the loaded checkpoint has taken back",
    "stale": ", older than drop_after allows",
    "trained": ", the loaded checkpoint contains them",
}

logger = logging.getLogger(__name__)


class DroppedGroups:
    """Dropped groups: by reason and source since the last delivered batch, by reason since the last lines of the log.

    Of the groups themselves only the first ones are kept: a trainer may wait long while everything is dropped.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._groups: Counter[str] = Counter()
        self._trajectories: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()
        self._first: dict[str, LoggedGroup] = {}  # of those that are yet to be logged, by reason
        self._batch = 0
        self._logged_at = -LOG_INTERVAL_S

    def add(self, k: int, group: LoggedGroup, reason: str) -> None:
        """The group was dropped while batch k was named."""
        name = f"dropped/{reason}/{group.data_source or 'unknown'}"  # what its figures begin with
        if name not in self._groups and len(self._groups) >= MAX_NAMES:
            name = f"dropped/{reason}/other"
        self._groups[name] += 1
        self._trajectories[name] += len(group.members)
        self._tokens[name] += int(group.members.table["trainable"].sum())
        self._batch = k
        self._unlogged[reason] += 1
        self._first.setdefault(reason, group)
        fields = log_fields(
            "group_dropped", run=self._run, role="trainer", batch=k, group=group.group_id, reason=reason
        )
        logger.debug("group %s is not trained on: %s", group.group_id, reason, extra=fields)

    def __len__(self) -> int:
        """Groups."""
        return self._groups.total()

    def clear(self) -> None:
        """Begin anew, after the figures were reported."""
        for counts in (self._groups, self._trajectories, self._tokens):
            counts.clear()

    def figures(self) -> dict[str, float]:
        """Groups, and mean length of their trajectories in trainable tokens, by reason and source."""
        groups = {f"{name}/groups": float(count) for name, count in self._groups.items()}
        means = {name: self._tokens[name] / count for name, count in self._trajectories.items() if count}
        return groups | {f"{name}/response_length/mean": mean for name, mean in means.items()}

    def log(self, now: bool = False) -> None:
        """One line for each reason, if the last lines are LOG_INTERVAL_S ago or `now`."""
        if not self._unlogged or not (now or clock.now() - self._logged_at >= LOG_INTERVAL_S):
            return
        self._logged_at = clock.now()
        for reason, count in self._unlogged.items():
            first = self._first[reason]
            fields = log_fields(
                "groups_dropped",
                run=self._run,
                role="trainer",
                batch=self._batch,
                group=first.group_id,
                reason=reason,
                count=count,
            )
            which = summed_up(first.group_id, count)
            why = f"{reason} ({first.problem})" if first.problem else reason + MEANING.get(reason, "")
            logger.warning("batch %d: %s not trained on: %s", self._batch, which, why, extra=fields)
        self._unlogged.clear()
        self._first.clear()


def warn_of_oversize(run: str, k: int, groups: Sequence[LoggedGroup], budget: int | None) -> None:
    """One line for the trajectories of batch k that have a row above the token budget of a micro-batch."""
    if budget is None:
        return
    long = [group.members for group in groups if group.sums.longest_row > budget]
    lengths = [length for members in long for length in members.longest_row[is_oversize(members, budget)]]
    if not lengths:  # of baselines only
        return
    count = len(lengths)
    fields = log_fields(
        "trajectories_oversize", run=run, role="trainer", batch=k, reason="oversize", count=count
    )
    logger.warning(
        "batch %d: trajectories not trained on: %d of %d, oversize: they have rows of up to %d tokens, "
        "tokens_per_micro_batch is %d: raise it, or play shorter rollouts",
        *(k, count, sum(len(group.members) for group in groups), max(lengths), budget),
        extra=fields,
    )
