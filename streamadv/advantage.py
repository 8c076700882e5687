"""The advantage stage: reads units of work of named batches, runs the chain, publishes the results.

Three threads overlap: a reader fetches references and the columns the chain needs, the main thread computes, a
publisher hands off. Results are pure functions of the unit of work, so a worker that was too slow just finds its
entry acked by somebody else and drops what it has.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from pydantic import ValidationError
from redis.exceptions import OutOfMemoryError
from torch import Tensor

from . import metrics
from .algorithms.chain import Chain, ChainResult, build_chain, run_chain
from .algorithms.packed import Level, PackedBatch, pack
from .batch_statistics import running_of
from .batches import ENTRY_ID, LoggedGroup, Unit, find_record, read_groups, work_units
from .columns import Array
from .connection import RETRYABLE, Backoff, retried
from .errors import BatchLostError, ChainError, SettingError, WireError
from .isolation import Death, isolate
from .keys import ShardKeys
from .malformed import reject_entry
from .payloads import decode_member, fetch_fields
from .results import batch_scope, counts_of
from .run import Run
from .schema import Status, first_problem
from .scripts import run_transaction, script_call
from .streams import ADVANTAGE, Consumer, Entry

logger = logging.getLogger(__name__)

STAGE: Final = ADVANTAGE
LEASE_S: Final = 15.0
#: Units of work read ahead of the one being computed.
PREFETCH: Final = 2

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A unit of work with everything its computation needs."""

    entry: Entry
    unit: Unit
    groups: list[LoggedGroup]
    columns: dict[str, list[dict[str, Array]]]  # group id -> columns of its members; {} when none are needed
    dead: dict[str, Death] = field(default_factory=dict)  # groups that could not be read or computed


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of one unit of work, ready to be written."""

    entry: Entry
    unit: Unit
    header: str
    results: dict[str, bytes]  # one number per trajectory, row or step: travels in the ready log
    outputs: dict[Any, Any]  # '<member>:<column>' -> one number per token: a hash of its own
    groups: Sequence[LoggedGroup] = field(default=(), compare=False)  # those of the results, for the metrics
    advantages: Array | None = field(default=None, compare=False)  # likewise; trainable tokens only
    is_weights: Array | None = field(default=None, compare=False)  # likewise
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


def run_worker(
    run: Run,
    stop: threading.Event,
    *,
    device: Device = "auto",
    lease_s: float = LEASE_S,
    name: str | None = None,
) -> None:
    """Compute until `stop` is set. Redis being away is waited out."""
    where = choose_device(device)
    consumer = Consumer(run, STAGE, lambda keys: keys.work, lease_s=lease_s, stop=stop, name=name)
    prepared: queue.Queue[Prepared | None] = queue.Queue(PREFETCH)
    computed: queue.Queue[Computed | None] = queue.Queue(PREFETCH)
    failures: list[BaseException] = []

    def guarded(target: Any, *args: Any) -> threading.Thread:
        def body() -> None:
            try:
                target(*args)
            except BaseException as error:  # handed to the main thread, which raises it
                failures.append(error)
                stop.set()

        thread = threading.Thread(target=body, name=f"streamadv-{target.__name__}", daemon=True)
        thread.start()
        return thread

    reader = guarded(_read, run, consumer, prepared, stop)
    publisher = guarded(_publish_all, run, consumer, computed, stop)
    while not stop.is_set():
        try:
            item = prepared.get(timeout=0.2)
        except queue.Empty:
            continue
        if item is None:
            break
        with metrics.timed(STAGE, "compute"):
            result = compute_safely(run, item, where)
        _put(computed, result, stop)
    stop.set()
    reader.join()
    while publisher.is_alive():  # it may have ended with the queue full
        with suppress(queue.Full):
            computed.put(None, timeout=0.2)
            break
    publisher.join()
    if failures:
        raise failures[0]
    consumer.give_back()


def choose_device(device: Device) -> torch.device:
    """`auto` is cuda when there is one. Raises SettingError when cuda is asked for and missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise SettingError(f"device is {device!r}, needs 'auto', 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is 'cuda', this machine has none: use 'auto' or 'cpu'")
    return torch.device(device)


def _read(
    run: Run, consumer: Consumer, prepared: queue.Queue[Prepared | None], stop: threading.Event
) -> None:
    backoff = Backoff(sleep=stop.wait)
    while not stop.is_set():
        for entry in consumer.read(1):
            try:
                with metrics.timed(STAGE, "read"):
                    item = prepare_or_discard(run, entry)
            except RETRYABLE as error:
                retried(STAGE, error, backoff)
                consumer.done([entry])  # still pending: asked for again with the own entries
                consumer.recover_own()
                backoff.wait()
                continue
            backoff.reset()
            if item is None:
                consumer.done([entry])
            else:
                _put(prepared, item, stop)


def prepare_or_discard(run: Run, entry: Entry) -> Prepared | None:
    """`prepare`; None when there is nothing to do, and the entry is finished.

    Its batch is gone (committed before the server forgot that), or it is no work at all.
    """
    try:
        return prepare(run, entry)
    except WireError as error:
        reject_entry(run, entry, run.keys.shard(entry.shard).work, str(error), STAGE)
        return None
    except BatchLostError as error:
        logger.warning("%s: %s", STAGE, error)
        keys = run.keys.shard(entry.shard)
        run.call("discard", [keys.void, keys.work], [STAGE, entry.id])
        return None


def prepare(run: Run, entry: Entry) -> Prepared:
    """Fetch what a unit of work needs: references, and of the columns only those its chain reads."""
    unit = _unit_of(run, entry)
    groups = read_groups(run, unit.groups)
    chain = worker_chain(unit)
    columns: dict[str, list[dict[str, Array]]] = {}
    dead: dict[str, Death] = {}
    if chain.needs:
        fields = fetch_fields(run, [member for group in groups for member in group.members], chain.needs)
        for group in groups:
            stored = list(itertools.islice(fields, len(group.members)))
            try:
                payloads = [
                    decode_member(member, each, chain.needs)
                    for member, each in zip(group.members, stored, strict=True)
                ]
                columns[group.group_id] = [payload.columns for payload in payloads]
            except WireError as error:
                dead[group.group_id] = Death("undecodable", str(error))
        read_groups(
            run, [p for p in unit.groups if p.group_id in dead]
        )  # committed meanwhile: nothing is wrong
    return Prepared(entry, unit, groups, columns, dead)


def _unit_of(run: Run, entry: Entry) -> Unit:
    """The unit of work of an entry. Raises WireError unless it is one of the batch whose id it bears.

    A record that the home slot has lost is no reason to doubt the work: the trainer remembers it.
    """
    if "work" not in entry.fields:
        raise WireError("work is missing")
    try:
        unit = Unit.model_validate_json(entry.fields["work"])
    except ValidationError as error:
        raise WireError(f"work: {first_problem(error)}") from error
    if {unit.shard, *(pointer.shard for pointer in unit.groups)} - set(range(len(run.keys.salts))):
        raise WireError("work: names a shard that the run does not have")
    if not all(ENTRY_ID.fullmatch(pointer.entry) for pointer in unit.groups):
        raise WireError("work: names an entry of the groups log by something else than its id")
    record = find_record(run, unit.k)
    if record is not None and (
        record.id != unit.batch or unit not in work_units(record, batch_scope(record))
    ):
        raise WireError(f"work: is none of batch {unit.k}")
    return unit


def worker_chain(unit: Unit) -> Chain:
    """The part of the chain that runs here: up to the first step needing a late column."""
    return build_chain(unit.chain).cut(set(unit.late))[0]


def compute_safely(run: Run, prepared: Prepared, device: torch.device) -> Computed:
    """`compute`, leaving out groups whose data break it (`isolation.py`). Raises ChainError if all do."""
    if not prepared.entry.reclaimed:
        try:
            return compute(prepared, device)
        except SettingError:
            raise
        except Exception as error:  # some group's data: found out below
            logger.warning(
                "%s: batch %s to be computed group by group: %s", STAGE, prepared.unit.batch, error
            )

    def compute_alone(group: LoggedGroup) -> object:
        return compute(replace(prepared, groups=[group]), device)

    living = [group for group in prepared.groups if group.group_id not in prepared.dead]
    dead = isolate(run, living, compute_alone)
    if len(dead) == len(living) > 1:
        raise ChainError(
            f"batch {prepared.unit.batch}: every group fails, as with {next(iter(dead.values())).detail}"
        )
    return compute(replace(prepared, dead=prepared.dead | dead), device)


def compute(prepared: Prepared, device: torch.device) -> Computed:
    """Run the worker's part of the chain. Pure: the same entry gives the same bits on any worker."""
    unit = prepared.unit
    chain = worker_chain(unit)
    groups = [group for group in prepared.groups if group.group_id not in prepared.dead]
    mine = [group for group in groups if group.shard == unit.shard]
    header: dict[str, Any] = {"unit": unit.number, "level": chain.level, "dead": prepared.dead}
    header["groups"] = [counts_of(group) for group in mine]
    if not groups:
        header |= {"columns": [], "metrics": {}, "weights": {}}
        return Computed(prepared.entry, unit, json.dumps(header), {}, {})
    columns = [each for group in groups for each in prepared.columns.get(group.group_id, ())]
    batch = pack([member for group in groups for member in group.members], columns or None, device)
    result = run_chain(chain, batch, unit.kl_coefficient, running_of(unit))
    own = torch.tensor([group.shard == unit.shard for group in groups], dtype=torch.bool, device=device)
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
        unit,
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


def publish(run: Run, computed: Computed) -> bool:
    """Hand results off; False when somebody else had finished the entry or the batch is gone."""
    keys: ShardKeys = run.keys.shard(computed.entry.shard)
    output = keys.output(secrets.token_hex(12)) if computed.outputs else keys.void
    names = [keys.void, keys.work, keys.ready, keys.applied, keys.ledger, output]
    payloads = [(output, dict(computed.outputs))] if computed.outputs else []
    call = script_call("publish", names, _publish_args(computed, {}))
    try:
        return bool(run_transaction(run.connection, payloads, call))
    except OutOfMemoryError:  # the HSET is refused above maxmemory; the script, which acks first, is not
        call = script_call("publish", names, _publish_args(computed, computed.outputs))
        return bool(run.connection.push.eval(*call.by_text))


def _publish_args(computed: Computed, inline: Mapping[Any, Any]) -> list[Any]:
    size = sum(len(value) for value in computed.outputs.values())
    args: list[Any] = [STAGE, computed.entry.id, computed.unit.batch, computed.header, size, len(inline)]
    return args + [part for pair in (*inline.items(), *computed.results.items()) for part in pair]


def _publish_all(
    run: Run, consumer: Consumer, computed: queue.Queue[Computed | None], stop: threading.Event
) -> None:
    while (item := computed.get()) is not None:
        backoff = Backoff()
        while True:
            try:
                with metrics.timed(STAGE, "publish"):
                    first = publish(run, item)
            except RETRYABLE as error:
                retried(STAGE, error, backoff)
                if stop.is_set():  # still pending: another worker takes it
                    return
                backoff.wait()
                continue
            metrics.entries(STAGE, "acked" if first else "duplicate")
            if first:
                _observe(item)
            break
        consumer.done([item.entry])


def _put(target: queue.Queue[Any], item: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            target.put(item, timeout=0.2)
            return
        except queue.Full:
            continue


def _bytes(values: Tensor) -> bytes:
    return values.cpu().numpy().tobytes()


def _observe(computed: Computed) -> None:
    groups = computed.groups
    members = [member for group in groups for member in group.members]
    stds = []
    for group in groups:
        rewards = [member.reward for member in group.members if member.reward is not None]
        if len(rewards) > 1:
            stds.append(float(np.std(rewards, ddof=1)))
    metrics.unit_computed(
        rewards=[member.reward for member in members if member.reward is not None],
        advantages=[] if computed.advantages is None else computed.advantages,
        response_tokens=[sum(member.row_trainable) for member in members],
        turns=[len(member.steps) for member in members if member.steps],
        truncated=[float(member.status is Status.TRUNCATED) for member in members],
        group_reward_std=stds,
        group_completion_s=[(group.logged_ms - group.opened_ms) / 1000 for group in groups],
        metrics=computed.metrics,
        is_weights=computed.is_weights,
    )
