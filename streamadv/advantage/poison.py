"""Poison: groups whose data break the computation are found by computing every group alone.

One bad group must neither stop the stage nor take its batch-mates with it. A work item that failed, or that a
worker before did not survive, is tried group by group; each try is counted on the server before it is made, so
that a crash counts as well. What fails MAX_ATTEMPTS times is left out and reported as dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from ..batch.record import Death
from ..errors import ChainError, EstimatorError, HungError, SettingError
from ..grouping.groups_log import LoggedGroup
from ..run import Run

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 10
#: What comes from a faulty chain or estimator and hardly from data whose columns were checked.
CODE_ERRORS: Final = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)


def isolate(
    run: Run, groups: Sequence[LoggedGroup], compute_alone: Callable[[LoggedGroup], object]
) -> dict[str, Death]:
    """Compute every group alone; those that cannot be computed, by id.

    Raises SettingError and ChainError when it is the chain that is wrong: what looks like a fault of its code is one
    unless another group computes.
    """
    dead = {}
    faults: list[Exception] = []
    for group in groups:
        death = _try_alone(run, group, compute_alone, faults)
        if death is not None:
            dead[group.group_id] = death
            logger.error("group %s is dead (%s): %s", group.group_id, death.reason, death.detail)
    if faults and len(dead) == len(groups):
        raise ChainError(f"the chain fails by itself: {_told(faults[0])}") from faults[0]
    return dead


def _try_alone(
    run: Run, group: LoggedGroup, compute_alone: Callable[[LoggedGroup], object], faults: list[Exception]
) -> Death | None:
    """Why the group cannot be computed, if so; what looks like a fault of the code goes to `faults` too."""
    keys = run.keys.shard(group.shard)
    names = [keys.void, keys.attempts]
    detail = f"crashed the process {MAX_ATTEMPTS} times"
    while run.call("attempt", names, [group.group_id, "1"]) <= MAX_ATTEMPTS:
        try:
            compute_alone(group)
        except SettingError:
            raise
        except Exception as error:  # whatever its data provoke: that is what is being found out
            detail = _told(error)[:500]
            is_fault = isinstance(
                error.__cause__ if isinstance(error, EstimatorError) else error, CODE_ERRORS
            )
            if is_fault:
                faults.append(error)
            if is_fault or isinstance(error, HungError):  # the next try would end, or last, as this one
                break
            continue
        run.call("attempt", names, [group.group_id, "0"])
        return None
    run.call("attempt", names, [group.group_id, "0"])
    return Death("compute_error", detail)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
