"""The chain over one work item: pure functions from fetched columns to results.

The same item gives the same bits on any worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from ..algorithms.chain import run_chain
from ..algorithms.packed import Level, PackedBatch
from ..algorithms.packing import empty_column, pack_members
from ..batch.selection import running_of
from ..errors import TrajectoryError
from ..grouping.layout import Layout, place
from ..metrics import Sample
from ..run.kept import RESULTS_OF
from ..trajectory.columns import Array
from .prepare import PreparedItem, worker_chain
from .results import counts_of, results_of_groups

#: Tokens of a work item that are sampled for the metrics.
SAMPLED_TOKENS: Final = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class ComputedItem:
    """Results of one work item, as they will be published."""

    prepared: PreparedItem  # without its columns
    published: Layout  # the members that the results are for: of the living groups of the item's shard
    header: str  # JSON of a ResultHeader
    #: a number per trajectory, row or step: in the log
    results: dict[str, bytes] = field(default_factory=dict)
    #: columns, and results of groups that may be kept: in a hash of their own
    outputs: dict[str, memoryview] = field(default_factory=dict)
    # For the metrics:
    advantages: Sample | None = None
    is_weights: Sample | None = None


def compute(prepared: PreparedItem, device: torch.device) -> ComputedItem:
    """Run the worker's part of the chain over the living groups, and pick the results of the item's shard.

    A chain that has to see the whole batch gets the groups of all shards.
    """
    item, groups = prepared.item, prepared.living
    chain, layout = worker_chain(item), Layout.of(groups)
    in_shard = [group for group in groups if group.shard == item.shard]
    published = layout if len(in_shard) == len(groups) else Layout.of(in_shard)
    header: dict[str, Any] = {
        **{"unit": item.number, "level": chain.level, "dead": prepared.dead},
        **{"groups": counts_of(published), "columns": [], "metrics": {}, "weights": {}},
    }
    computed = replace(prepared, columns={})
    if not groups:
        return ComputedItem(computed, published, json.dumps(header))
    batch = pack_members(layout, lay_out(layout, prepared.columns, chain.needs, device), device)
    result = run_chain(chain, batch, item.kl_coefficient, running_of(item.running))
    selection = Selection(batch, layout, item.shard)
    results = {
        "rewards": selection.pick("trajectory", result.rewards).tobytes(),
        "step_rewards": selection.pick("step", result.step_rewards).tobytes(),
    }
    tokens = dict(result.columns)
    for name, values in (("advantages", result.advantages), ("returns", result.returns)):
        if values is not None and result.level == "token":
            tokens[name] = values
        elif values is not None:
            results[name] = selection.pick(result.level, values).tobytes()
    picked = {name: selection.pick("token", values) for name, values in tokens.items()}
    outputs = {name: array.data.cast("B") for name, array in picked.items() if array.size}
    kept = results_of_groups(published, prepared.share_kept, chain.level, results, outputs)
    header |= {"kept": list(kept)} if kept else {}
    header |= {"columns": sorted(outputs), "metrics": dict(result.metrics), "weights": dict(result.weights)}
    outputs |= {f"{RESULTS_OF}{group_id}": memoryview(raw) for group_id, raw in kept.items()}
    weights = result.columns.get("rollout_is_weights")
    return ComputedItem(
        computed,
        published,
        json.dumps(header),
        results,
        outputs,
        None if result.advantages is None else selection.sample(result.level, result.advantages),
        None if weights is None else selection.sample("token", weights),
    )


def lay_out(
    layout: Layout, fetched: Mapping[str, Mapping[str, Array]], names: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """The columns of these names, [N] each, on the host. fetched: payload key -> columns of the packet.

    Raises TrajectoryError for a column that is not one number per token.
    """
    if not names:
        return {}
    sources = [(fetched[layout.packets[packet].key], parts) for packet, parts in layout.pieces().items()]
    columns = {}
    for name in names if sources else ():
        first = sources[0][0][name]
        if name in layout.members.entries or first.ndim > 1:
            raise TrajectoryError(
                f"column {name} is needed, and has not one number per token: push another one"
            )
        columns[name] = empty_column(layout.num_tokens, first.dtype, device)
        out = columns[name].numpy()
        for packet_columns, parts in sources:
            place(packet_columns[name], parts, out)
    return columns


class Selection:
    """The values of a packed batch that are published: those of the trajectories of one shard."""

    def __init__(self, batch: PackedBatch, layout: Layout, shard: int) -> None:
        self._batch = batch
        in_shard = np.array([group.shard == shard for group in layout.groups], np.bool_)
        #: [M] bool; None = all of them.
        self._trajectories = (
            None if in_shard.all() else torch.from_numpy(in_shard[layout.group]).to(batch.device)
        )

    def pick(self, level: Level | Literal["trajectory"], values: Tensor) -> Array:
        """The published ones of `values` of a level, on the host."""
        mask = self._mask(level)
        array: Array = (values if mask is None else values[mask]).cpu().numpy()
        return np.ascontiguousarray(array)

    def sample(self, level: Level, values: Tensor) -> Sample:
        """The published ones of `values`, for the metrics; of tokens as `sample_tokens`."""
        if level == "token":
            return sample_tokens(self._batch, values, self._mask(level))
        return Sample(self.pick(level, values))

    def _mask(self, level: Level | Literal["trajectory"]) -> Tensor | None:
        batch, mask = self._batch, self._trajectories
        if mask is None or level == "trajectory":
            return mask
        if level == "step":
            return mask[batch.steps.trajectory]
        mask = mask[batch.row_trajectory]
        return mask if level == "row" else mask[batch.token_row]


def sample_tokens(batch: PackedBatch, values: Tensor, mask: Tensor | None = None) -> Sample:
    """Some of `values` [N], of tokens that are trained on and, if given, where `mask` [N] is true.

    All of them if one is not finite, so that such are counted.
    """
    step = max(1, len(values) // SAMPLED_TOKENS) if bool(values.sum().isfinite()) else 1
    trainable = batch.column("response_mask")[::step].bool()
    chosen = trainable if mask is None else trainable & mask[::step]
    return Sample(values[::step][chosen].cpu().numpy(), step)
