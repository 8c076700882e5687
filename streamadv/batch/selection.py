"""What goes into batch k, as pure functions: which groups, and what the batches before hand on to it.

Handed on are running moments of rewards and the adaptive KL coefficient. Rank 0 decides all of it and writes it into
the batch's record. So a batch that is computed twice, or delivered again after a restart, sees the same numbers and
counts once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from operator import attrgetter
from typing import Final

from ..algorithms.chain.config import ChainConfig
from ..algorithms.chain.rewards import raw_rewards
from ..algorithms.chain.sources import split_by_source
from ..algorithms.kl import adapted_coefficient
from ..algorithms.packed import PackedBatch
from ..algorithms.packing import pack_members
from ..algorithms.segments import RunningMoments
from ..errors import ArgumentError, SettingError
from ..grouping.groups_log import LoggedGroup
from ..grouping.layout import Layout
from ..messages import brief
from ..prompts.spec import identity, is_number
from .progress import Progress
from .record import NamingSettings, Running

BATCH_ID: Final = re.compile(r"[0-9]+-[0-9a-f]{12}")


def reason_against(
    group: LoggedGroup, k: int, settings: NamingSettings, progress: Progress
) -> tuple[str | None, str | None]:
    """Why the group is dropped instead of trained on at version k, or None; and what is wrong with the group."""
    if group.malformed:
        return "malformed", group.problem
    if group.group_id in progress:
        as_trained = progress.tries.get(identity(group.group_id), group.group_id)
        return "trained" if as_trained == group.group_id else "repeated", group.problem
    if group.problem is not None:
        return "dead:undecodable", group.problem
    restored, version = progress.restored, group.version
    is_above = restored is not None and version is not None and version > restored
    # `branch`: an epoch that was taken again after a restart of the server does not count.
    if is_above and group.begun_epoch < progress.branch and not settings.keep_rolled_back:
        return "rolled_back", None
    if settings.drop_after is not None and group.sums.oldest < k - settings.drop_after:
        return "stale", None
    columns = sorted({name for packet in group.packets for name in settings.needs.difference(packet.columns)})
    if not columns:
        return None, None
    late = ", ".join(f"{name!r}: function" for name in columns)
    problem = f"pushed without {', '.join(columns)}, which the chain needs: push it, or give late={{{late}}}"
    return "dead:missing_column", problem


def choose(
    candidates: Iterable[LoggedGroup], k: int, batch_groups: int, settings: NamingSettings, progress: Progress
) -> tuple[list[LoggedGroup], list[tuple[LoggedGroup, str]]]:
    """The first `batch_groups` groups fit for batch k, and those before them to be dropped, with the reason.

    A group of a named batch that stands in the log again, because a server lost it, waits until the batch is trained.
    So does another try of a prompt that is chosen. With quotas all candidates are judged, and `share_out` chooses.
    """
    most = None if settings.quotas else batch_groups
    untrained = [batch for number, batch in progress.batches.items() if number >= progress.version]
    named = {identity(pointer.group_id) for batch in untrained for pointer in batch.living}
    fit: list[LoggedGroup] = []
    unfit: list[tuple[LoggedGroup, str]] = []
    chosen: set[str] = set()
    prompts: set[str] = set()
    for group in candidates:
        if len(fit) == most:
            break
        prompt = identity(group.group_id)
        if prompt in named or (prompt in prompts and group.group_id not in chosen):
            continue
        reason, problem = reason_against(group, k, settings, progress)
        if reason is None and group.group_id in chosen:
            reason, problem = "malformed", "a copy of another entry"
        if reason is not None:
            unfit.append((replace(group, problem=problem), reason))
        else:
            fit.append(group)
            chosen.add(group.group_id)
            prompts.add(prompt)
    return share_out(fit, batch_groups, settings.quotas) if settings.quotas else fit, unfit


def check_quotas(quotas: object) -> dict[str, float]:
    """The weights, {} for None. Raises SettingError for what is no mapping of sources to numbers above 0."""
    if quotas is None:
        return {}
    if not isinstance(quotas, Mapping) or not quotas:
        raise SettingError(f"quotas is {brief(quotas)}, needs a mapping of data sources to weights, or None")
    for source, weight in quotas.items():
        if not isinstance(source, str) or not is_number(weight) or weight <= 0:
            raise SettingError(f"quotas[{brief(source)}] is {brief(weight)}, needs a number above 0")
    return {source: float(weight) for source, weight in quotas.items()}


def share_out(
    fit: Sequence[LoggedGroup], batch_groups: int, quotas: Mapping[str, float]
) -> list[LoggedGroup]:
    """Up to `batch_groups` of these groups: of each source its share, rounded down, then the oldest of the others.

    fit: the oldest first. quotas: weights; a source without one has the smallest. Shares are among the sources that are
    there. So each batch has the oldest group, and the n-th group of a source whose share is p >= 1 groups is in one of
    the next ceil(n / p) batches, as long as no other sources come.
    """
    least = min(quotas.values())
    sources = {group.data_source or "" for group in fit}
    # As decimals: of 100 groups 0.29 are 29, which floats make 28.
    weights = {source: Fraction(str(quotas.get(source, least))) for source in sources}
    total = sum(weights.values())
    left = {source: int(batch_groups * weight / total) for source, weight in weights.items()}
    chosen: set[int] = set()
    for position, group in enumerate(fit):
        if left[group.data_source or ""] > 0:
            left[group.data_source or ""] -= 1
            chosen.add(position)
    others = [position for position in range(len(fit)) if position not in chosen]
    chosen.update(others[: batch_groups - len(chosen)])
    return [fit[position] for position in sorted(chosen)]


# What batches hand on


def running_with(
    config: ChainConfig, before: Running | None, groups: Sequence[LoggedGroup]
) -> Running | None:
    """The moments of all rewards up to and with those of `groups`, by source if the chain works by source.

    None if the chain does not ask for them. Moments of the other kind, from before the chain changed, do not count.
    """
    if "running" not in (config.reward.mean, config.reward.std):
        return None
    batch = pack_members(Layout.of(sorted(groups, key=attrgetter("group_id"))))
    moments = running_of(before)
    if not config.by_source:
        old = moments if isinstance(moments, RunningMoments) else RunningMoments()
        return asdict(_updated(old, config, batch))
    by_source = moments if isinstance(moments, dict) else {}
    for source, part in split_by_source(batch):
        by_source[source] = _updated(by_source.get(source, RunningMoments()), config, part.batch)
    return {source: asdict(of_source) for source, of_source in by_source.items()}


def _updated(moments: RunningMoments, config: ChainConfig, batch: PackedBatch) -> RunningMoments:
    """The moments with a batch's rewards, as they are where the sum is not finite: workers find the group at fault."""
    try:
        return moments.updated(raw_rewards(config.reward, batch)[~batch.baseline])
    except ArgumentError:
        return moments


def running_of(stored: Running | None) -> RunningMoments | dict[str, RunningMoments] | None:
    """The moments in a record or a work item, as `run_chain` takes them."""
    if stored is None:
        return None
    by_source = {
        source: RunningMoments(**value) for source, value in stored.items() if isinstance(value, dict)
    }
    return by_source or RunningMoments(**stored)


def coefficient_of(config: ChainConfig, prefetch: int, after: Mapping[str, float], k: int) -> float | None:
    """The KL coefficient to stamp into the record of batch k; None = the chain's fixed one, or no KL.

    after: batch number, as JSON has it, -> the adaptive coefficient after it, see `Progress.kl`. Batch k uses the one
    after k - 1 - prefetch: it is named when that batch is trained at the earliest. So its coefficient does not depend
    on how far ahead batches are named.
    """
    if config.kl is None or config.kl.target is None:
        return None
    since = k - 1 - prefetch
    if since >= 0 and after:  # a job with a smaller prefetch has kept fewer
        return after[str(max(since, min(map(int, after))))]
    return config.kl.coefficient


def coefficients_after(
    config: ChainConfig,
    prefetch: int,
    after: Mapping[str, float],
    k: int,
    kl: float | None,
    trajectories: int,
) -> Mapping[str, float]:
    """The coefficients after the last batches, now that batch k was trained on and its mean KL was `kl`."""
    if config.kl is None or config.kl.target is None:
        return after
    coefficient = after.get(str(k - 1), config.kl.coefficient)
    if kl is not None:
        coefficient = adapted_coefficient(coefficient, kl, config.kl.target, config.kl.horizon, trajectories)
    known = {**after, str(k): coefficient}
    return {j: value for j, value in known.items() if k - 2 - prefetch <= int(j) <= k}
