"""The chain over one work item: pure functions from what was fetched to what will be published.

The same item gives the same bits on any worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..algorithms.chain import ChainResult, run_chain
from ..algorithms.packed import Level, PackedBatch
from ..algorithms.packing import pack
from ..batch.carryover import running_of
from ..batch.work import WorkItem
from ..grouping.groups_log import LoggedGroup
from ..run.consumer import Entry
from ..trajectory.columns import Array
from .prepare import PreparedItem, worker_chain
from .results import counts_of


@dataclass(frozen=True, slots=True)
class ComputedItem:
    """Results of one work item, as they will be published."""

    entry: Entry
    item: WorkItem
    header: str  # JSON of a ResultHeader
    results: dict[str, bytes]  # one number per trajectory, row or step: travels in the results log
    outputs: dict[Any, Any]  # '<member>:<column>' -> one number per token: a hash of its own
    # For the metrics:
    groups: Sequence[LoggedGroup] = field(default=(), compare=False)
    advantages: Array | None = field(default=None, compare=False)  # of tokens, the trainable ones
    is_weights: Array | None = field(default=None, compare=False)  # likewise
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


def compute(prepared: PreparedItem, device: torch.device) -> ComputedItem:
    """Run the worker's part of the chain over the living groups, and pick the results of the item's shard.

    A chain that has to see the whole batch gets the groups of all shards.
    """
    item, groups = prepared.item, prepared.living
    chain = worker_chain(item)
    published = [group for group in groups if group.shard == item.shard]
    header: dict[str, Any] = {
        **{"unit": item.number, "level": chain.level, "dead": prepared.dead},
        **{"groups": [counts_of(group) for group in published], "columns": [], "metrics": {}, "weights": {}},
    }
    if not groups:
        return ComputedItem(prepared.entry, item, json.dumps(header), {}, {})
    columns = [arrays for group in groups for arrays in prepared.columns.get(group.group_id, ())]
    batch = pack([member for group in groups for member in group.references], columns or None, device)
    result = run_chain(chain, batch, item.kl_coefficient, running_of(item))
    in_shard = torch.tensor([group.shard == item.shard for group in groups], dtype=torch.bool, device=device)
    selection = Selection(batch, in_shard[batch.trajectory_group])
    results, outputs = split_result(result, selection)
    header |= {
        "columns": sorted({name.partition(":")[2] for name in outputs}),
        "metrics": dict(result.metrics),
        "weights": dict(result.weights),
    }
    weights = result.columns.get("rollout_is_weights")
    return ComputedItem(
        prepared.entry,
        item,
        json.dumps(header),
        results,
        outputs,
        groups=published,
        advantages=None
        if result.advantages is None
        else selection.trainable_values(result.level, result.advantages),
        is_weights=None if weights is None else selection.trainable_values("token", weights),
        metrics=result.metrics,
    )


class Selection:
    """Which trajectories of a packed batch are published, as masks of each level.

    trajectories: [M] bool. by_level: "row" and "step" -> [R] and [S] bool.
    """

    def __init__(self, batch: PackedBatch, trajectories: Tensor) -> None:
        self.batch = batch
        self.trajectories = trajectories  # [M] bool
        self.by_level = {
            "row": trajectories[batch.row_trajectory],
            "step": trajectories[batch.steps.trajectory],
        }

    def trainable_values(self, level: Level, values: Tensor) -> Array:
        """The published values of a level, one number each; of tokens only those that are trained on."""
        if level == "token":
            mask = self.by_level["row"][self.batch.token_row] & self.batch.column("response_mask").bool()
        else:
            mask = self.by_level[level]
        return values[mask].cpu().numpy()


def split_result(result: ChainResult, selection: Selection) -> tuple[dict[str, bytes], dict[Any, Any]]:
    """What is published of a result: `ComputedItem.results` and `ComputedItem.outputs`."""
    results = {
        "rewards": _bytes(result.rewards[selection.trajectories]),
        "step_rewards": _bytes(result.step_rewards[selection.by_level["step"]]),
    }
    tokens = dict(result.columns)
    for name, values in (("advantages", result.advantages), ("returns", result.returns)):
        if values is None:
            continue
        if result.level == "token":
            tokens[name] = values
        else:
            results[name] = _bytes(values[selection.by_level[result.level]])
    outputs: dict[Any, Any] = {}
    if tokens:
        batch = selection.batch
        bounds = batch.cu_seqlens[batch.row_offsets].tolist()
        for name, values in tokens.items():
            array = values.cpu().numpy()
            number = 0
            for position, is_published in enumerate(selection.trajectories.tolist()):
                if is_published:
                    outputs[f"{number}:{name}"] = array[bounds[position] : bounds[position + 1]].tobytes()
                    number += 1
    return results, outputs


def _bytes(values: Tensor) -> bytes:
    return values.cpu().numpy().tobytes()
