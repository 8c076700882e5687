"""Work items: cuts a batch into work for the advantage workers, and hands it to them."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from ..algorithms.chain import cut_chain
from ..grouping.groups_log import Pointer
from ..run import Run
from ..run.ledger import ENDINGS
from ..trajectory.columns import KNOWN_COLUMNS
from .record import BatchRecord, Running

#: Size limits of a work item, for chains that look at single groups: trajectories, and bytes of the columns read.
ITEM_TRAJECTORIES: Final = 4096
ITEM_BYTES: Final = 8 << 20
#: Assumed size of a token of an extra column.
EXTRA_BYTES: Final = 4

#: Groups that a shard learns of in one call.
APPLY_SLICE: Final = 128


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
    running: Running | None = None


def work_items(record: BatchRecord) -> list[WorkItem]:
    """The work items of a batch, numbered.

    Each has some groups of one shard: as many as a worker can well hold the needed columns of. If the workers' part of
    the chain has to see the whole batch, there is one item per shard, over all groups.
    """
    chain = cut_chain(record.chain, record.late)[0]
    token_bytes = sum(
        KNOWN_COLUMNS[name].itemsize if name in KNOWN_COLUMNS else EXTRA_BYTES for name in chain.needs
    )
    parts: list[tuple[int, list[Pointer]]] = []
    for shard in sorted({pointer.shard for pointer in record.groups}):
        if chain.scope == "batch":
            parts.append((shard, record.groups))
        else:
            parts += [(shard, part) for part in _parts(record.in_shard(shard), token_bytes)]
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


def _parts(pointers: list[Pointer], token_bytes: int) -> list[list[Pointer]]:
    """Consecutive groups within the bounds of an item together; a larger group is a part of its own."""
    parts: list[list[Pointer]] = []
    trajectories = size = 0
    for pointer in pointers:
        trajectories += pointer.trajectories
        size += pointer.tokens * token_bytes
        if not parts or trajectories > ITEM_TRAJECTORIES or size > ITEM_BYTES:
            parts.append([])
            trajectories, size = pointer.trajectories, pointer.tokens * token_bytes
        parts[-1].append(pointer)
    return parts


def apply(run: Run, record: BatchRecord, fence: str) -> None:
    """Make a named batch known to the shards: who owns its groups, counters, work. Repeating it changes nothing."""
    items = work_items(record)
    for shard in run.shards:
        groups = [f"{pointer.entry} {pointer.trajectories}" for pointer in record.in_shard(shard.index)]
        work = [item.model_dump_json() for item in items if item.shard == shard.index]
        for start in range(0, len(groups), APPLY_SLICE):
            part = groups[start : start + APPLY_SLICE]
            is_last = start + APPLY_SLICE >= len(groups)
            head = [fence, record.id, " ".join(ENDINGS), len(part)]
            shard.call("apply_batch", [*head, *part, *(work if is_last else ())])
