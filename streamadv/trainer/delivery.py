"""From a computed batch to what one rank trains on, in five steps: plan, fetch, pack, late, cut."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..advantage.results import ComputedMember, Result, numbers_of
from ..algorithms.chain import Chain, cut_chain, run_chain
from ..algorithms.chain_metrics import MEAN_KL, merge_metrics
from ..algorithms.packed import PackedBatch, expand
from ..algorithms.packing import pack
from ..batch.record import BatchRecord
from ..errors import SettingError, UndecodableGroupError
from ..grouping.groups_log import LoggedGroup
from ..run import Run
from ..trajectory.columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, Array
from ..trajectory.payload import Payload
from ..trajectory.schema import TOKEN_COLUMNS
from .fetch import FetchedShare, Prefetched, fetch
from .late_columns import LateColumn, make_late_columns
from .microbatch import Batch, Delivered, cut
from .plan import Rank, Share, share_of

Metrics = tuple[Mapping[str, float], Mapping[str, float]]  # values, and the weights to merge them by


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """A named batch that the workers have computed. `groups` are its living ones, in the record's order."""

    record: BatchRecord
    groups: Sequence[LoggedGroup]
    members: Sequence[ComputedMember]  # of these groups, each with its part of the results
    results: Sequence[Result]  # one for each work item
    left_out: Container[tuple[str, int]]  # (group_id, rollout_index) that some rank could not read


@dataclass(frozen=True, slots=True)
class PackedShare:
    """One rank's share of a batch with everything that belongs to it, all in the order of the share's references."""

    share: Share
    members: Sequence[ComputedMember]
    payloads: Sequence[Payload]
    batch: PackedBatch  # [N] columns: pushed ones, the workers' and late ones; rewards as shaped so far
    results: Mapping[str, Tensor]  # advantages and returns [N], as far as they are computed


def deliver(
    run: Run, computed: ComputedBatch, rank: Rank, late: Mapping[str, LateColumn], prefetched: Prefetched
) -> Batch:
    """One rank's part of a batch.

    late: suppliers by column. Raises UndecodableGroupError if a payload or a result is gone or cannot be read,
    LateColumnError, and SettingError if this world size cannot run the late part of the chain.
    """
    share = _plan(computed, rank)
    members = _members_of(computed, share)
    fetched = fetch(run, members, prefetched)
    packed = _pack(run, computed, share, members, fetched, rank.device)
    packed, late_metrics = _run_late_part(computed.record, packed, late, rank.world_size)
    return _cut(computed, packed, late_metrics)


def _plan(computed: ComputedBatch, rank: Rank) -> Share:
    references = [member.reference for member in computed.members]
    return share_of(references, computed.record.tokens_per_micro_batch, rank, computed.left_out)


def _members_of(computed: ComputedBatch, share: Share) -> list[ComputedMember]:
    by_key = {member.reference.key: member for member in computed.members}
    return [by_key[reference.key] for reference in share.references]


# Pack


def _pack(
    run: Run,
    computed: ComputedBatch,
    share: Share,
    members: Sequence[ComputedMember],
    fetched: FetchedShare,
    device: torch.device,
) -> PackedShare:
    """The share end to end, with every known column per token. Raises UndecodableGroupError for wrong results."""
    batch = _pack_columns(members, fetched, device)
    if members:
        batch = replace(batch, rewards=torch.tensor(numbers_of(members, "rewards"), device=device))
        batch = batch.with_step_rewards(torch.tensor(numbers_of(members, "step_rewards"), device=device))
        results = _results_per_token(batch, members)
        _check_finite(batch, members, results, fetched.outputs)
    else:
        results = {}
        if share.batch_references:
            batch = batch.with_columns(**_empty_columns(run, computed.members, share, device))
    return PackedShare(share, members, fetched.payloads, batch, results)


def _pack_columns(
    members: Sequence[ComputedMember], fetched: FetchedShare, device: torch.device
) -> PackedBatch:
    """Pushed columns and the workers' results per token, which replace pushed ones of their name."""
    columns = [
        {**payload.columns, **outputs} if outputs else payload.columns
        for payload, outputs in zip(fetched.payloads, fetched.outputs, strict=True)
    ]
    common = set(TOKEN_COLUMNS).intersection(*columns) if columns else set()
    replaced = {name for outputs in fetched.outputs for name in outputs}
    end_to_end = {name: column for name, column in fetched.columns.items() if name not in replaced}
    names = sorted(common - end_to_end.keys())
    batch = pack([member.reference for member in members], columns, device, names=names)
    if end_to_end:
        placed = {name: column.to(device, non_blocking=True) for name, column in end_to_end.items()}
        batch = replace(batch, columns=dict(sorted({**batch.columns, **placed}.items())))
    return batch


def _results_per_token(batch: PackedBatch, members: Sequence[ComputedMember]) -> dict[str, Tensor]:
    """The workers' advantages and returns, [N] each."""
    results = {}
    for name in ("advantages", "returns"):
        if all(name in member.result.numbers for member in members):
            values = torch.tensor(numbers_of(members, name), device=batch.device)
            results[name] = expand(batch, members[0].result.header.level, values)
        elif all(name in member.columns for member in members):
            results[name] = batch.columns[name]
    return results


def _check_finite(
    batch: PackedBatch,
    members: Sequence[ComputedMember],
    results: Mapping[str, Tensor],
    outputs: Sequence[Mapping[str, Array]],
) -> None:
    """Raise UndecodableGroupError for trajectories whose results are not finite: no worker publishes such."""
    owner = batch.row_trajectory[batch.token_row]  # of each token
    trained = batch.columns["response_mask"].bool()
    per_token = {name: batch.columns[name] for name in sorted(set().union(*outputs))} | dict(results)
    checks = [
        ("reward", batch.rewards.isfinite(), torch.arange(len(members), device=batch.device)),
        ("step reward", batch.steps.rewards.isfinite(), batch.steps.trajectory),
        *((name, ~trained | values.isfinite(), owner) for name, values in per_token.items()),
    ]
    problems: dict[tuple[str, int], str] = {}
    for name, is_right, trajectory in checks:
        if not bool(is_right.all()):
            for position in set(trajectory[~is_right].tolist()):
                member = members[position]
                rollout = f"rollout {member.reference.rollout_index}"
                problems[member.identity] = f"{name} of {rollout} is not finite"
    if problems:
        raise UndecodableGroupError(problems)


def _empty_columns(
    run: Run, members: Sequence[ComputedMember], share: Share, device: torch.device
) -> dict[str, Tensor]:
    """Every column that a rank without trajectories would have, empty: its loop runs as on the other ranks."""
    run.refresh()  # the manifest knows the extra columns
    trained_keys = {reference.key for reference in share.batch_references}
    names = [
        {*member.reference.columns, *member.columns, *member.result.numbers}
        for member in members
        if member.reference.key in trained_keys
    ]
    columns = {}
    for name in sorted(set.intersection(*names)):
        dtype, shape, per_token = json.loads(run.manifest.columns.get(name, "[null, [], true]"))
        column_dtype = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS.get(name) or (dtype and np.dtype(dtype))
        if column_dtype is not None and per_token:
            columns[name] = torch.tensor(np.zeros((0, *shape), column_dtype), device=device)
    if "advantages" in columns:
        columns.setdefault("returns", columns["advantages"])
    return columns


# Late


def _run_late_part(
    record: BatchRecord, packed: PackedShare, late: Mapping[str, LateColumn], world_size: int
) -> tuple[PackedShare, Metrics | None]:
    """Make the late columns and run the steps of the chain after them; the batch gets advantages and returns."""
    batch, results, metrics = packed.batch, dict(packed.results), None
    if packed.share.batch_references:  # else all groups are dead: no rank has a micro-batch
        batch = batch.with_columns(**make_late_columns(late, batch, packed.share, packed.payloads))
        chain = cut_chain(record.chain, record.late)[1]
        if chain.steps:
            _check_scope(chain, record, world_size)
            result = run_chain(chain, batch, record.kl_coefficient)
            metrics = (result.metrics, result.weights)
            batch = batch.with_columns(**result.columns)
            for name, values in (("advantages", result.advantages), ("returns", result.returns)):
                if values is not None:
                    results[name] = expand(batch, result.level, values)
    if "advantages" in results:
        results.setdefault("returns", results["advantages"].clone())
    return replace(packed, batch=batch.with_columns(**results), results=results), metrics


def _check_scope(chain: Chain, record: BatchRecord, world_size: int) -> None:
    """Raise SettingError if one rank cannot run these steps on its share alone."""
    if world_size > 1 and chain.scope != "row":
        raise SettingError(
            f"chain has {chain.scope}-scoped steps after late columns {', '.join(record.late)}: "
            f"they need world_size 1, not {world_size}"
        )


# Cut


def _cut(computed: ComputedBatch, packed: PackedShare, late_metrics: Metrics | None) -> Batch:
    record, references = computed.record, packed.share.batch_references
    metrics: list[Metrics] = [(result.header.metrics, result.header.weights) for result in computed.results]
    merged, _ = merge_metrics([*metrics, *([late_metrics] if late_metrics else [])])
    logged_s = {group.group_id: group.logged_ms / 1000 for group in computed.groups}
    return Batch(
        version=record.k,
        id=record.id,
        micro_batches=cut(packed.batch, packed.share, packed.payloads),
        num_tokens=sum(sum(reference.row_trainable) for reference in references),
        num_rows=sum(len(reference.row_lengths) for reference in references),
        num_trajectories=len(references),
        references=references,
        staleness=[reference.staleness(record.k) for reference in references],
        logged_s=[logged_s[reference.group_id] for reference in references],
        kl=merged.get(MEAN_KL),
        metrics=merged,
        make_delivered=lambda: _delivered(packed, record.k),
    )


def _delivered(packed: PackedShare, k: int) -> list[Delivered]:
    """The share trajectory by trajectory, with the outputs that were not pushed."""
    pushed = set(packed.payloads[0].columns) if packed.payloads else set()
    made = [name for name in packed.batch.columns if name in OUTPUT_COLUMNS and name not in pushed]
    outputs = _split(packed.batch, dict.fromkeys([*packed.results, *made]))
    return [
        Delivered(reference, payload, arrays, reference.staleness(k))
        for reference, payload, arrays in zip(packed.share.references, packed.payloads, outputs, strict=True)
    ]


def _split(batch: PackedBatch, names: Sequence[str] | Mapping[str, Any]) -> list[dict[str, Array]]:
    """Columns of the packed batch, cut into trajectories."""
    bounds = batch.cu_seqlens[batch.row_offsets].tolist()
    arrays = {name: batch.columns[name].cpu().numpy() for name in names}
    return [{name: array[start:stop] for name, array in arrays.items()} for start, stop in pairwise(bounds)]
