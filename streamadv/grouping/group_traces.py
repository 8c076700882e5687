"""Traces of groups on their way into the groups log. Their contexts travel in the member tables of packets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .. import tracing
from ..metrics.instruments import EVALUATED, KEPT
from ..run import Run, Shard
from ..run.consumer import Entry
from ..run.packets import StreamPacket
from ..store.replies import replies_of
from ..trajectory.member_table import trace_of


def first_trace(tables: Iterable[bytes | memoryview]) -> bytes | None:
    """The trace context of a group: that of the first of its packets that has one."""
    return next((context for table in tables if (context := trace_of(table)) is not None), None)


def traces_of_entries(packets: Iterable[tuple[Entry, StreamPacket]]) -> dict[str, bytes]:
    """Trace contexts of the groups of packets in a stream, by id; {} where no traces are recorded."""
    contexts: dict[str, bytes] = {}
    for entry, packet in packets if tracing.is_on() else ():
        if (context := trace_of(entry.fields[b"table"])) is not None:
            contexts.setdefault(packet.group_id, context)
    return contexts


def traces_of_open(shard: Shard, group_ids: Sequence[str]) -> dict[str, bytes]:
    """Trace contexts of open groups, by id; {}, and nothing is read, where no traces are recorded."""
    if not tracing.is_on():
        return {}
    pipe = shard.connection.scripts.pipeline(transaction=False)
    for group_id in group_ids:
        pipe.hgetall(shard.keys.group(group_id))
    traces: dict[str, bytes] = {}
    for group_id, fields in zip(group_ids, replies_of(pipe) if group_ids else (), strict=True):
        # A packet's field ends with its member table, after a blank line: lua/lib/complete.lua.
        tables = [
            value.partition(b"\n\n")[2] for name, value in (fields or {}).items() if b"}:payload:" in name
        ]
        context = first_trace(tables)
        if context is not None:
            traces[group_id] = context
    return traces


def record_grouped(run: Run, traces: Mapping[str, bytes], since: int, outcomes: Mapping[str, str]) -> None:
    """A span in each trace; one that is marked as failed where the group is dropped. outcomes: of groups that ended."""
    failed = {
        group_id: f"dropped: {outcome}"
        for group_id, outcome in outcomes.items()
        if outcome not in (*KEPT, EVALUATED)
    }
    tracing.record(tracing.GROUP, run.name, traces, since, failed=failed, outcomes=outcomes)


def record_ended(run: Run, traces: Mapping[str, bytes], since: int, ended: Sequence[tuple[str, str]]) -> None:
    """`record_grouped` for those of the groups that have ended: ids and outcomes."""
    outcomes = dict(ended)
    of_ended = {group_id: context for group_id, context in traces.items() if group_id in outcomes}
    record_grouped(run, of_ended, since, outcomes)
