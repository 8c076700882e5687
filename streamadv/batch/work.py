"""Work items: how a batch is cut into work for the advantage workers, and handed to them."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from ..algorithms.chain import cut_chain
from ..grouping.groups_log import Pointer
from ..run import Run
from .record import BatchRecord

#: Trajectories in one work item, for chains that need no more than a group.
ITEM_TRAJECTORIES: Final = 128


class WorkItem(BaseModel):
    """An entry of a work stream: compute the chain over `groups` and publish the results of those of `shard`."""

    model_config = ConfigDict(frozen=True)

    batch: str
    k: int
    number: int  # in the batch
    shard: int
    groups: list[Pointer]
    chain: dict[str, Any]
    late: list[str] = []
    kl_coefficient: float | None = None
    running: dict[str, float] | None = None


def work_items(record: BatchRecord) -> list[WorkItem]:
    """The work items of a batch, numbered.

    Each has some groups of one shard. If the workers' part of the chain has to see the whole batch, there is one item
    per shard, over all groups.
    """
    batch_scope = cut_chain(record.chain, record.late)[0].scope == "batch"
    parts: list[tuple[int, list[Pointer]]] = []
    for shard in sorted({pointer.shard for pointer in record.groups}):
        if batch_scope:
            parts.append((shard, record.groups))
        else:
            parts += [(shard, part) for part in _parts(record.in_shard(shard))]
    return [
        WorkItem(
            batch=record.id,
            k=record.k,
            number=number,
            shard=shard,
            groups=groups,
            chain=record.chain,
            late=record.late,
            kl_coefficient=record.kl_coefficient,
            running=record.running,
        )
        for number, (shard, groups) in enumerate(parts)
    ]


def _parts(pointers: list[Pointer]) -> list[list[Pointer]]:
    """Consecutive groups of at most ITEM_TRAJECTORIES trajectories together; a larger group is a part of its own."""
    parts: list[list[Pointer]] = []
    trajectories = 0
    for pointer in pointers:
        if not parts or trajectories + pointer.trajectories > ITEM_TRAJECTORIES:
            parts.append([])
            trajectories = 0
        parts[-1].append(pointer)
        trajectories += pointer.trajectories
    return parts


def apply(run: Run, record: BatchRecord, epoch: int) -> None:
    """Make a named batch known to the shards: who owns its groups, counters, work. Repeating it changes nothing."""
    items = work_items(record)
    for shard in run.shards:
        pointers = record.in_shard(shard.index)
        if pointers:
            work = [item.model_dump_json() for item in items if item.shard == shard.index]
            groups = [part for pointer in pointers for part in (pointer.entry, pointer.trajectories)]
            shard.call("apply_batch", [epoch, record.id, len(pointers), *groups, *work])
