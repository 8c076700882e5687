"""The chain over one work item: pure functions from what was fetched to what will be published.

The same item gives the same bits on any worker. Nothing here reads or writes but the tries at suspect groups
(`isolation.py`).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from ..algorithms.chain import Chain, ChainResult, cut_chain, run_chain
from ..algorithms.packed import Level, PackedBatch
from ..algorithms.packing import pack
from ..batch.carryover import running_of
from ..batch.record import Death
from ..batch.work import WorkItem
from ..errors import ChainError, SettingError
from ..grouping.groups_log import LoggedGroup
from ..run import Run
from ..run.consumer import ADVANTAGE, Entry
from ..run.hangs import call_within
from ..trajectory.columns import Array
from .poison import isolate
from .results import counts_of

logger = logging.getLogger(__name__)

#: For one computation: far above what the largest takes, the first one included, which compiles.
TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A work item with everything its computation needs."""

    entry: Entry
    item: WorkItem
    groups: list[LoggedGroup]
    columns: dict[str, list[dict[str, Array]]]  # group id -> columns of its members; {} when none are needed
    dead: dict[str, Death] = field(default_factory=dict)  # groups that could not be read or computed


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of one work item, ready to be written."""

    entry: Entry
    item: WorkItem
    header: str
    results: dict[str, bytes]  # one number per trajectory, row or step: travels in the results log
    outputs: dict[Any, Any]  # '<member>:<column>' -> one number per token: a hash of its own
    groups: Sequence[LoggedGroup] = field(default=(), compare=False)  # those of the results, for the metrics
    advantages: Array | None = field(default=None, compare=False)  # likewise; trainable tokens only
    is_weights: Array | None = field(default=None, compare=False)  # likewise
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


def worker_chain(item: WorkItem) -> Chain:
    """The part of the chain that runs here: up to the first step needing a late column."""
    return cut_chain(item.chain, item.late)[0]


def compute_safely(
    run: Run,
    prepared: Prepared,
    device: torch.device,
    stop: threading.Event | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Computed:
    """`compute`, leaving out groups whose data break it (`isolation.py`). Raises ChainError if all do.

    timeout_s: for one computation; a group that takes longer alone is left out. Raises Stopped when `stop` is set
    and a computation goes on.
    """
    what = f"{ADVANTAGE}: the chain ({prepared.item.chain.get('estimator')}) on batch {prepared.item.batch}"

    def bounded(part: Prepared) -> Computed:
        return call_within(lambda: compute(part, device), timeout_s, what, stop)

    if not prepared.entry.reclaimed:
        try:
            return bounded(prepared)
        except SettingError:
            raise
        except Exception as error:  # some group's data: found out below
            logger.warning(
                "%s: batch %s to be computed group by group: %s", ADVANTAGE, prepared.item.batch, error
            )

    def compute_alone(group: LoggedGroup) -> object:
        return bounded(replace(prepared, groups=[group]))

    living = [group for group in prepared.groups if group.group_id not in prepared.dead]
    dead = isolate(run, living, compute_alone)
    if len(dead) == len(living) > 1:
        raise ChainError(
            f"batch {prepared.item.batch}: every group fails, as with {next(iter(dead.values())).detail}"
        )
    return bounded(replace(prepared, dead=prepared.dead | dead))


def compute(prepared: Prepared, device: torch.device) -> Computed:
    """Run the worker's part of the chain. Pure: the same entry gives the same bits on any worker."""
    item = prepared.item
    chain = worker_chain(item)
    groups = [group for group in prepared.groups if group.group_id not in prepared.dead]
    mine = [group for group in groups if group.shard == item.shard]
    header: dict[str, Any] = {"unit": item.number, "level": chain.level, "dead": prepared.dead}
    header["groups"] = [counts_of(group) for group in mine]
    if not groups:
        header |= {"columns": [], "metrics": {}, "weights": {}}
        return Computed(prepared.entry, item, json.dumps(header), {}, {})
    columns = [each for group in groups for each in prepared.columns.get(group.group_id, ())]
    batch = pack([member for group in groups for member in group.members], columns or None, device)
    result = run_chain(chain, batch, item.kl_coefficient, running_of(item))
    own = torch.tensor([group.shard == item.shard for group in groups], dtype=torch.bool, device=device)
    selection = Selection(batch, own[batch.trajectory_group])
    results, outputs = split_result(result, selection)
    header |= {
        "columns": sorted({name.partition(":")[2] for name in outputs}),
        "metrics": dict(result.metrics),
        "weights": dict(result.weights),
    }
    weights = result.columns.get("rollout_is_weights")
    return Computed(
        prepared.entry,
        item,
        json.dumps(header),
        results,
        outputs,
        mine,
        None if result.advantages is None else selection.trained(result.level, result.advantages),
        None if weights is None else selection.trained("token", weights),
        result.metrics,
    )


class Selection:
    """Which trajectories of a packed batch, and so which rows, steps and tokens, to write out."""

    def __init__(self, batch: PackedBatch, trajectories: Tensor) -> None:
        self.batch = batch
        self.trajectories = trajectories  # [M] bool
        self.by_level = {
            "row": trajectories[batch.row_trajectory],
            "step": trajectories[batch.steps.trajectory],
        }

    def trained(self, level: Level, values: Tensor) -> Array:
        """The chosen values of a level as an array; of tokens, the trainable ones."""
        if level == "token":
            chosen = self.by_level["row"][self.batch.token_row] & self.batch.column("response_mask").bool()
        else:
            chosen = self.by_level[level]
        return values[chosen].cpu().numpy()


def split_result(result: ChainResult, selection: Selection) -> tuple[dict[str, bytes], dict[Any, Any]]:
    """Numbers per trajectory, row or step as one array each; numbers per token by member and column."""
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
            for position, chosen in enumerate(selection.trajectories.tolist()):
                if chosen:
                    outputs[f"{number}:{name}"] = array[bounds[position] : bounds[position + 1]].tobytes()
                    number += 1
    return results, outputs


def _bytes(values: Tensor) -> bytes:
    return values.cpu().numpy().tobytes()
