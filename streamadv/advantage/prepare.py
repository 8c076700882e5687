"""Reads an entry of the work stream and fetches everything that its computation needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from .. import tracing
from ..algorithms.chain import cut_chain
from ..batch.ends import read_exclusions
from ..batch.record import Death, WorkItem, find_record, read_records, work_items
from ..errors import BatchLostError, SettingError, WireError
from ..grouping.groups_log import LoggedGroup, Pointer, read_groups
from ..messages import first_problem, log_fields
from ..run import Run
from ..run.consumer import ADVANTAGE, Entry
from ..run.dead_letters import reject
from ..run.kept import share_kept
from ..run.packets import fetch_columns
from ..store.keys import ENTRY_ID
from ..trajectory.columns import Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """A work item with everything its computation needs."""

    entry: Entry
    item: WorkItem
    groups: list[LoggedGroup]  # without dead letters
    columns: dict[str, dict[str, Array]]  # payload key -> columns of the packet; {} if the chain needs none
    dead: dict[str, Death] = field(default_factory=dict)  # groups that could not be read or computed
    since: int = 0  # when its preparation began, as `tracing.now`
    share_kept: float = 0.0  # of the groups that are trained on

    @property
    def living(self) -> list[LoggedGroup]:
        return [group for group in self.groups if group.group_id not in self.dead]


def check_chains(run: Run) -> None:
    """Raise SettingError if a batch is named whose chain this process cannot build."""
    for record in read_records(run).values():
        try:
            cut_chain(record.chain, record.late)
        except SettingError as error:
            raise SettingError(f"batch {record.k} of run {run.name}: {error}") from error


def prepare(run: Run, entry: Entry) -> PreparedItem | None:
    """Fetch what a work item needs: its groups, and of their columns those that its chain reads.

    None after finishing an entry that asks for nothing: its batch is gone (undone, or committed before the server
    forgot that), or it is no work item at all. Raises SettingError for a chain that this process cannot build.
    """
    since = tracing.now()
    columns: dict[str, dict[str, Array]] = {}
    dead: dict[str, Death] = {}
    try:
        item = _work_item_of(run, entry)
        groups = _living_groups(run, item, item.groups)
        needs = cut_chain(item.chain, item.late)[0].needs
        if needs:
            group_ids = [group.group_id for group in groups for _ in group.packets]
            packets = [packet for group in groups for packet in group.packets]
            for group_id, fetched in zip(group_ids, fetch_columns(run, packets, needs), strict=True):
                columns[fetched.packet.key] = fetched.columns
                problem = fetched.problem
                if problem is None and (missing := [name for name in needs if name not in fetched.columns]):
                    problem = f"column {missing[0]} is missing in the payload"
                if problem is not None:
                    first, *others = fetched.packet.members.table["index"].tolist()
                    name = f"rollouts {first} to {others[-1]}" if others else f"rollout {first}"
                    dead.setdefault(group_id, Death("undecodable", f"{name}: {problem}"))
        if dead:  # a batch that was committed meanwhile has no payloads any more, and nothing is wrong
            _living_groups(run, item, [pointer for pointer in item.groups if pointer.group_id in dead])
        return PreparedItem(entry, item, groups, columns, dead, since, share_kept(run.manifest, "trained"))
    except WireError as error:
        shard = run.shards[entry.shard]
        reject(shard, shard.keys.work, entry.id, str(error), entry.fields, stage=ADVANTAGE)
    except BatchLostError as error:
        fields = log_fields("work_discarded", run=run.name, role=ADVANTAGE)
        logger.warning("%s: %s", ADVANTAGE, error, extra=fields)
        run.shards[entry.shard].call("discard", [ADVANTAGE, entry.id, entry.fields[b"work"]])
    return None


def _living_groups(run: Run, item: WorkItem, pointers: Sequence[Pointer]) -> list[LoggedGroup]:
    """The groups pointed at, without dead letters of the batch. Raises BatchLostError if another one is gone.

    A trainer that repeats what a server has lost writes dead letters before the batch is computed again.
    """
    try:
        return read_groups(run, pointers)
    except BatchLostError:
        dead = read_exclusions(run, item.batch, pointers).dead
        return read_groups(run, [pointer for pointer in pointers if pointer.group_id not in dead])


def _work_item_of(run: Run, entry: Entry) -> WorkItem:
    """The work item of an entry. Raises WireError unless it is one of the batch whose id it bears.

    If the home shard has no record of the batch, or that of another naming, the item is taken as it is, because after
    data loss the trainer writes the record again. BatchLostError if the item's shard does not know the batch: it was
    committed, or undone and perhaps named again.
    """
    if b"work" not in entry.fields:
        raise WireError("work is missing")
    try:
        item = WorkItem.model_validate_json(entry.fields[b"work"])
    except ValidationError as error:
        raise WireError(f"work: {first_problem(error)}") from error
    if {item.shard, *(pointer.shard for pointer in item.groups)} - set(range(len(run.keys.salts))):
        raise WireError("work: names a shard that the run does not have")
    if not all(ENTRY_ID.fullmatch(pointer.entry) for pointer in item.groups):
        raise WireError("work: names an entry of the groups log by something else than its id")
    record = find_record(run, item.k)
    if record is None or record.id != item.batch:
        if item.batch.partition("-")[0] != str(item.k):
            raise WireError(f"work: is none of batch {item.k}")
        if not run.connection.scripts.hexists(run.keys.shards[entry.shard].applied, item.batch):
            raise BatchLostError(f"batch {item.batch} was undone or committed: its work is discarded")
    # Checked before a chain is built that nobody of the run has asked for.
    elif record.chain != item.chain or item not in work_items(record):
        raise WireError(f"work: is none of batch {item.k}")
    return item
