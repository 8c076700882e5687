"""The advantage stage: reads work items of named batches, runs the chain, publishes the results.

Three threads overlap: a reader fetches references and the columns the chain needs, the main thread computes, a
publisher hands off. Results are pure functions of the work item, so a worker that was too slow just finds its
entry acked by somebody else and drops what it has.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
from pydantic import ValidationError
from redis.exceptions import OutOfMemoryError

from .. import metrics
from ..algorithms.chain import cut_chain
from ..algorithms.device import Device, choose_device
from ..batch.record import Death, find_record, read_records
from ..batch.work import WorkItem, work_items
from ..errors import BatchLostError, SettingError, WireError
from ..grouping.groups_log import ENTRY_ID, read_groups
from ..messages import first_problem
from ..run import Run
from ..run.consumer import ADVANTAGE, Consumer, Entry
from ..run.hangs import Stopped
from ..run.malformed import reject_entry
from ..run.payloads import decode_member, fetch_fields
from ..store.keys import ShardKeys
from ..store.reasons import Reason
from ..store.retry import RETRYABLE, Outage
from ..store.scripts import run_transaction, script_call
from ..store.waiting import Blocked, Wait
from ..trajectory.columns import Array
from ..trajectory.schema import Status
from .compute import Computed, Prepared, compute_safely, worker_chain

logger = logging.getLogger(__name__)

STAGE: Final = ADVANTAGE
LEASE_S: Final = 15.0
#: From the end of the last computation, for what is in hand and for the server to answer.
LEAVE_S: Final = 8.0
SAY_S: Final = 2.0
UNKNOWN_CHAIN: Final = "waiting for a worker that knows the chain of a batch"
#: Work items read ahead of the one being computed.
PREFETCH: Final = 2


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
    outage = Outage(STAGE, sleep=stop.wait)
    while not stop.is_set():
        try:
            item = prepared.get(timeout=0.2)
        except queue.Empty:
            continue
        if item is None:
            break
        try:
            with metrics.timed(STAGE, "compute"):
                result = compute_safely(run, item, where, stop)
        except Stopped as error:  # still in hand, so given back below
            logger.warning("%s", error)
            break
        except RETRYABLE as error:  # tries at a suspect group are counted on the server
            consumer.done([item.entry])  # still pending: taken up again when its lease is over
            outage.pause_after(error)
            continue
        outage.over()
        _put(computed, result, stop)
    stop.set()
    deadline = time.monotonic() + LEAVE_S
    ended = _join(reader, "the server's reply to its last read", deadline)
    with suppress(queue.Full):  # the publisher may have ended with the queue full
        computed.put(None, timeout=max(0.0, deadline - time.monotonic()) if publisher.is_alive() else 0.0)
    ended = _join(publisher, "the hand-off of its last results", deadline) and ended
    if failures:
        raise failures[0]
    if ended:  # else the server does not answer, and the leases end by themselves
        consumer.give_back()


def _join(thread: threading.Thread, what: str, deadline: float) -> bool:
    """Whether the thread ended in time; says what is waited for."""
    thread.join(min(SAY_S, max(0.0, deadline - time.monotonic())))
    if thread.is_alive():
        logger.warning("%s: is to end, and waits for %s", STAGE, what)
        thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive():
        logger.warning("%s: ends without %s: another worker does that work again", STAGE, what)
    return not thread.is_alive()


def _read(
    run: Run, consumer: Consumer, prepared: queue.Queue[Prepared | None], stop: threading.Event
) -> None:
    outage = Outage(STAGE, sleep=stop.wait)
    unknown = Wait(Blocked(STAGE, UNKNOWN_CHAIN, first_s=0.0), base=1.0, cap=10.0, sleep=stop.wait)
    checked = False
    while not stop.is_set():
        try:
            if not checked:
                check_chains(run)
                checked = True
            entries = consumer.read(1)
        except RETRYABLE as error:
            outage.pause_after(error)
            continue
        for entry in entries:
            try:
                with metrics.timed(STAGE, "read"):
                    item = prepare_or_discard(run, entry)
            except RETRYABLE as error:
                consumer.done([entry])  # still pending: asked for again with the own entries
                consumer.recover_own()
                outage.pause_after(error)
                continue
            except SettingError as error:  # no chain for this worker; another one may know it
                consumer.release([entry])
                unknown.because(Reason("unknown_estimator", str(error)))
                unknown.pause()
                continue
            outage.over()
            unknown.over()
            if item is None:
                consumer.done([entry])
            else:
                _put(prepared, item, stop)


def check_chains(run: Run) -> None:
    """Raise SettingError if a batch is named whose chain this process cannot build."""
    for record in read_records(run).values():
        try:
            cut_chain(record.chain, record.late)
        except SettingError as error:
            raise SettingError(f"batch {record.k} of run {run.name}: {error}") from error


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
    """Fetch what a work item needs: references, and of the columns only those its chain reads."""
    item = _work_item_of(run, entry)
    groups = read_groups(run, item.groups)
    chain = worker_chain(item)
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
            run, [p for p in item.groups if p.group_id in dead]
        )  # committed meanwhile: nothing is wrong
    return Prepared(entry, item, groups, columns, dead)


def _work_item_of(run: Run, entry: Entry) -> WorkItem:
    """The work item of an entry. Raises WireError unless it is one of the batch whose id it bears.

    A record that the home slot has lost is no reason to doubt the work: the trainer remembers it.
    """
    if "work" not in entry.fields:
        raise WireError("work is missing")
    try:
        item = WorkItem.model_validate_json(entry.fields["work"])
    except ValidationError as error:
        raise WireError(f"work: {first_problem(error)}") from error
    if {item.shard, *(pointer.shard for pointer in item.groups)} - set(range(len(run.keys.salts))):
        raise WireError("work: names a shard that the run does not have")
    if not all(ENTRY_ID.fullmatch(pointer.entry) for pointer in item.groups):
        raise WireError("work: names an entry of the groups log by something else than its id")
    record = find_record(run, item.k)
    if record is not None and (
        record.id != item.batch
        or record.chain != item.chain  # before a chain is built that nobody of the run has asked for
        or item not in work_items(record)
    ):
        raise WireError(f"work: is none of batch {item.k}")
    return item


def publish(run: Run, computed: Computed) -> bool:
    """Hand results off; False when somebody else had finished the entry or the batch is gone."""
    keys: ShardKeys = run.keys.shard(computed.entry.shard)
    output = keys.output(secrets.token_hex(12)) if computed.outputs else keys.void
    names = [keys.void, keys.work, keys.results, keys.applied, keys.ledger, keys.sizes, output]
    payloads = [(output, dict(computed.outputs))] if computed.outputs else []
    call = script_call("publish", names, _publish_args(computed, {}))
    try:
        return bool(run_transaction(run.connection, payloads, call))
    except OutOfMemoryError:  # the HSET is refused above maxmemory; the script, which acks first, is not
        call = script_call("publish", names, _publish_args(computed, computed.outputs))
        return bool(run.connection.push.eval(*call.by_text))


def _publish_args(computed: Computed, inline: Mapping[Any, Any]) -> list[Any]:
    size = sum(len(value) for value in computed.outputs.values())
    payloads = sum(group.size_bytes for group in computed.groups)
    args: list[Any] = [STAGE, computed.entry.id, computed.item.batch, computed.header, size, payloads]
    args.append(len(inline))
    return args + [part for pair in (*inline.items(), *computed.results.items()) for part in pair]


def _publish_all(
    run: Run, consumer: Consumer, computed: queue.Queue[Computed | None], stop: threading.Event
) -> None:
    while (item := computed.get()) is not None:
        outage = Outage(STAGE, sleep=stop.wait)
        while True:
            try:
                with metrics.timed(STAGE, "publish"):
                    first = publish(run, item)
            except RETRYABLE as error:
                pause_s = outage.delay_after(error)
                if stop.is_set():  # still pending: another worker takes it
                    return
                stop.wait(pause_s)
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
