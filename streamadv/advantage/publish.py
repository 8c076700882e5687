"""A worker's hand-off: one script writes the results of one work item into the results log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from .. import doors, metrics, tracing
from ..run import Run
from ..run.consumer import ADVANTAGE
from ..store.calls import run_transaction
from ..store.scripts import script_call
from .compute import ComputedItem

#: Reply of `publish.lua` when the output was gone.
LOST: Final = -1


def publish(run: Run, computed: ComputedItem) -> bool:
    """Hand results off. False if another worker has finished the entry, or the batch is gone."""
    while (published := _publish(run, computed)) == LOST:
        pass
    if published:
        _trace(run, computed)
    return bool(published)


def _publish(run: Run, computed: ComputedItem) -> Any:
    """One attempt; LOST if its output was gone before the script ran, because the server stood still."""
    keys = run.keys.shard(computed.prepared.entry.shard)
    output = keys.output(doors.random_bytes(12).hex()) if computed.outputs else keys.void
    payloads = [(output, dict(computed.outputs))] if computed.outputs else []
    call = script_call("publish", keys, _arguments(computed, {}), output=output)
    try:
        return run_transaction(run.connection, payloads, call)
    except OutOfMemoryError:  # the HSET is refused above maxmemory; the script, which acks first, is not
        inline = {name: bytes(column) for name, column in computed.outputs.items()}
        call = script_call("publish", keys, _arguments(computed, inline), output=output)
        return run.connection.push.eval(*call.by_text)


def _arguments(computed: ComputedItem, inline: Mapping[Any, Any]) -> list[Any]:
    """ARGV of `publish.lua`. inline: outputs that the script writes itself."""
    output_bytes = sum(column.nbytes for column in computed.outputs.values())
    payload_bytes = sum(packet.size for packet in computed.published.packets)
    return [
        *(ADVANTAGE, computed.prepared.entry.id, computed.prepared.item.batch, computed.header),
        *(output_bytes, payload_bytes, len(inline)),
        *(part for pair in (*inline.items(), *computed.results.items()) for part in pair),
    ]


def _trace(run: Run, computed: ComputedItem) -> None:
    """A span in the trace of the batch, and of each group of the item; it has failed where a group is dead."""
    prepared = computed.prepared
    item, since = prepared.item, prepared.since
    failed = {group_id: f"dead: {death.reason}" for group_id, death in prepared.dead.items()}
    traces = tracing.traces_of([group for group in prepared.groups if group.shard == item.shard])
    tracing.record_batch(tracing.COMPUTE, run.name, item.k, since, item.trace)
    tracing.record(tracing.COMPUTE, run.name, traces, since, k=item.k, batch=item.trace, failed=failed)


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
