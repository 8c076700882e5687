"""From a named batch to what a rank trains on: collect results, fetch own columns, late part of the chain."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..advantage.results import Member, Result, numbers_of
from ..algorithms.chain import cut_chain, run_chain
from ..algorithms.chain_metrics import merge_metrics
from ..algorithms.packed import PackedBatch, expand, pack
from ..batch.commit import terminal_states
from ..batch.record import BatchRecord
from ..errors import SettingError, UndecodableGroupError
from ..grouping.groups_log import LoggedGroup
from ..run import Run
from ..run.payloads import fetch_payloads
from ..store.replies import replies_of
from ..trajectory.columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, Array
from ..trajectory.payload import Payload
from ..trajectory.reference import Reference
from ..trajectory.schema import TOKEN_COLUMNS
from .late_columns import LateColumn, late_values
from .microbatch import Batch, Delivered, MicroBatch
from .plan import RowRef, plan


class Fetched(NamedTuple):
    """Payloads read before they are due, by key, and columns that lie end to end for the members of these keys."""

    payloads: dict[str, Payload]
    keys: Sequence[str] = ()
    columns: Mapping[str, Tensor] = {}


def deliver(
    run: Run,
    record: BatchRecord,
    groups: Sequence[LoggedGroup],
    members: Sequence[Member],
    results: Sequence[Result],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    late: Mapping[str, LateColumn],
    ahead: Fetched,
    left_out: Container[tuple[str, int]],
) -> Batch:
    """This rank's part of a batch.

    left_out: (group_id, rollout_index) of trajectories whose rows are in no micro-batch, though the plan and the
    counts of the batch, which the other ranks share, go by them.
    Raises UndecodableGroupError when a payload is gone or cannot be read.
    """
    positions, planned = _share([member.reference for member in members], record, rank, world_size)
    kept = [members[position] for position in positions]
    planned = [[ref for ref in refs if kept[ref.trajectory].identity not in left_out] for refs in planned]
    own = _own(planned)
    mine = [kept[position] for position in own]
    keys = [member.reference.key for member in mine]
    payloads = _payloads(run, [member.reference for member in mine], ahead.payloads)
    outputs = _fetch_outputs(run, mine)
    metrics: list[tuple[Mapping[str, float], Mapping[str, float]]] = [
        (each.header.metrics, each.header.weights) for each in results
    ]
    place = {position: index for index, position in enumerate(own)}
    rows = [[RowRef(place[ref.trajectory], ref.row) for ref in refs] for refs in planned]
    there = ahead.columns if keys == ahead.keys else {}
    batch = _packed(mine, payloads, outputs, there, device)
    found = _advantages(batch, mine)
    _check_finite(batch, mine, found, outputs)
    if kept and not mine:
        batch = batch.with_columns(**_no_tokens(run, kept, device))
    if kept:  # else all groups are dead: there is no micro-batch, and nothing to be late for
        batch = batch.with_columns(**_late_columns(batch, mine, payloads, rows, late, device))
    chain = cut_chain(record.chain, record.late)[1]
    if chain.steps and kept:
        if world_size > 1 and chain.scope != "row":
            raise SettingError(
                f"chain has {chain.scope}-scoped steps behind late columns {', '.join(record.late)}: "
                f"they need world_size 1, not {world_size}"
            )
        result = run_chain(chain, batch, record.kl_coefficient)
        metrics.append((result.metrics, result.weights))
        batch = batch.with_columns(**result.columns)
        for name, values in (("advantages", result.advantages), ("returns", result.returns)):
            if values is not None:
                found[name] = expand(batch, result.level, values)
    if "advantages" in found:
        found.setdefault("returns", found["advantages"].clone())
    batch = batch.with_columns(**found)
    written = [*found, *_changed(batch, payloads)]

    own_references = [member.reference for member in mine]

    def delivered() -> list[Delivered]:
        return [
            Delivered(reference, payload, arrays, reference.staleness(record.k))
            for reference, payload, arrays in zip(
                own_references, payloads, _split(batch, written), strict=True
            )
        ]

    trained = [member.reference for member in kept]
    logged = {group.group_id: group.logged_ms / 1000 for group in groups}
    return Batch(
        version=record.k,
        id=record.id,
        micro_batches=_micro_batches(batch, mine, payloads, rows, device),
        num_tokens=sum(sum(reference.row_trainable) for reference in trained),
        num_rows=sum(len(reference.row_lengths) for reference in trained),
        num_trajectories=len(trained),
        references=trained,
        staleness=[reference.staleness(record.k) for reference in trained],
        logged_s=[logged[reference.group_id] for reference in trained],
        metrics=merge_metrics(metrics)[0],
        make_delivered=delivered,
    )


def references_of_rank(
    groups: Sequence[LoggedGroup], record: BatchRecord, rank: int, world_size: int
) -> list[Reference]:
    """The trajectories this rank gets if all these groups are delivered."""
    references = [member for group in groups for member in group.members]
    positions, planned = _share(references, record, rank, world_size)
    return [references[positions[position]] for position in _own(planned)]


def _share(
    references: Sequence[Reference], record: BatchRecord, rank: int, world_size: int
) -> tuple[list[int], list[list[RowRef]]]:
    """Positions of what is trained on, and this rank's plan over those."""
    budget = record.tokens_per_micro_batch
    states = terminal_states(references, budget)
    kept = [position for position, state in enumerate(states) if state == "trained"]
    return kept, plan([references[position] for position in kept], world_size, budget)[rank]


def _own(planned: Sequence[Sequence[RowRef]]) -> list[int]:
    return sorted({ref.trajectory for micro_batch in planned for ref in micro_batch})


def _payloads(run: Run, references: Sequence[Reference], ahead: Mapping[str, Payload]) -> list[Payload]:
    missing = [reference for reference in references if reference.key not in ahead]
    fetched = zip((each.key for each in missing), fetch_payloads(run, missing, None), strict=True)
    found = {**ahead, **dict(fetched)}
    return [found[reference.key] for reference in references]


def _fetch_outputs(run: Run, mine: Sequence[Member]) -> list[dict[str, Array]]:
    """Token-level results of the workers, for each member. Raises UndecodableGroupError."""
    pipe = run.connection.scripts.pipeline(transaction=False)
    asked = [member for member in mine if member.columns]
    for member in asked:
        pipe.hmget(member.result.output, [f"{member.position}:{name}" for name in member.columns])
    replies = iter(replies_of(pipe) if asked else [])
    outputs = []
    problems: dict[tuple[str, int], str] = {}
    for member in mine:
        arrays: dict[str, Array] = {}
        if member.columns:
            reply = next(replies)
            values = reply or [None] * len(member.columns)
            for name, raw in zip(member.columns, values, strict=True):
                dtype = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name]
                if raw is None or len(raw) != member.reference.num_tokens * dtype.itemsize:
                    text = f"output column {name} of rollout {member.reference.rollout_index}"
                    problems[member.identity] = f"{text} has the wrong size or is missing"
                    break
                arrays[name] = np.frombuffer(raw, dtype)
        outputs.append(arrays)
    if problems:
        raise UndecodableGroupError(problems)
    return outputs


def _packed(
    mine: Sequence[Member],
    payloads: Sequence[Payload],
    outputs: Sequence[Mapping[str, Array]],
    there: Mapping[str, Tensor],
    device: torch.device,
) -> PackedBatch:
    """Own members end to end, with every per-token column of one dimension and the rewards as shaped so far.

    there: pushed columns that are end to end already; the workers' results take the place of those of their name.
    """
    columns = [
        {**payload.columns, **arrays} if arrays else payload.columns
        for payload, arrays in zip(payloads, outputs, strict=True)
    ]
    common = set(TOKEN_COLUMNS).intersection(*columns) if columns else ()
    there = {name: there[name] for name in there if not any(name in arrays for arrays in outputs)}
    missing = sorted(set(common).difference(there))
    batch = pack([member.reference for member in mine], columns, device, names=missing)
    if there:
        placed = {name: column.to(device, non_blocking=True) for name, column in there.items()}
        batch = replace(batch, columns=dict(sorted({**batch.columns, **placed}.items())))
    if mine:
        batch = replace(batch, rewards=torch.tensor(numbers_of(mine, "rewards"), device=device))
        batch = batch.with_step_rewards(torch.tensor(numbers_of(mine, "step_rewards"), device=device))
    return batch


def _no_tokens(run: Run, others: Sequence[Member], device: torch.device) -> dict[str, Tensor]:
    """Every column a rank without trajectories would have, empty: its loop runs as on the other ranks."""
    run.refresh()  # knows the extra columns
    columns = {}
    for name in sorted(
        set.intersection(*({*m.reference.columns, *m.columns, *m.result.numbers} for m in others))
    ):
        dtype, shape, per_token = json.loads(run.manifest.columns.get(name, "[null, [], true]"))
        known = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS.get(name) or (dtype and np.dtype(dtype))
        if known is not None and per_token:
            columns[name] = torch.tensor(np.zeros((0, *shape), known), device=device)
    if "advantages" in columns:
        columns.setdefault("returns", columns["advantages"])
    return columns


def _check_finite(
    batch: PackedBatch,
    mine: Sequence[Member],
    found: Mapping[str, Tensor],
    outputs: Sequence[Mapping[str, Array]],
) -> None:
    """Raise UndecodableGroupError for trajectories whose results are not finite; no worker publishes such."""
    if not mine:
        return
    of_tokens = {name: batch.columns[name] for name in sorted(set().union(*outputs))} | dict(found)
    trained = batch.columns["response_mask"].bool()
    problems: dict[tuple[str, int], str] = {}

    def note(name: str, wrong: Tensor, owner: Tensor) -> None:
        if bool(wrong.any()):
            for position in set(owner[wrong].tolist()):
                reference = mine[position].reference
                problems[mine[position].identity] = (
                    f"{name} of rollout {reference.rollout_index} is not finite"
                )

    note("reward", ~batch.rewards.isfinite(), torch.arange(len(mine), device=batch.device))
    note("step reward", ~batch.steps.rewards.isfinite(), batch.steps.trajectory)
    owner = batch.row_trajectory[batch.token_row]
    for name, values in of_tokens.items():
        note(name, trained & ~values.isfinite(), owner)
    if problems:
        raise UndecodableGroupError(problems)


def _advantages(batch: PackedBatch, mine: Sequence[Member]) -> dict[str, Tensor]:
    """The workers' advantages and returns, one number per token."""
    found = {}
    for name in ("advantages", "returns"):
        if mine and all(name in member.result.numbers for member in mine):
            values = torch.tensor(numbers_of(mine, name), device=batch.device)
            found[name] = expand(batch, mine[0].result.header.level, values)
        elif mine and all(name in member.columns for member in mine):
            found[name] = batch.columns[name]
    return found


def _late_columns(
    batch: PackedBatch,
    mine: Sequence[Member],
    payloads: Sequence[Payload],
    rows: Sequence[Sequence[RowRef]],
    late: Mapping[str, LateColumn],
    device: torch.device,
) -> dict[str, Tensor]:
    """Call each supplier on every micro-batch; values outside them do not exist. Raises LateColumnError."""
    columns = {name: torch.zeros(batch.num_tokens, device=device) for name in late}
    micro_batches = _micro_batches(batch, mine, payloads, rows, device)
    for spans, micro_batch in zip(_token_spans(mine, rows), micro_batches, strict=True):
        for name, supplier in late.items():
            values = late_values(name, supplier, micro_batch)
            parts = torch.split(values, [stop - start for start, stop in spans])
            for (start, stop), part in zip(spans, parts, strict=True):
                columns[name][start:stop] = part
    return columns


def _token_spans(mine: Sequence[Member], rows: Sequence[Sequence[RowRef]]) -> list[list[tuple[int, int]]]:
    """Where each micro-batch's rows stand in the rank's packed batch; rows side by side are one span."""
    starts: list[list[int]] = []
    for member in mine:
        first = starts[-1][-1] if starts else 0
        starts.append(list(accumulate(member.reference.row_lengths, initial=first)))
    found = []
    for refs in rows:
        spans: list[tuple[int, int]] = []
        for ref in refs:
            start, stop = starts[ref.trajectory][ref.row : ref.row + 2]
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        found.append(spans)
    return found


def _tokens(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """[N of the spans, ...]: these tokens' values; a view where one span holds them all."""
    parts = [values[start:stop] for start, stop in spans]
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else values[:0]


def _micro_batches(
    batch: PackedBatch,
    mine: Sequence[Member],
    payloads: Sequence[Payload],
    rows: Sequence[Sequence[RowRef]],
    device: torch.device,
) -> list[MicroBatch]:
    per_token, per_row = _extras(mine, payloads)
    token_extras = {
        name: torch.tensor(np.concatenate(arrays), device=device) for name, arrays in per_token.items()
    }
    micro_batches = []
    for refs, spans in zip(rows, _token_spans(mine, rows), strict=True):
        columns = {name: _tokens(values, spans) for name, values in {**batch.columns, **token_extras}.items()}
        references = [mine[ref.trajectory].reference for ref in refs]
        lengths = [mine[ref.trajectory].reference.row_lengths[ref.row] for ref in refs]
        extras = {name: [parts[ref.trajectory][ref.row] for ref in refs] for name, parts in per_row.items()}
        micro_batches.append(MicroBatch(columns, lengths, references, extras))
    return micro_batches


def _extras(
    mine: Sequence[Member], payloads: Sequence[Payload]
) -> tuple[dict[str, list[Array]], dict[str, list[list[Array]]]]:
    """Extra columns all members have: one array per member if per token, else one per row of each member."""
    names = set.intersection(*(set(p.columns) - set(KNOWN_COLUMNS) for p in payloads)) if payloads else set()
    per_token: dict[str, list[Array]] = {}
    per_row: dict[str, list[list[Array]]] = {}
    columns = [payload.header.columns for payload in payloads] if names else []
    for name in sorted(names):
        specs = [each[name] for each in columns]
        if all(spec.lengths is None for spec in specs):
            per_token[name] = [payload.columns[name] for payload in payloads]
        else:
            per_row[name] = [
                np.split(payload.columns[name], np.cumsum(spec.lengths or ())[:-1])
                for payload, spec in zip(payloads, specs, strict=True)
            ]
    return per_token, per_row


def _changed(batch: PackedBatch, payloads: Sequence[Payload]) -> list[str]:
    """Columns the chain made that were not pushed: written out with the outputs."""
    pushed = set(payloads[0].columns) if payloads else set()
    return [name for name in batch.columns if name in OUTPUT_COLUMNS and name not in pushed]


def _split(batch: PackedBatch, names: Sequence[str]) -> list[dict[str, Any]]:
    """Columns of the packed batch, cut into trajectories."""
    bounds = batch.cu_seqlens[batch.row_offsets].tolist()
    arrays = {name: batch.columns[name].cpu().numpy() for name in dict.fromkeys(names)}
    return [{name: array[start:stop] for name, array in arrays.items()} for start, stop in pairwise(bounds)]
