"""What groups cost that end short of usable rollouts.

A failed rollout costs its whole group, unless `partial_min_usable` or `redundancy` allows for it. By default only
whole groups are trained on, because mean and deviation over the rollouts that happened not to fail are biased towards
them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .. import clock
from ..messages import log_fields
from ..run import Run
from ..run.consumer import GROUPER

logger = logging.getLogger(__name__)

SHORT: Final = ("incomplete", "expired")
#: How a group can end in the grouper.
ENDINGS: Final = (*SHORT, "complete", "partial", "zero_variance", "difficulty", "no_train_members")
#: How a slot can end without a usable trajectory.
UNUSABLE: Final = ("failed", "aborted", "cancelled", "unscorable")
#: From this share of groups, or of usable trajectories, on groupers warn.
WARN_RATIO: Final = 0.2
#: Groups after which the shares are judged; after JUDGE_AFTER_S seconds MIN_GROUPS are enough.
WINDOW: Final = 20
MIN_GROUPS: Final = 5
JUDGE_AFTER_S: Final = 30.0
REMEDY: Final = "set partial_min_usable to train on short groups, or redundancy to have rollouts to spare"


@dataclass(frozen=True, slots=True)
class Loss:
    """`groups` of `ended` groups ended short; they took `trajectories` of `usable` usable trajectories with them."""

    groups: int
    ended: int
    trajectories: int
    usable: int

    @property
    def is_much(self) -> bool:
        shares = [(self.groups, self.ended), (self.trajectories, self.usable)]
        is_large = any(lost / total >= WARN_RATIO for lost, total in shares if total)
        return self.ended >= MIN_GROUPS and is_large

    def __str__(self) -> str:
        return (
            f"{self.groups} of {self.ended} groups ended short of usable rollouts and were dropped, with "
            f"{self.trajectories} usable trajectories: {REMEDY}"
        )


def loss_of(counters: Mapping[str, int]) -> Loss:
    """From the counters of a ledger."""

    def total(kind: str, reasons: Sequence[str]) -> int:
        return sum(counters.get(f"{kind}:{reason}", 0) for reason in reasons)

    return Loss(
        groups=total("outcome", SHORT),
        ended=total("outcome", ENDINGS),
        trajectories=total("dropped", SHORT),
        usable=counters.get("pushed", 0) - total("dropped", (*UNUSABLE, "eval")),
    )


class ShortGroups:
    """Warns while many groups end short."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._since = clock.now()
        self._before: Counter[str] | None = None  # counters of the ledger at the first look

    def look(self) -> None:
        """Log a warning if many groups ended short since the last judgement. Groupers call it every second or so."""
        now, counters = clock.now(), self._run.counters()
        self._before = self._before or counters
        lately = loss_of(counters - self._before)
        long_ago = now - self._since >= JUDGE_AFTER_S
        if lately.ended < (MIN_GROUPS if long_ago else WINDOW):
            return
        if lately.is_much:
            logger.warning("%s", lately, extra=log_fields("groups_short", run=self._run.name, role=GROUPER))
        self._since, self._before = now, counters
