"""Poison: finds groups whose data break the computation, by computing every group alone.

One bad group must neither stop the stage nor take the other groups of its batch with it. A work item that failed, or
that ended the process of an earlier worker, is computed group by group. The computation is deterministic, so an
exception or a timeout is final at once. Only a crash of the process needs several tries, since the group may not be
at fault; the server counts each try before it is made. The results report failing groups as dead, without numbers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from ..batch.record import Death
from ..errors import ChainError, EstimatorError, SettingError
from ..grouping.groups_log import LoggedGroup
from ..messages import log_fields, summed_up
from ..run import Run
from ..run.consumer import ADVANTAGE
from ..run.hangs import call_within
from .compute import ComputedItem, compute
from .prepare import PreparedItem

logger = logging.getLogger(__name__)

#: Seconds for one computation: far above what the largest takes, the first one included, which compiles.
TIMEOUT_S: Final = 300.0
#: Crashes of a process while it computed a group alone, until the group is dead.
MAX_ATTEMPTS: Final = 10
#: Exceptions that point to a bug in the chain, not to bad data: the columns were checked before.
CODE_ERRORS: Final = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)


def compute_safely(
    run: Run,
    prepared: PreparedItem,
    device: torch.device,
    stop: threading.Event | None = None,
) -> ComputedItem:
    """`compute`; groups whose data break it are reported as dead.

    A group that alone takes longer than TIMEOUT_S is dead. Raises ChainError and SettingError if the chain is wrong,
    and Stopped if a computation goes on after `stop` was set.
    """
    item = prepared.item
    what = f"{ADVANTAGE}: the chain ({item.chain.get('estimator')}) on batch {item.batch}"

    def bounded(part: PreparedItem) -> ComputedItem:
        return call_within(lambda: compute(part, device), TIMEOUT_S, what, stop)

    if not prepared.entry.reclaimed:
        try:
            return bounded(prepared)
        except SettingError:
            raise
        except Exception as error:  # the data of some group: `isolate` finds out of which
            fields = log_fields("computing_alone", run=run.name, role=ADVANTAGE, batch=item.k)
            logger.warning(
                "%s: batch %s is computed group by group: %s", ADVANTAGE, item.batch, error, extra=fields
            )
    dead = isolate(run, prepared.living, lambda group: bounded(replace(prepared, groups=[group])))
    if len(dead) == len(prepared.living) > 1:
        detail = next(iter(dead.values())).detail
        raise ChainError(f"batch {item.batch}: every group fails, as with {detail}")
    if dead:
        first, death = next(iter(dead.items()))
        fields = log_fields(
            "group_dead", run=run.name, role=ADVANTAGE, group=first, reason=death.reason, count=len(dead)
        )
        logger.error("%s dead (%s): %s", summed_up(first, len(dead)), *death, extra=fields)
    try:
        return bounded(replace(prepared, dead=prepared.dead | dead))
    except SettingError:
        raise
    except Exception as error:
        raise ChainError(f"batch {item.batch}: groups that compute alone fail together: {error}") from error


def isolate(
    run: Run, groups: Sequence[LoggedGroup], compute_alone: Callable[[LoggedGroup], object]
) -> dict[str, Death]:
    """Compute every group alone. Returns those that cannot be computed, by id.

    Raises SettingError and ChainError if the chain is wrong: an exception that points to a bug in its code is one
    unless another group computes.
    """
    deaths: dict[str, Death] = {}
    bugs: list[str] = []
    for group in groups:
        shard = run.shards[group.shard]
        # How often it was tried alone, this time included. The count stays if the process dies in this.
        attempts: int = shard.call("attempt", [group.group_id, "1"])
        try:
            if attempts > MAX_ATTEMPTS:
                text = f"crashed the process {MAX_ATTEMPTS} times"
                deaths[group.group_id] = Death("compute_error", text)
            else:
                compute_alone(group)
        except SettingError:
            raise
        # Any: the group's data may provoke whatever the chain's libraries raise. It is not kept: its frames hold the
        # group's tensors, in a cycle if one of them holds the exception.
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error.__cause__ if isinstance(error, EstimatorError) else error, CODE_ERRORS):
                bugs.append(text)
            deaths[group.group_id] = Death("compute_error", text[:500])
        finally:
            shard.call("attempt", [group.group_id, "0"])
    if bugs and len(deaths) == len(groups):
        raise ChainError(f"the chain fails by itself: {bugs[0]}")
    return deaths
