"""Computes a batch again from its groups that are kept, and compares the results with those that were delivered.

Also the trainer's part of it: the steps of its chain after late columns, from those that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from ..advantage.compute import ComputedItem, compute, lay_out
from ..advantage.prepare import PreparedItem
from ..advantage.results import BatchResults, parse_result
from ..algorithms.chain import cut_chain
from ..algorithms.packing import empty_column
from ..batch.record import BatchRecord, work_items
from ..errors import StreamadvError, WireError
from ..grouping.groups_log import LoggedGroup, parse_groups
from ..grouping.layout import Layout, place
from ..messages import counted, first_problem
from ..run.consumer import Entry
from ..run.kept import RESULTS_OF, Numbers, unpack_results
from ..status.kept import count_at
from ..status.seen import KeptEntry, SeenGroup
from ..store.keys import EntryId
from ..trainer.delivery import pack_share, run_late_chain
from ..trainer.plan import Rank, Share, share_of
from ..trajectory.columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, Array
from ..trajectory.members import offsets
from ..trajectory.packet import StoredPacket
from .folder import Source

#: Groups that a message names.
NAMED: Final = 8
#: What was made of trajectories, by group and rollout_index.
Made = dict[str, dict[int, list[Numbers]]]


@dataclass(frozen=True)
class KeptBatch:
    """What is kept of a batch that was trained on. Its groups are sorted by id, as when it was computed."""

    record: BatchRecord  # with the groups that are there
    groups: Mapping[str, LoggedGroup]
    seen: Mapping[str, SeenGroup]
    results: Mapping[str, bytes]  # of each group, as the workers gave them
    num_groups: int
    """That it was named with."""
    absent: Mapping[str, str]
    """Groups that are not there: id -> how they have ended, as far as that is known."""

    @cached_property
    def share(self) -> Share:
        """What was trained on, as one rank has it."""
        left_out = {(group.group_id, index) for group in self.seen.values() for index in group.left_out}
        layout, rank = Layout.of(list(self.groups.values())), Rank(0, 1, torch.device("cpu"))
        return share_of(layout, self.record.tokens_per_micro_batch, rank, left_out, self.record.keep_groups)

    @cached_property
    def without_late(self) -> list[tuple[str, int]]:
        """The trajectories whose late columns are not there."""
        late, share = {*self.record.late}, self.share if self.record.late else None
        members = map(share.own.identity, range(len(share.own))) if share else ()
        return [
            (group_id, index)
            for group_id, index in members
            if not late <= {name for name, *_ in self.seen[group_id].late.get(index, ())}
        ]

    def about(self) -> list[str]:
        """What is there of it, in lines."""
        rollouts = counted(sum(len(group.members) for group in self.groups.values()), "rollout")
        lines = [f"batch {self.record.k}: {counted(len(self.groups), 'group')}, {rollouts}"]
        if len(self.groups) < self.num_groups:
            lines.append(f"not there: {self.absent_text()}")
        late_steps = cut_chain(self.record.chain, self.record.late)[1].steps  # that the trainer has run
        if late_steps and (count := len(self.without_late)):
            lines.append(
                f"late: what the trainer made of {', '.join(self.record.late)} is not kept of "
                f"{counted(count, 'rollout')}; the steps before are compared"
            )
        return lines

    def absent_text(self) -> str:
        """`2 of 16 groups: g1, g2 (dead:undecodable)`."""
        count = self.num_groups - len(self.groups)
        text = f"{count} of {self.num_groups} groups"
        named = [f"{each} ({how})" if how else each for each, how in self.absent.items()]
        more = ["..."] if len(named) > NAMED else []
        return f"{text}: {', '.join([*named[:NAMED], *more])}" if named else text


def find_batch(source: Source, k: int) -> KeptBatch:
    """What is kept of batch k; of several batches of this number, the last one that was trained on.

    Raises StreamadvError if nothing is.
    """
    number = str(k).encode()
    found: dict[str, list[KeptEntry]] = {}
    outcomes: dict[str, str] = {}
    for entry in source.entries():
        group_id = entry.fields.get(b"group_id", b"").decode(errors="replace")
        outcome = entry.fields.get(b"outcome", b"").decode(errors="replace")
        if outcome == "trained" and entry.fields.get(b"batch") == number and b"record" in entry.fields:
            found.setdefault(str(entry.seen().record.get("id")), []).append(entry)
        elif outcome.startswith("dead:"):
            outcomes[group_id] = outcome
    if not found:
        raise StreamadvError(
            f"no group of batch {k} is kept in {source.name}: the run keeps a share of those that were trained on "
            "(settings keep, keep_bytes), `streamadv show --where kept` lists them"
        )
    newest = max(found.values(), key=lambda entries: max(EntryId.of(e.id) for e in entries))
    return _kept_batch(source, k, newest, outcomes)


def _kept_batch(
    source: Source, k: int, entries: Sequence[KeptEntry], outcomes: Mapping[str, str]
) -> KeptBatch:
    parsed = parse_groups(source.keys, [(e.shard, e.id.encode(), e.fields) for e in entries])
    together = sorted(zip(parsed, entries, strict=True), key=lambda pair: pair[0].group_id)
    readable = [(group, entry, entry.seen()) for group, entry in together if not group.problem]
    if not readable:
        raise StreamadvError(f"batch {k}: no kept group of it can be read: {parsed[0].problem}")
    groups = {group.group_id: group for group, *_ in readable}
    stored = readable[0][2].record
    try:
        pointers = [group.pointer for group in groups.values()]
        record = BatchRecord.model_validate({**stored, "groups": pointers})
    except ValidationError as error:
        raise StreamadvError(f"batch {k}: its record: {first_problem(error)}") from error
    ids, count = stored.get("group_ids", ()), int(stored.get("num_groups", len(groups)))
    return KeptBatch(
        record,
        groups,
        {seen.group_id: seen for *_, seen in readable},
        {group.group_id: entry.fields.get(b"results", b"") for group, entry, _ in readable},
        max(count, len(groups)),
        {each: outcomes.get(each, "") for each in ids if each not in groups},
    )


class Again(NamedTuple):
    """A batch that was computed again."""

    results: Mapping[str, bytes]
    """Of the workers, by group, as `run.kept.pack_results` has them."""
    late: Made
    """Of the trainer; nothing if no step needs a late column, or not all of them are kept."""


def rewind(
    source: Source, batch: KeptBatch, device: torch.device, record: BatchRecord | None = None
) -> Again:
    """The batch's groups computed again.

    record: with another chain; None = as it was. Raises StreamadvError for a chain that needs groups, or a column,
    which are not there.
    """
    record = batch.record if record is None else record
    parts = cut_chain(record.chain, record.late)
    for step in (step for part in parts for step in part.steps):
        if step.scope == "batch" and len(batch.groups) < batch.num_groups:
            raise StreamadvError(
                f"batch {record.k}: step {step.name} of its chain looks at the whole batch, and {source.name} does not "
                f"have {batch.absent_text()}: keep all of them (keep={{'trained': 1}})"
            )
    items = []
    for item in work_items(record):  # as a worker computes it
        groups = [batch.groups[pointer.group_id] for pointer in item.groups]
        packets = [packet for group in groups for packet in group.packets]
        columns = _columns(source, batch, item.k, packets, cut_chain(item.chain, item.late)[0].needs)
        prepared = PreparedItem(Entry(item.shard, "0-0", {}), item, groups, columns, share_kept=1.0)
        items.append(compute(prepared, device))
    results = {
        name.removeprefix(RESULTS_OF): bytes(raw)
        for item in items
        for name, raw in item.outputs.items()
        if name.startswith(RESULTS_OF)
    }
    has_late = parts[1].steps and not batch.without_late
    return Again(results, _compute_late(source, batch, record, items, device) if has_late else {})


def _columns(
    source: Source,
    batch: KeptBatch,
    k: int,
    packets: Sequence[StoredPacket],
    needs: Sequence[str],
    strict: bool = True,
) -> dict[str, dict[str, Array]]:
    """Columns by packet, as pushed or as the trainer has made them. strict: one that is nowhere is an error."""
    columns = dict[str, dict[str, Array]]()
    late = {name for name in needs if name in batch.record.late and not batch.without_late}
    group_of = {packet.key: group for group in batch.seen.values() for packet in group.packets}
    for fetched in source.fetch(packets if needs else [], [name for name in needs if name not in late]):
        found, packet = dict(fetched.columns), fetched.packet
        found |= {name: _late_of(packet, group_of[packet.key], name) for name in late}
        missing = [name for name in needs if name not in found] if strict else []
        if fetched.problem or missing:
            problem = fetched.problem or f"the chain needs column {missing[0]}, which was not pushed"
            raise StreamadvError(f"batch {k}: packet {packet.key}: {problem}")
        columns[packet.key] = found
    return columns


def _late_of(packet: StoredPacket, group: SeenGroup, name: str) -> Array:
    """A late column of all members of a packet; 0 where nobody was trained on."""
    parts = [np.zeros(0, np.float32)]
    for member in packet.members.table:
        made = {numbers.name: numbers.values for numbers in group.late.get(int(member["index"]), ())}
        parts.append(made.get(name, np.zeros(int(member["tokens"]), np.float32)))
    return np.concatenate(parts)


def first_difference(batch: KeptBatch, again: Again) -> str | None:
    """Where the results of a batch that was computed again are not those that are kept, in words; None = nowhere."""
    for group_id, seen in batch.seen.items():
        kept, new = batch.results[group_id], again.results.get(group_id, b"")
        if kept != new:
            try:
                old, now = unpack_results(kept), unpack_results(new)
            except WireError as error:
                return f"group {group_id}, {error}"
            found = _between(old, now, partial(_place, seen))
            return f"group {group_id}, {found or f'kept are {_names(old)}, computed {_names(now)}'}"
        for index, made in again.late.get(group_id, {}).items():
            kept_of = [numbers for numbers in seen.late[index] if numbers.name not in batch.record.late]
            if difference := _between(kept_of, made, partial("rollout {}, {} {}, ".format, index)):
                return f"group {group_id}, {difference}"
    return None


def _between(kept: Sequence[Numbers], new: Sequence[Numbers], place: Callable[[str, int], str]) -> str | None:
    """The first number that differs, in words; None = nowhere. place: of a number of a result of a level."""
    for old, now in zip(kept, new, strict=False):
        if old[:2] != now[:2] or old.values.dtype != now.values.dtype or len(old.values) != len(now.values):
            return f"kept are {_names(kept)}, computed {_names(new)}"
        bits = f"u{old.values.itemsize}"
        differs = np.flatnonzero(old.values.view(bits) != now.values.view(bits))
        if len(differs):
            first = int(differs[0])
            values = f"kept {old.values[first]!s}, computed {now.values[first]!s}"
            return (
                f"{place(old.level, first)}{old.name}: {values} ({len(differs)} of {len(old.values)} differ)"
            )
    return None if len(kept) == len(new) else f"kept are {_names(kept)}, computed {_names(new)}"


def _place(seen: SeenGroup, level: str, number: int) -> str:
    """The member that has this number of a result, and which of its numbers that is."""
    counting = [member for member in seen.members if member.rollout_index in seen.counting]
    bounds = offsets(np.array([count_at(member, level) for member in counting], np.int64)).tolist()
    for member, (start, stop) in zip(counting, pairwise(bounds), strict=True):
        if start <= number < stop:
            within = "" if level == "trajectory" else f"{level} {number - start}, "
            return f"rollout {member.rollout_index}, {within}"
    return f"{level} {number}, "


def _names(results: Sequence[Numbers]) -> str:
    return ", ".join(f"{len(n.values)} {n.name} per {n.level}" for n in results) or "no results"


def _compute_late(
    source: Source, batch: KeptBatch, record: BatchRecord, items: Sequence[ComputedItem], device: torch.device
) -> Made:
    """What the trainer has made of all trajectories of the batch's share. items: what the workers have made of it."""
    share, computed = batch.share, []
    needs = dict.fromkeys(["response_mask", *cut_chain(record.chain, record.late)[1].needs])
    needed = [name for name in needs if name not in record.late]
    columns = _columns(source, batch, record.k, share.own.packets, needed, strict=False)
    for item in items:  # as a worker would publish it
        shard = source.keys.shards[item.prepared.item.shard]
        head = {"batch": item.prepared.item.batch, "header": item.header, "output": shard.output("")}
        fields = {name.encode(): text.encode() for name, text in head.items()} | {b"output_bytes": b"0"}
        fields |= {name.encode(): raw for name, raw in item.results.items()}
        computed.append((parse_result(shard, fields), item.outputs))
    results = BatchResults([result for result, _ in computed], share.batch)
    outputs_of = [outputs for result, outputs in computed if result.header.groups]
    outputs = {}
    for name in results.columns:
        dtype = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name]
        outputs[name] = empty_column(share.own.num_tokens, dtype, device)
        for number, pieces in results.pieces(share.positions).items():
            place(np.frombuffer(outputs_of[number][name], dtype), pieces, outputs[name].numpy())
    everywhere = set.intersection(*map(set, columns.values())) if columns else set()
    known = lay_out(share.own, columns, [name for name in needed if name in everywhere], device)
    late = {}
    for name in record.late:
        parts = [np.zeros(0, np.float32)]
        for group_id, index in map(share.own.identity, range(len(share.own))):
            parts += [each.values for each in batch.seen[group_id].late[index] if each.name == name]
        late[name] = torch.from_numpy(np.concatenate(parts)).to(device)
    packed = pack_share(share, results, known, outputs, device).with_columns(**late)
    changed, estimated, _ = run_late_chain(record, share, results, packed)
    return _by_member(share, {**changed, **estimated})


def _by_member(share: Share, made: Mapping[str, torch.Tensor]) -> Made:
    found: Made = {}
    arrays = {
        name: (values.view(torch.uint8) if values.dtype == torch.bool else values).cpu().numpy()
        for name, values in made.items()
    }
    bounds = pairwise(offsets(share.own.members.table["tokens"]).tolist())
    for member, (start, stop) in enumerate(bounds):
        group_id, index = share.own.identity(member)
        own = [Numbers(name, "token", values[start:stop]) for name, values in arrays.items()]
        found.setdefault(group_id, {})[index] = own
    return found
