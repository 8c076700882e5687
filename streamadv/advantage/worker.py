"""The advantage stage: reads work items of named batches, computes the chain, publishes the results.

Results are pure functions of the work item: a worker that was too slow finds its entry finished by another worker and
drops its own results.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from .. import clock, doors, metrics, tracing
from ..algorithms.device import Device, choose_device
from ..errors import ChainError, SettingError
from ..messages import log_fields, one_line
from ..run import Run
from ..run.consumer import ADVANTAGE, Consumer, Entry
from ..run.hangs import Stopped
from ..store.reasons import Reason
from ..store.retry import RETRYABLE, Outage
from ..store.scripts import run_transaction, script_call
from ..store.waiting import Blocked, Wait
from .compute import ComputedItem, compute_safely
from .prepare import PreparedItem, check_chains, prepare

logger = logging.getLogger(__name__)

LEASE_S: Final = 15.0
#: Seconds for shutting down, from the end of the last computation: for entries in hand, and for the server to answer.
SHUTDOWN_S: Final = 8.0
#: Seconds after which a step of the shutdown logs what it waits for.
REPORT_AFTER_S: Final = 2.0
#: Seconds between two checks whether to stop.
POLL_S: Final = 0.2
UNKNOWN_CHAIN: Final = "waiting for a worker that knows the chain of a batch"
FAILING_CHAIN: Final = "waiting for a chain that does not fail"
#: Characters of a chain's error that the run keeps.
ERROR_CHARS: Final = 400
#: Work items read ahead of the one being computed, and results waiting to be published.
PREFETCH: Final = 2
#: Reply of `publish.lua` when the output was gone.
LOST: Final = -1


def run_worker(
    run: Run,
    stop: threading.Event,
    *,
    device: Device = "auto",
    lease_s: float = LEASE_S,
    name: str | None = None,
) -> None:
    """Compute work items until `stop` is set. A server that does not answer is waited for.

    device: where the chain runs. lease_s: seconds after which other workers take over an entry that this one has not
    finished. name: of the consumer, unique; by default host, process id and a random part. A chain that fails on every
    group is tried again, and the run says why it fails. Raises SettingError if this process cannot build the chain of a
    batch that is named.
    """
    Worker(run, stop, device=device, lease_s=lease_s, name=name).run()


class Worker:
    """Three threads with a queue between each two: a reader, the computing main thread, and a publisher.

    Invariant: an entry that was read is in the consumer's hand until its results were published, it was finished
    without any, or it was given back.
    """

    def __init__(
        self, run: Run, stop: threading.Event, *, device: Device, lease_s: float, name: str | None
    ) -> None:
        self._run = run
        self._stop = stop
        self._device = choose_device(device)
        self._consumer = Consumer(
            run, ADVANTAGE, lambda keys: keys.work, lease_s=lease_s, stop=stop, name=name
        )
        self._prepared: queue.Queue[PreparedItem] = doors.Queue(PREFETCH)
        self._computed: queue.Queue[ComputedItem | None] = doors.Queue(PREFETCH)  # None: no more will come
        self._failures: list[BaseException] = []  # of the reader and the publisher

    def run(self) -> None:
        """Compute until `stop` is set or a thread fails; then shut down. Raises the thread's failure."""
        reader = self._start(self._read, "streamadv-read")
        publisher = self._start(self._publish, "streamadv-publish")
        self._compute()
        self._shut_down(reader, publisher)

    def _start(self, target: Callable[[], None], name: str) -> threading.Thread:
        def body() -> None:
            try:
                target()
            except BaseException as error:  # handed to the main thread, which raises it
                self._failures.append(error)
                self._stop.set()

        thread = doors.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def _waiting(self, what: str) -> Wait:
        blocked = Blocked(ADVANTAGE, what, self._run.name, first_s=0.0)
        return Wait(blocked, base=1.0, cap=10.0, sleep=self._stop.wait)

    # Read

    def _read(self) -> None:
        outage = Outage(ADVANTAGE, self._run.name, sleep=self._stop.wait)
        unknown = self._waiting(UNKNOWN_CHAIN)
        is_checked = False
        while not self._stop.is_set():
            try:
                if not is_checked:
                    check_chains(self._run)
                    is_checked = True
                entries = self._consumer.read(1)
            except RETRYABLE as error:
                outage.pause_after(error)
                continue
            for entry in entries:
                self._read_entry(entry, outage, unknown)

    def _read_entry(self, entry: Entry, outage: Outage, unknown: Wait) -> None:
        """Prepare one entry for the computation."""
        try:
            with metrics.timed(ADVANTAGE, "read"):
                prepared = prepare(self._run, entry)
        except RETRYABLE as error:
            self._consumer.done([entry])  # still pending: read again with this consumer's pending entries
            self._consumer.reread_pending()
            outage.pause_after(error)
            return
        except SettingError as error:  # this process does not know the chain, another worker may
            self._consumer.release([entry])
            unknown.because(Reason("unknown_estimator", str(error)))
            unknown.pause()
            return
        outage.over()
        unknown.over()
        if prepared is None:
            self._consumer.done([entry])
        else:
            self._put(self._prepared, prepared)

    # Compute

    def _compute(self) -> None:
        outage = Outage(ADVANTAGE, self._run.name, sleep=self._stop.wait)
        failing = self._waiting(FAILING_CHAIN)
        while not self._stop.is_set():
            try:
                prepared = self._prepared.get(timeout=POLL_S)
            except queue.Empty:
                continue
            try:
                with metrics.timed(ADVANTAGE, "compute"):
                    computed = compute_safely(self._run, prepared, self._device, self._stop)
            except Stopped as error:  # still in hand: the shutdown gives it back
                logger.warning("%s", error, extra=self._log_fields("computation_stopped"))
                return
            except (ChainError, SettingError) as error:  # not of the data: no group is dead for it
                entry, text = prepared.entry, one_line(str(error)[:ERROR_CHARS])
                # Whoever reads it next tries again; until then the run says why it waits.
                with suppress(*RETRYABLE):  # then it is pending, and taken up again when its lease is over
                    self._consumer.release([entry])
                    note = [entry.id, prepared.item.batch, text]
                    self._run.shards[entry.shard].call("note_failure", note)
                failing.because(Reason("failing_chain", str(error)))
                failing.pause()
                continue
            except RETRYABLE as error:  # tries at a suspect group are counted on the server
                self._consumer.done([prepared.entry])  # still pending: taken up again when its lease is over
                outage.pause_after(error)
                continue
            outage.over()
            failing.over()
            self._put(self._computed, computed)

    def _put(self, target: queue.Queue[Any], item: PreparedItem | ComputedItem) -> None:
        """Put `item` when there is room. Once `stop` is set it stays in hand."""
        while not self._stop.is_set():
            with suppress(queue.Full):
                target.put(item, timeout=POLL_S)
                return

    # Publish

    def _publish(self) -> None:
        while (computed := self._computed.get()) is not None:
            outage = Outage(ADVANTAGE, self._run.name, sleep=self._stop.wait)
            is_first: bool | None = None
            while is_first is None:
                with outage.attempt(), metrics.timed(ADVANTAGE, "publish"):
                    is_first = publish(self._run, computed)
                if is_first is None and self._stop.is_set():  # still pending: another worker takes it
                    return
            metrics.entries(ADVANTAGE, "acked" if is_first else "duplicate")
            if is_first:
                observe(computed)
            self._consumer.done([computed.prepared.entry])

    # Shut down

    def _shut_down(self, reader: threading.Thread, publisher: threading.Thread) -> None:
        """End in steps, within SHUTDOWN_S seconds. Raises the failure of a thread.

        If a step does not end in time, the server does not answer: what is in hand goes to another worker when its
        lease is over.
        """
        self._stop.set()
        text = "%s: stopping with %s"
        logger.info(text, ADVANTAGE, self._consumer.in_hand, extra=self._log_fields("stopping"))
        deadline = clock.now() + SHUTDOWN_S
        # 1. The reader ends its last read: the server may have delivered entries that are not in hand yet.
        ended = self._join(reader, "the server's reply to its last read", deadline)
        # 2. The publisher hands off what is computed. It may have ended with its queue full.
        with suppress(queue.Full):
            left_s = max(0.0, deadline - clock.now())
            self._computed.put(None, timeout=left_s if publisher.is_alive() else 0.0)
        ended = self._join(publisher, "the hand-off of its last results", deadline) and ended
        # 3. A thread's failure is the worker's.
        if self._failures:
            raise self._failures[0]
        # 4. Others get what was read and not computed at once, instead of after the lease.
        if ended:
            self._consumer.give_back()

    def _join(self, thread: threading.Thread, what: str, deadline: float) -> bool:
        """Wait for the thread's end until `deadline`, saying what for. False if it goes on."""
        fields = self._log_fields("stopping")
        thread.join(min(REPORT_AFTER_S, max(0.0, deadline - clock.now())))
        if thread.is_alive():
            text = "%s: is to end, and waits for %s; has %s"
            logger.warning(text, ADVANTAGE, what, self._consumer.in_hand, extra=fields)
            thread.join(max(0.0, deadline - clock.now()))
        if thread.is_alive():
            text = "%s: ends without %s: another worker takes over what it has: %s"
            logger.warning(text, ADVANTAGE, what, self._consumer.in_hand, extra=fields)
        return not thread.is_alive()

    def _log_fields(self, event: str) -> dict[str, object]:
        return log_fields(event, run=self._run.name, role=ADVANTAGE)


# Publishing


def publish(run: Run, computed: ComputedItem) -> bool:
    """Hand results off. False if another worker has finished the entry, or the batch is gone."""
    prepared, item, outputs = computed.prepared, computed.prepared.item, computed.outputs
    keys = run.keys.shards[prepared.entry.shard]
    output_bytes = sum(column.nbytes for column in outputs.values())
    payload_bytes = sum(packet.size for packet in computed.published.packets)
    head = [ADVANTAGE, prepared.entry.id, item.batch, computed.header, output_bytes, payload_bytes]
    results = [part for pair in computed.results.items() for part in pair]
    published: Any = LOST
    while published == LOST:  # the output was gone before the script ran, because the server stood still
        output = keys.output(doors.random_bytes(12).hex()) if outputs else keys.void
        payloads = [(output, dict(outputs))] if outputs else []
        call = script_call("publish", keys, [*head, 0, *results], output=output)
        try:
            published = run_transaction(run.connection, payloads, call)
        except OutOfMemoryError:  # the HSET is refused above maxmemory; the script, which acks first, is not
            inline = [part for name, column in outputs.items() for part in (name, bytes(column))]
            call = script_call("publish", keys, [*head, len(outputs), *inline, *results], output=output)
            published = run.connection.push.eval(call.script.text, *call.arguments)
    if published:  # spans of the item, which have failed where a group is dead
        groups = (group.group_id for group in prepared.groups if group.shard == item.shard)
        failed = {group_id: f"dead: {death.reason}" for group_id, death in prepared.dead.items()}
        tracing.record(
            tracing.COMPUTE, run.name, groups, prepared.since, k=item.k, batch=item.batch, failed=failed
        )
    return bool(published)


def observe(computed: ComputedItem) -> None:
    """Metrics of results that were handed off."""
    layout = computed.published
    table = layout.members.table
    metrics.work_item_computed(
        advantages=[] if computed.advantages is None else computed.advantages,
        response_tokens=table["trainable"],
        turns=table["steps"][table["steps"] > 0],
        truncated=layout.members.is_truncated,
        group_completion_s=[(group.logged_ms - group.opened_ms) / 1000 for group in layout.groups],
        is_weights=computed.is_weights,
    )
