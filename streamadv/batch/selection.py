"""What goes into batch k, as pure functions: which groups, and what the batches before hand on to it.

Handed on are running moments of rewards and the adaptive KL coefficient. Rank 0 decides all of it and writes it into
the batch's record. So a batch that is computed twice, or delivered again after a restart, sees the same numbers and
counts once.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

from .. import doors
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
from ..prompts.spec import identity
from .record import BatchRecord, Running

BATCH_ID: Final = re.compile(r"[0-9]+-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class NamingRules:
    """What decides whether a group goes into a batch."""

    drop_after: int | None  # versions
    needs: frozenset[str] = frozenset()  # columns that producers must have pushed
    trained: Container[str] = frozenset()  # ids of the groups in the weights
    rolled_back_above: int | None = None  # version restored by load_state_dict
    #: Epoch that load_state_dict took. Epochs taken again after a restart of the server do not count.
    branch: int = 0
    #: Data source -> weight. Without any, the oldest groups make a batch.
    quotas: Mapping[str, float] = field(default_factory=dict)
    named: Container[str] = frozenset()  # groups in batches that are yet to be trained, by `identity`
    tries: Mapping[str, str] = field(default_factory=dict)  # of prompts in the weights: prompt -> group

    def reason_against(self, group: LoggedGroup, k: int) -> str | None:
        """Why the group is dropped instead of trained on at version k, or None."""
        if group.malformed:
            return "malformed"
        if group.group_id in self.trained:
            as_trained = self.tries.get(identity(group.group_id), group.group_id)
            return "trained" if as_trained == group.group_id else "repeated"
        if group.problem is not None:
            return "dead:undecodable"
        restored = self.rolled_back_above
        if (
            restored is not None
            and group.version is not None
            and group.version > restored
            and group.begun_epoch < self.branch
        ):
            return "rolled_back"
        if self.drop_after is not None and group.sums.oldest < k - self.drop_after:
            return "stale"
        return "dead:missing_column" if self.missing_columns(group) else None

    def missing_columns(self, group: LoggedGroup) -> list[str]:
        """Columns that the chain needs and some packet of the group was pushed without."""
        return sorted({name for packet in group.packets for name in self.needs.difference(packet.columns)})


def choose(
    candidates: Iterable[LoggedGroup], k: int, batch_groups: int, rules: NamingRules
) -> tuple[list[LoggedGroup], list[tuple[LoggedGroup, str]]]:
    """The first `batch_groups` groups fit for batch k, and those before them to be dropped, with the reason.

    A group of a named batch that stands in the log again, because a server lost it, waits until the batch is trained.
    So does another try of a prompt that is chosen. With quotas all candidates are judged, and `share_out` chooses.
    """
    most = None if rules.quotas else batch_groups
    fit: list[LoggedGroup] = []
    unfit: list[tuple[LoggedGroup, str]] = []
    chosen: set[str] = set()
    prompts: set[str] = set()
    for group in candidates:
        if len(fit) == most:
            break
        prompt = identity(group.group_id)
        if prompt in rules.named or (prompt in prompts and group.group_id not in chosen):
            continue
        reason = rules.reason_against(group, k)
        if reason == "dead:missing_column":
            columns = rules.missing_columns(group)
            late = ", ".join(f"{name!r}: function" for name in columns)
            problem = f"pushed without {', '.join(columns)}, which the chain needs: push it, or give late={{{late}}}"
            unfit.append((replace(group, problem=problem), reason))
        elif reason is not None:
            unfit.append((group, reason))
        elif group.group_id in chosen:
            unfit.append((replace(group, problem="a copy of another entry"), "malformed"))
        else:
            fit.append(group)
            chosen.add(group.group_id)
            prompts.add(prompt)
    return share_out(fit, batch_groups, rules.quotas) if rules.quotas else fit, unfit


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


def make_record(k: int, epoch: int, groups: Sequence[LoggedGroup], **decided: Any) -> BatchRecord:
    """The record of batch k. Groups are sorted by id, so that nothing depends on the order of arrival."""
    ordered = sorted(groups, key=lambda group: group.group_id)
    return BatchRecord(
        k=k,
        id=f"{k}-{doors.random_bytes(6).hex()}",
        epoch=epoch,
        groups=[group.pointer for group in ordered],
        **decided,
    )


# What batches hand on


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
