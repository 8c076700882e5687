"""The grouper: takes packets from the rollouts stream into their groups and ends groups.

A group ends when it has enough usable, scored members, when nothing more can come (`lua/lib/complete.lua`), or at its
deadline (`housekeeping.py`). Groupers keep no state of their own: start any number, kill any of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from .. import clock, metrics, tracing
from ..errors import WireError
from ..run import Run, Shard
from ..run.consumer import GROUPER, Consumer, Entry
from ..run.dead_letters import reject
from ..run.packets import PACKET_FIELDS, StreamPacket, read_packet, rewards_of_whole
from ..store.retry import Outage
from .housekeeping import Housekeeping, apply_scores, note_ended

LEASE_S: Final = 5.0
#: Packets of one read, and members of one script call: some 2 ms, in which the server does nothing else.
TAKE_COUNT: Final = 64
TAKE_MEMBERS: Final = 512
#: Pause after a read that emptied the stream, so that the next read shares its two round trips among more packets.
GATHER_S: Final = 0.010
HOUSEKEEPING_S: Final = 1.0
#: Seconds between two reads of the list of scores while packets come: a read costs as much as a group.
SCORES_S: Final = 0.2

_Arrived = tuple[Entry, StreamPacket]


def run_grouper(
    run: Run,
    stop: threading.Event,
    *,
    lease_s: float = LEASE_S,
    name: str | None = None,
) -> None:
    """Group until `stop` is set. Waits while the server is away."""
    consumer = Consumer(run, GROUPER, lambda keys: keys.rollouts, lease_s=lease_s, stop=stop, name=name)
    outage = Outage(GROUPER, run.name, sleep=stop.wait)
    housekeeping, is_behind = Housekeeping(run), False
    housekeeping_due = scores_due = clock.now()
    while not stop.is_set():
        with outage.attempt(consumer.start_over):
            # First of all: it says what is kept before any group ends.
            if clock.now() >= housekeeping_due:
                is_behind = not housekeeping.round()
                housekeeping_due = clock.now() + (0 if is_behind else HOUSEKEEPING_S)
            elif clock.now() >= scores_due:
                for shard in run.shards:
                    apply_scores(run, shard)
                scores_due = clock.now() + SCORES_S
            entries = consumer.read(TAKE_COUNT, wait=not is_behind)
            if entries:
                with metrics.timed(GROUPER, "take"):
                    take(run, entries)
                consumer.done(entries)
                if len(entries) < TAKE_COUNT:
                    stop.wait(GATHER_S)
    consumer.give_back()


def take(run: Run, entries: Sequence[Entry]) -> list[str]:
    """Hand entries of one shard off into their groups. Returns the outcomes of groups that ended."""
    shard = run.shards[entries[0].shard]
    outcomes, page, members = list[str](), list[_Arrived](), 0
    for entry in entries:
        try:
            packet = read_packet(run, entry.shard, entry.fields)
        except WireError as error:
            reject(shard, shard.keys.rollouts, entry.id, str(error), entry.fields, stage=GROUPER)
            continue
        if page and members + len(packet.members) > TAKE_MEMBERS:
            outcomes += _take(run, shard, page)
            page, members = [], 0
        page.append((entry, packet))
        members += len(packet.members)
    return outcomes + (_take(run, shard, page) if page else [])


def _take(run: Run, shard: Shard, packets: Sequence[_Arrived]) -> list[str]:
    since = tracing.now()
    groups: dict[str, list[_Arrived]] = {}
    for arrived in packets:
        groups.setdefault(arrived[1].group_id, []).append(arrived)
    args: list[Any] = [GROUPER, *run.manifest.policy_args]
    payloads, rewards = list[str](), list[list[float]]()
    for group_id, of_group in groups.items():
        members = [member for _, packet in of_group for member in packet.members]
        rewards.append(rewards_of_whole(members))
        args += [group_id, len(members) if rewards[-1] else 0, len(of_group)]
        for entry, packet in of_group:
            args += [entry.id, len(packet.members), *[entry.fields[name] for name in PACKET_FIELDS[1:]]]
            if packet.payload:
                payloads.append(packet.payload)
    ids = list(groups)
    taken, *ended = shard.call("take", args, group_hashes=map(shard.keys.group, ids), payloads=payloads)
    metrics.entries(GROUPER, "acked", taken)
    return list(note_ended(run, since, ended, ids, rewards).values())
