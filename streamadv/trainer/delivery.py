"""From a computed batch to one rank's share, in five steps: plan, fetch, pack, late, cut (`deliver`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..advantage.compute import sample_tokens
from ..advantage.results import BatchResults
from ..algorithms.chain import cut_chain, run_chain
from ..algorithms.chain_metrics import MEAN_KL, merge_metrics
from ..algorithms.packed import PackedBatch, expand
from ..algorithms.packing import pack_members
from ..batch.record import BatchRecord
from ..errors import SettingError, UndecodableGroupError
from ..grouping.layout import Layout
from ..metrics import importance_weights
from ..run import Run
from ..trajectory.columns import OUTPUT_COLUMNS
from ..trajectory.members import offsets, spans
from ..trajectory.packet import payloads_of
from ..trajectory.schema import TOKEN_COLUMNS
from .fetch import FetchedShare, Problems, fetch_outputs
from .late_columns import LateColumn, keep_late, make_late_columns
from .microbatch import Batch, Delivered, References, RowExtras, cut, values_at
from .plan import Rank, Share, share_of

Metrics = tuple[Mapping[str, float], Mapping[str, float]]  # values, and the weights to merge them by


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """A named batch that the workers have computed."""

    record: BatchRecord
    layout: Layout  # of its living groups, in the record's order
    results: BatchResults  # of the members of `layout`
    left_out: Collection[tuple[str, int]]  # (group_id, rollout_index) that some rank could not read


@dataclass(slots=True)
class PackedShare:
    """One rank's share of a batch with everything that belongs to it, all in the order of the share."""

    share: Share
    batch: PackedBatch  # rewards as shaped by the workers
    columns: dict[str, Tensor]  # [N]: pushed ones, the workers' and late ones
    indices: dict[str, Tensor]  # [N]: those of `columns` that torch indexes with, in dtypes that it takes
    extras: dict[str, Tensor]  # pushed columns per token that no step of a chain reads, [N, ...]
    row_extras: RowExtras
    has: dict[str, Tensor]  # [rows], of the columns that a part of the batch lacks
    results: dict[str, Tensor]  # advantages and returns [N], as far as they are computed


def deliver(
    run: Run,
    computed: ComputedBatch,
    rank: Rank,
    late: Mapping[str, LateColumn],
    ahead: FetchedShare | None,
    fence: str,
) -> Batch:
    """One rank's part of a batch.

    late: suppliers by column. ahead: what was read ahead. fence: of the session. Raises UndecodableGroupError if a
    payload or a result is gone or cannot be read, LateColumnError, EpochFencedError, and SettingError if this world
    size cannot run the late part of the chain.
    """
    record = computed.record
    budget, left_out = record.tokens_per_micro_batch, computed.left_out
    if ahead is not None and ahead.share.batch is computed.layout and not left_out:
        fetched, share = ahead, ahead.share
    else:
        share = share_of(computed.layout, budget, rank, left_out, record.keep_groups)
        fetched = FetchedShare(run, share, rank.device)
    if problems := fetched.read(run):
        raise UndecodableGroupError(dict(sorted(problems.items())))
    outputs = fetch_outputs(run, computed.results, share, rank.device)
    packed = _pack(computed.results, fetched, outputs, rank.device)
    made, late_metrics = _run_late_part(computed, packed, late, rank.world_size)
    if late:
        keep_late(run, record.id, share.own, computed.results, share.positions, made, fence)
    parts = computed.results.results
    if cut_chain(record.chain, record.late)[0].scope == "batch":
        parts = parts[:1]  # each shard's worker has seen the whole batch
    metrics: list[Metrics] = [(result.header.metrics, result.header.weights) for result in parts]
    merged, weights = merge_metrics([*metrics, *([late_metrics] if late_metrics else [])])
    own_outputs = [name for name in packed.columns if name in OUTPUT_COLUMNS and name not in fetched.columns]
    outputs_of = {name: packed.columns[name] for name in dict.fromkeys([*packed.results, *own_outputs])}
    columns = {**packed.columns, **packed.indices, **packed.extras}
    return Batch(
        version=record.k,
        id=record.id,
        micro_batches=cut(share, columns, packed.row_extras, packed.has),
        num_tokens=int(share.trained.members.table["trainable"].sum()),
        num_rows=len(share.trained.members.rows),
        num_trajectories=len(share.trained),
        kl=merged.get(MEAN_KL),
        metrics=merged,
        metric_weights=weights,
        layout=share.trained,
        make_delivered=lambda: delivered(fetched, outputs_of, record.k),
    )


# Pack


def _pack(
    results: BatchResults,
    fetched: FetchedShare,
    outputs: Mapping[str, Tensor],
    device: torch.device,
) -> PackedShare:
    """The share end to end, with every known column that all have. Raises UndecodableGroupError for wrong results."""
    share = fetched.share
    known = {
        name: column
        for name, column in fetched.columns.items()
        if name in TOKEN_COLUMNS and name not in fetched.optional
    }
    extras = {
        name: column.to(device, non_blocking=True)
        for name, column in fetched.columns.items()
        if name not in known and name not in outputs
    }
    batch = pack_share(share, results, known, outputs, device)
    columns, per_token = dict(batch.columns), dict[str, Tensor]()
    if len(share.trained):
        suspect: dict[str, Tensor] = {}
        for name in ("advantages", "returns"):
            if name in results.names:
                numbers = results.numbers(name, share.positions)
                per_token[name] = expand(batch, results.level, torch.from_numpy(numbers).to(batch.device))
                if not np.isfinite(numbers).all():
                    suspect[name] = per_token[name]
            elif name in results.columns:
                per_token[name] = columns[name]
        _check_finite(batch, share, suspect, outputs)
    has = {name: rows for name, rows in fetched.has().items() if name not in columns}
    # torch refuses, or misreads, int32 and uint8. The values of the mask are 0 and 1: no copy.
    indices = {"input_ids": columns["input_ids"].to(torch.int64, copy=True)} if "input_ids" in columns else {}
    if "response_mask" in columns:
        indices["response_mask"] = columns["response_mask"].view(torch.bool)
    return PackedShare(share, batch, columns, indices, extras, fetched.row_extras(), has, per_token)


def pack_share(
    share: Share,
    results: BatchResults,
    known: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    device: torch.device,
) -> PackedBatch:
    """The share with its rewards as the workers have shaped them. known: columns as pushed, outputs: of the workers."""
    rewards, step_rewards = (results.numbers(name, share.positions) for name in ("rewards", "step_rewards"))
    # The workers' results replace pushed columns of their name.
    columns = dict(sorted({**known, **outputs}.items()))
    batch = pack_members(share.own, columns, device, (rewards, step_rewards))
    if "response_mask" in outputs and len(share.trained):  # the workers have narrowed it
        batch = replace(batch, given_mask=known["response_mask"].to(device))
    return batch


def _check_finite(
    batch: PackedBatch, share: Share, results: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> None:
    """Raise UndecodableGroupError for trajectories whose results are not finite: no worker publishes such."""
    numbers = {"reward": batch.rewards, "step reward": batch.steps.rewards}
    numbers |= {name: batch.columns[name] for name in outputs} | dict(results)
    problems: Problems = {}
    for name, values in numbers.items():
        if bool(values.sum().isfinite()):
            continue
        is_right = values.isfinite()
        if name == "reward":
            owner = torch.arange(len(share.own), device=batch.device)
        elif name == "step reward":
            owner = batch.steps.trajectory
        else:
            owner = batch.row_trajectory[batch.token_row]
            is_right |= ~batch.columns["response_mask"].bool()
        for position in set(owner[~is_right].tolist()):
            group_id, index = share.own.identity(position)
            problems[group_id, index] = f"{name} of rollout {index} is not finite"
    if problems:
        raise UndecodableGroupError(problems)


# Late


def _run_late_part(
    computed: ComputedBatch,
    packed: PackedShare,
    late: Mapping[str, LateColumn],
    world_size: int,
) -> tuple[dict[str, Tensor], Metrics | None]:
    """Make the late columns and run the steps of the chain after them; the share gets advantages and returns.

    Returns late columns and what was made after them, [N] each, and the metrics of these steps.
    """
    record, columns, metrics = computed.record, packed.columns, None
    made: dict[str, Tensor] = {}
    if late and len(packed.share.trained):  # else all groups are dead: no rank has a micro-batch
        all_columns = {**columns, **packed.indices, **packed.extras}
        made = make_late_columns(late, packed.share, all_columns, packed.row_extras, packed.has)
    for name in late:
        packed.extras.pop(name, None)
        packed.has.pop(name, None)
    columns |= made
    chain = cut_chain(record.chain, record.late)[1]
    if len(packed.share.trained) and chain.steps:
        if world_size > 1 and chain.scope != "row":  # one rank cannot run these steps on its share alone
            raise SettingError(
                f"chain has {chain.scope}-scoped steps after late columns {', '.join(record.late)}: "
                f"they need world_size 1, not {world_size}"
            )
        columns |= {name: packed.extras[name] for name in chain.needs if name in packed.extras}
        batch = packed.batch.with_columns(**columns)
        changed, computed_late, metrics = run_late_chain(record, packed.share, computed.results, batch)
        columns |= changed
        # A step may have narrowed it after the workers have made results.
        packed.indices["response_mask"] = mask = columns["response_mask"].view(torch.bool)
        packed.results = {name: torch.where(mask, values, 0.0) for name, values in packed.results.items()}
        packed.results |= computed_late
        made |= changed | computed_late
    if "advantages" in packed.results:
        packed.results.setdefault("returns", packed.results["advantages"])
    columns |= packed.results
    return made, metrics


def run_late_chain(
    record: BatchRecord, share: Share, results: BatchResults, batch: PackedBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor], Metrics]:
    """Run the steps after the late columns on a share.

    batch: the share with all columns that these steps need. Returns what the steps made or changed, advantages and
    returns as far as they made them, [N] each in the order of the share, and metrics.
    """
    chain = cut_chain(record.chain, record.late)[1]
    own: Tensor | slice = slice(None)
    if chain.scope != "row" and len(share.own) < len(share.batch):
        batch, own = _with_untrained(batch, share, results)
    result = run_chain(chain, batch, record.kl_coefficient)
    if "rollout_is_weights" in result.columns:
        importance_weights(sample_tokens(batch, result.columns["rollout_is_weights"]))
    changed = {name: values[own] for name, values in result.columns.items()}
    batch = batch.with_columns(**result.columns)
    made = {"advantages": result.advantages, "returns": result.returns}
    computed = {
        name: expand(batch, result.level, values)[own] for name, values in made.items() if values is not None
    }
    return changed, computed, (result.metrics, result.weights)


def _with_untrained(batch: PackedBatch, share: Share, results: BatchResults) -> tuple[PackedBatch, Tensor]:
    """The batch of a share with all members of its groups, and where the share's tokens are in it.

    Those that nobody trains on have no trainable tokens, and columns of 0.
    """
    members = share.batch.members
    own = torch.from_numpy(spans(offsets(members.table["tokens"]), share.positions)).to(batch.device)
    index = own.new_full((share.batch.num_tokens,), batch.num_tokens)
    index[own] = torch.arange(batch.num_tokens, device=batch.device)

    everybody = range(len(members))
    rewards = results.numbers("rewards", everybody), results.numbers("step_rewards", everybody)
    whole = pack_members(share.batch, None, batch.device, rewards)
    columns = {name: values_at(index, values) for name, values in batch.columns.items()}
    given_mask = None if batch.given_mask is None else values_at(index, batch.given_mask)
    return replace(whole, columns=columns, given_mask=given_mask), own


# `Batch.delivered`


def delivered(fetched: FetchedShare, outputs: Mapping[str, Tensor], k: int) -> list[Delivered]:
    """The trajectories with their payloads. outputs: computed columns of the share, [N] each."""
    own = fetched.share.own
    bounds = [slice(*span) for span in pairwise(offsets(own.members.table["tokens"]).tolist())]
    pushed = {name: column.numpy() for name, column in fetched.columns.items()}
    made = {name: column.cpu().numpy() for name, column in outputs.items()}
    payloads = {
        number: payloads_of(own.packets[number], others, fetched.headers[number])
        for number, others in fetched.others.items()
    }
    found = []
    for member, (reference, span) in enumerate(zip(References(own), bounds, strict=True)):
        number = int(own.packet[member])
        payload = payloads[number][int(own.position[member])]
        pushed_with = {name: pushed[name][span] for name in own.packets[number].columns if name in pushed}
        payload = replace(payload, columns={**pushed_with, **payload.columns})
        computed = {name: column[span] for name, column in made.items()}
        found.append(Delivered(reference, payload, computed, reference.staleness(k)))
    return found
