"""Logs the trajectories that a scorer gives up: one line for many of them."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from .. import clock
from ..messages import log_fields

logger = logging.getLogger(__name__)

#: Seconds between two lines for the same reason.
LOG_INTERVAL_S: Final = 10.0


class _Noted(NamedTuple):
    """The first of some trajectories, and how many they are."""

    name: str
    group_id: str
    problem: str
    trajectories: int


class GivenUp:
    """Trajectories that became unscorable since the last lines of the log: how many and the first one, by reason."""

    def __init__(self, run: str, scorer: str) -> None:
        self._run = run
        self._scorer = scorer
        self._noted: dict[str, _Noted] = {}
        self._logged_at: dict[str, float] = {}

    def note(self, name: str, group_id: str, reason: str, problem: str, count: int = 1) -> None:
        """So many trajectories of a group, the first of which is `name`, are unscorable."""
        fields = log_fields(
            "trajectory_unscorable", run=self._run, role=self._scorer, group=group_id, reason=reason
        )
        logger.debug("scorer %s: trajectory %s is unscorable: %s", self._scorer, name, problem, extra=fields)
        before = self._noted.get(reason)
        if before is None:
            self._noted[reason] = _Noted(name, group_id, problem, count)
        else:
            self._noted[reason] = before._replace(trajectories=before.trajectories + count)

    def log(self, now: bool = False) -> None:
        """A line for each reason whose last one is LOG_INTERVAL_S ago, or for all of them `now`."""
        for reason, noted in list(self._noted.items()):
            last = self._logged_at.get(reason)
            if not now and last is not None and clock.now() - last < LOG_INTERVAL_S:
                continue
            del self._noted[reason]
            self._logged_at[reason] = clock.now()
            fields = log_fields(
                "trajectories_unscorable",
                run=self._run,
                role=self._scorer,
                group=noted.group_id,
                reason=reason,
                count=noted.trajectories,
            )
            which = f"trajectory {noted.name} is"
            if noted.trajectories > 1:
                which = f"{noted.trajectories} trajectories, {noted.name} first, are"
            text = "scorer %s: %s unscorable (%s): %s"
            logger.warning(text, self._scorer, which, reason, noted.problem, extra=fields)
