"""What one batch hands on to the next: running moments of rewards and the adaptive KL coefficient.

Rank 0 decides both and writes them into the batch's record. So a batch that is computed twice, or delivered again
after a restart, sees the same numbers and counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..algorithms.chain.config import ChainConfig
from ..algorithms.chain.rewards import raw_rewards
from ..algorithms.chain.sources import split_by_source
from ..algorithms.kl import adapted_coefficient
from ..algorithms.packed import PackedBatch
from ..algorithms.packing import pack_members
from ..algorithms.rewards import RunningMoments
from ..errors import ArgumentError
from ..grouping.groups_log import LoggedGroup
from ..grouping.layout import Layout
from .record import Running


def running_with(
    config: ChainConfig, before: Running | None, groups: Sequence[LoggedGroup]
) -> Running | None:
    """The moments of all rewards up to and with those of `groups`, by source if the chain works by source.

    None if the chain does not ask for them. Moments of the other kind, from before the chain changed, do not count.
    """
    if "running" not in (config.reward.mean, config.reward.std):
        return None
    batch = pack_members(Layout.of(sorted(groups, key=lambda group: group.group_id)))
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
