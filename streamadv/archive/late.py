"""The trainer's part of a batch computed again: the steps of its chain after late columns, from those that are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from ..advantage.compute import ComputedItem, lay_out
from ..advantage.results import BatchResults, parse_result
from ..algorithms.chain import cut_chain
from ..algorithms.packing import empty_column
from ..batch.record import BatchRecord
from ..grouping.layout import place
from ..run.kept import Numbers
from ..status.seen import SeenGroup
from ..store.keys import RunKeys
from ..trainer.delivery import pack_share, run_late_chain
from ..trainer.plan import Share
from ..trajectory.columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, Array
from ..trajectory.members import offsets

#: What was made of trajectories, by group and rollout_index.
Made = dict[str, dict[int, list[Numbers]]]


def late_needs(record: BatchRecord) -> list[str]:
    """Columns as pushed that the trainer's part reads."""
    needs = cut_chain(record.chain, record.late)[1].needs
    return [name for name in dict.fromkeys(["response_mask", *needs]) if name not in record.late]


def compute_late(
    keys: RunKeys,
    record: BatchRecord,
    share: Share,
    seen: Mapping[str, SeenGroup],
    items: Sequence[ComputedItem],
    columns: Mapping[str, Mapping[str, Array]],
    device: torch.device,
) -> Made:
    """What the trainer has made of a batch, of all trajectories of `share`.

    items: what the workers have made of it. columns: payload key -> `late_needs` of the packet, as far as no item
    makes them.
    """
    computed = [
        (parse_result(keys.shards[item.prepared.item.shard], _entry_of(keys, item)), item.outputs)
        for item in items
    ]
    results = BatchResults([result for result, _ in computed], share.batch)
    outputs_of = [outputs for result, outputs in computed if result.header.groups]
    outputs = {}
    for name in results.columns:
        dtype = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name]
        outputs[name] = empty_column(share.own.num_tokens, dtype, device)
        for number, pieces in results.pieces(share.positions).items():
            place(np.frombuffer(outputs_of[number][name], dtype), pieces, outputs[name].numpy())
    everywhere = set.intersection(*map(set, columns.values())) if columns else set()
    known = lay_out(share.own, columns, [name for name in late_needs(record) if name in everywhere], device)
    late = {name: torch.from_numpy(_late_column(name, share, seen)).to(device) for name in record.late}
    batch = pack_share(share, results, known, outputs, device).with_columns(**late)
    changed, estimated, _ = run_late_chain(record, share, results, batch)
    return _by_member(share, {**changed, **estimated})


def _entry_of(keys: RunKeys, item: ComputedItem) -> dict[bytes, bytes]:
    """What a worker would publish."""
    output = keys.shards[item.prepared.item.shard].output("")
    head = {"batch": item.prepared.item.batch, "header": item.header, "output": output, "output_bytes": "0"}
    numbers = {name.encode(): raw for name, raw in item.results.items()}
    return {name.encode(): text.encode() for name, text in head.items()} | numbers


def _late_column(name: str, share: Share, seen: Mapping[str, SeenGroup]) -> Array:
    parts = [np.zeros(0, np.float32)]
    for group_id, index in map(share.own.identity, range(len(share.own))):
        parts += [numbers.values for numbers in seen[group_id].late[index] if numbers.name == name]
    return np.concatenate(parts)


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
