"""The record of batch k: the ordered groups that one policy update consumes, written once, immutable until commit.

Rank 0 of the trainer queue names a batch by writing its record into the home shard (`name_batch`). The steps that
follow in the shards (`apply`) are idempotent by the batch's id and repeated until every shard has them.
`NamingSettings` are the settings by which the trainer queue names batches, for the whole job.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ..algorithms.chain import cut_chain
from ..errors import WireError
from ..grouping.groups_log import Pointer
from ..messages import brief, first_problem
from ..run import Run
from ..run.dead_letters import reject
from ..run.run import ENDINGS
from ..store.keys import ENTRY_ID
from ..trajectory.columns import KNOWN_COLUMNS


@dataclass(frozen=True, slots=True)
class NamingSettings:
    """Settings that rank 0 names batches by, and writes into the run."""

    batch_groups: int
    min_groups: int  # enough to name a batch
    prefetch: int
    max_staleness: int | None
    drop_after: int | None
    keep_rolled_back: bool
    needs: frozenset[str]  # columns producers must have pushed
    chain: Mapping[str, Any]
    late: tuple[str, ...]
    tokens_per_micro_batch: int | None
    keep_groups: bool = False
    quotas: Mapping[str, float] = field(default_factory=dict)  # data source -> weight of its share of a batch


#: Characters of the ids of a batch that each of its kept groups has, at most.
KEPT_ID_CHARS: Final = 4096


class Death(NamedTuple):
    """Why a group becomes a dead letter, or a trajectory is left out."""

    reason: str
    detail: str


#: Moments of rewards as JSON: their fields, or source -> fields where a chain works by source.
Running = dict[str, float] | dict[str, dict[str, float]]


class BatchRecord(BaseModel):
    """Everything that is decided about a batch, once."""

    model_config = ConfigDict(frozen=True)

    k: int  # trained at version k
    id: str
    epoch: int
    groups: list[Pointer]  # sorted by group_id
    chain: dict[str, Any]  # ChainConfig
    late: list[str] = []  # columns the trainer supplies: the chain is cut before the first step needing one
    tokens_per_micro_batch: int | None = None  # rows above it are not delivered
    keep_groups: bool = False  # rows of a group stay in one micro-batch where they fit
    kl_coefficient: float | None = None
    running: Running | None = None  # moments of all rewards up to and with this batch
    running_before: Running | None = None  # those it was named with

    def for_kept(self, metrics: Mapping[str, float]) -> str:
        """As JSON beside each of its groups that is kept: how many groups it has, and their ids if those are short.

        metrics: some of `Batch.metrics`.
        """
        ids = [pointer.group_id for pointer in self.groups]
        named = {"group_ids": ids} if sum(map(len, ids)) <= KEPT_ID_CHARS else {}
        fields = self.model_dump(mode="json", exclude={"groups"})
        return json.dumps({**fields, "num_groups": len(ids), "metrics": dict(metrics), **named})

    def is_for(self, settings: NamingSettings) -> bool:
        """Whether the chain that computes it is the trainer's."""
        return self.chain == settings.chain and tuple(self.late) == settings.late

    def in_shard(self, shard: int) -> list[Pointer]:
        return [pointer for pointer in self.groups if pointer.shard == shard]


def name_batch(run: Run, record: BatchRecord, fence: str) -> bool:
    """Write the record; False when batch k has one already. Raises EpochFencedError.

    fence: of the caller, whose epoch is above that of a record it writes again for a server that lost it.
    """
    running = "" if record.running is None else json.dumps(record.running)
    args: list[Any] = [fence, record.k, record.model_dump_json(), running]
    return bool(run.home.call("name_batch", args))


def read_records(run: Run, leads: bool = False) -> dict[int, BatchRecord]:
    """All recorded batches by k: named and not yet committed to the end.

    A field that holds no record is skipped. leads: on rank 0, which removes such a field.
    """
    stored: Any = run.connection.scripts.hgetall(run.keys.home.batches)
    records = {}
    for k, text in sorted(stored.items()):
        try:
            records[int(k)] = _parse_record(run, k, text)
        except WireError as error:
            if leads:
                reject(run.home, run.home.keys.batches, k, str(error), {b"record": text})
    return records


def find_record(run: Run, k: int) -> BatchRecord | None:
    """The record of batch k, or None."""
    text: Any = run.connection.scripts.hget(run.keys.home.batches, str(k))
    try:
        return None if text is None else _parse_record(run, str(k).encode(), text)
    except WireError:
        return None


def _parse_record(run: Run, k: bytes, text: bytes) -> BatchRecord:
    try:
        record = BatchRecord.model_validate_json(text)
    except ValidationError as error:
        raise WireError(f"record: {first_problem(error)}") from error
    if str(record.k).encode() != k:
        raise WireError(f"record: is of batch {record.k}")
    for pointer in record.groups:
        if not (0 <= pointer.shard < len(run.keys.salts) and ENTRY_ID.fullmatch(pointer.entry)):
            raise WireError(f"record: group {brief(pointer.group_id)} has no place in the run")
    return record


# Work items, for the advantage workers

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
            trajectories, size = math.inf, 0  # of the part that is being filled
            for pointer in record.in_shard(shard):
                trajectories += pointer.trajectories
                size += pointer.tokens * token_bytes
                if trajectories > ITEM_TRAJECTORIES or size > ITEM_BYTES:
                    # A larger group is a part of its own.
                    parts.append((shard, []))
                    trajectories, size = pointer.trajectories, pointer.tokens * token_bytes
                parts[-1][1].append(pointer)
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
