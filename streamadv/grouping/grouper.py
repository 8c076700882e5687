"""The grouper: takes packets from the rollouts stream into their groups and ends groups.

A group ends when it has enough usable, scored members, when nothing more can come (`lua/lib/complete.lua`), or at its
deadline (`housekeeping.py`). Groupers keep no state of their own: start any number, kill any of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from .. import clock, metrics, tracing
from ..run import Run
from ..run.consumer import GROUPER, Consumer, Entry
from ..run.malformed import reject
from ..run.packets import PACKET_FIELDS, packet_problem, whole_group
from ..store.retry import RETRYABLE, Outage
from .group_traces import record_grouped, traces_of_entries
from .housekeeping import Housekeeping, apply_scores, count_ended

STAGE: Final = GROUPER
LEASE_S: Final = 5.0
#: Packets of one read, and members of one script call: some 2 ms, in which the server does nothing else.
TAKE_COUNT: Final = 64
TAKE_MEMBERS: Final = 512
#: Pause after a read that emptied the stream, so that the next read shares its two round trips among more packets.
GATHER_S: Final = 0.010
HOUSEKEEPING_S: Final = 1.0
#: How often the list of scores is looked at, while packets come.
SCORES_S: Final = 0.05


def run_grouper(
    run: Run,
    stop: threading.Event,
    *,
    lease_s: float = LEASE_S,
    name: str | None = None,
) -> None:
    """Group until `stop` is set. Waits while the server is away."""
    consumer = Consumer(run, STAGE, lambda keys: keys.rollouts, lease_s=lease_s, stop=stop, name=name)
    outage = Outage(STAGE, sleep=stop.wait)
    housekeeping, is_behind = Housekeeping(run), False
    housekeeping_due = scores_due = clock.now()
    while not stop.is_set():
        try:
            entries = consumer.read(TAKE_COUNT, wait=not is_behind)
            if entries:
                with metrics.timed(STAGE, "take"):
                    take(run, entries)
                consumer.done(entries)
                if len(entries) < TAKE_COUNT:
                    stop.wait(GATHER_S)
            if stop.is_set():  # the rest is for other groupers: a server that hangs would hold up the end
                break
            if clock.now() >= housekeeping_due:
                is_behind = not housekeeping.round()
                housekeeping_due = clock.now() + (0 if is_behind else HOUSEKEEPING_S)
            elif clock.now() >= scores_due:
                for shard in run.shards:
                    apply_scores(run, shard)
                scores_due = clock.now() + SCORES_S
        except RETRYABLE as error:
            consumer.start_over()
            outage.pause_after(error)
        else:
            outage.over()
    consumer.give_back()


def take(run: Run, entries: Sequence[Entry]) -> list[str]:
    """Hand entries of one shard off into their groups. Returns the outcomes of groups that ended."""
    outcomes: list[str] = []
    start = members = 0
    for position, entry in enumerate(entries):
        count = entry.fields.get("members", b"").count(b"\n")
        if position > start and members + count > TAKE_MEMBERS:
            outcomes += _take(run, entries[start:position])
            start, members = position, 0
        members += count
    return outcomes + _take(run, entries[start:])


def _take(run: Run, entries: Sequence[Entry]) -> list[str]:
    shard, since = run.shard(entries[0].shard), tracing.now()
    packets: dict[str, list[Entry]] = {}  # by group id
    for entry in entries:
        problem = packet_problem(run, entry.shard, entry.fields)
        if problem is None:
            packets.setdefault(entry.fields["group_id"].decode(), []).append(entry)
        else:
            reject(shard, shard.keys.rollouts, entry.id, problem, entry.fields, stage=STAGE)
    if not packets:
        return []
    args: list[Any] = [STAGE, *run.manifest.policy_args]
    payloads, rewards = list[str](), list[bytes]()
    for group_id, of_group in packets.items():
        members = b"".join([entry.fields["members"] for entry in of_group])
        rewards.append(whole_group(members))
        args += [group_id, members.count(b"\n") if rewards[-1] else 0, len(of_group)]
        for entry in of_group:
            fields = [entry.fields[name] for name in PACKET_FIELDS]
            args += [entry.id, fields[4].count(b"\n"), *fields[1:]]
            payloads += filter(None, [fields[1].decode()])
    ids = list(packets)
    taken, *ended = shard.call("take", args, group_hashes=map(shard.keys.group, ids), payloads=payloads)
    metrics.entries(STAGE, "acked", taken)
    ended[3::4] = [
        rewards[number - 1] if told is None else told
        for number, told in zip(ended[::4], ended[3::4], strict=True)
    ]
    outcomes = {ids[number - 1]: outcome for number, outcome in count_ended(ended)}
    if traces := traces_of_entries(packets):
        record_grouped(run, traces, since, outcomes)
    return list(outcomes.values())
