"""Computes a batch again from its groups that are kept, and compares the results with those that were delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from pydantic import ValidationError

from ..advantage.compute import compute
from ..advantage.prepare import PreparedItem, worker_chain
from ..algorithms.chain import Chain, cut_chain
from ..batch.record import BatchRecord
from ..batch.work import WorkItem, work_items
from ..errors import StreamadvError, WireError
from ..grouping.groups_log import LoggedGroup, parse_groups
from ..messages import first_problem
from ..run.consumer import Entry
from ..run.kept import RESULTS_OF, Numbers, unpack_results
from ..status.kept import count_at
from ..status.seen import KeptEntry, SeenGroup
from ..trajectory.columns import Array
from ..trajectory.members import offsets
from .source import Source

#: Groups that a message names.
NAMED: Final = 8


@dataclass(frozen=True, slots=True)
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

    @property
    def chain(self) -> Chain:
        """The part of its chain that workers run."""
        return cut_chain(self.record.chain, self.record.late)[0]

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
    newest = max(found.values(), key=lambda entries: max(int(e.id.partition("-")[0]) for e in entries))
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


def rewind(
    source: Source, batch: KeptBatch, device: torch.device, record: BatchRecord | None = None
) -> dict[str, bytes]:
    """The results of the batch's groups computed again, by id, as `run.kept.pack_results` has them.

    record: with another chain; None = as it was. Raises StreamadvError for a chain that needs groups, or a column,
    which are not there.
    """
    record = batch.record if record is None else record
    chain = cut_chain(record.chain, record.late)[0]
    if chain.scope == "batch" and len(batch.groups) < batch.num_groups:
        step = next(step.name for step in chain.steps if step.scope == "batch")
        raise StreamadvError(
            f"batch {record.k}: step {step} of its chain looks at the whole batch, and {source.name} does not have "
            f"{batch.absent_text()}: keep all of them (keep={{'trained': 1}})"
        )
    results: dict[str, bytes] = {}
    for item in work_items(record):
        results |= _computed(source, batch, item, device)
    return results


def _computed(source: Source, batch: KeptBatch, item: WorkItem, device: torch.device) -> dict[str, bytes]:
    """The results of the item's shard, as a worker computes them."""
    groups = [batch.groups[pointer.group_id] for pointer in item.groups]
    needs, columns = worker_chain(item).needs, dict[str, dict[str, Array]]()
    packets = [packet for group in groups for packet in group.packets] if needs else []
    for fetched in source.fetch(packets, needs):
        missing = [name for name in needs if name not in fetched.columns]
        if fetched.problem or missing:
            problem = fetched.problem or f"the chain needs column {missing[0]}, which was not pushed"
            raise StreamadvError(f"batch {item.k}: packet {fetched.packet.key}: {problem}")
        columns[fetched.packet.key] = fetched.columns
    entry = Entry(item.shard, "0-0", {})
    computed = compute(PreparedItem(entry, item, groups, columns, share_kept=1.0), device)
    return {
        name.removeprefix(RESULTS_OF): bytes(raw)
        for name, raw in computed.outputs.items()
        if name.startswith(RESULTS_OF)
    }


def first_difference(batch: KeptBatch, again: Mapping[str, bytes]) -> str | None:
    """Where the results of a batch that was computed again are not those that are kept, in words; None = nowhere."""
    for group_id, seen in batch.seen.items():
        kept, new = batch.results[group_id], again.get(group_id, b"")
        if kept != new:
            try:
                return f"group {group_id}, {_difference(seen, unpack_results(kept), unpack_results(new))}"
            except WireError as error:
                return f"group {group_id}, {error}"
    return None


def _difference(seen: SeenGroup, kept: Sequence[Numbers], new: Sequence[Numbers]) -> str:
    for old, now in zip(kept, new, strict=False):
        if old[:2] != now[:2] or old.values.dtype != now.values.dtype or len(old.values) != len(now.values):
            break
        bits = f"u{old.values.itemsize}"
        differs = np.flatnonzero(old.values.view(bits) != now.values.view(bits))
        if len(differs):
            first = int(differs[0])
            where = _place(seen, old.level, first)
            values = f"kept {old.values[first]!s}, computed {now.values[first]!s}"
            return f"{where}{old.name}: {values} ({len(differs)} of {len(old.values)} differ)"
    return f"kept are {_names(kept)}, computed {_names(new)}"


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
