"""One shard at one moment: its ledger, the lengths of its structures, and contradictions between them.

One transaction reads all of them, so `streamadv status --check` holds while workers run. What admission reserves for
slots of open groups is `lua/lib/slot_bytes.lua` in Python: the scripts decide admission, a test compares both.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from redis.exceptions import OutOfMemoryError

from ..run import Run
from ..run.consumer import ADVANTAGE, GROUPER
from ..run.run import COUNTERS, known_counters
from ..store.keys import ShardKeys
from ..store.replies import as_count, as_int, as_mapping, as_texts, or_nothing
from ..trajectory.packet import MAX_PACKET_MEMBERS
from .model import Ledger

#: A group's owner as `apply_batch` writes it: batch id, trajectories of the group.
OWNER: Final = re.compile(r"[0-9]+-[0-9a-f]{12} ([0-9]{1,5})")
#: Times that a shard is read again if the read was not atomic and its figures contradict each other.
READ_AGAIN: Final = 4
#: No server holds this many bytes: another program wrote the number, and admission waits for it to fall.
MOST_BYTES: Final = 1 << 50
#: Shards of one transaction, in which the server does nothing else.
SHARDS_AT_ONCE: Final = 16


class StreamName(NamedTuple):
    """A stream that has workers: its key and their consumer group."""

    key: str
    group: str


def streams_of(run: Run, keys: ShardKeys) -> dict[str, StreamName]:
    """The streams of a shard that have workers, by the name that status gives them."""
    scoring = {f"scoring:{name}": StreamName(keys.scoring(name), name) for name in run.manifest.scorers}
    return {
        "rollouts": StreamName(keys.rollouts, GROUPER),
        "work": StreamName(keys.work, ADVANTAGE),
        **scoring,
    }


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream and its consumer group. Entries are deleted as they are handed off."""

    length: int
    pending: int
    consumers: int
    oldest_age_s: float | None


@dataclass(frozen=True, slots=True)
class ShardState:
    """One shard at one moment."""

    counters: Counter[str]  # the ledger
    broken: list[str]  # counters of the ledger that are no numbers
    trainer: dict[str, str]  # the shard's copy of the trainer's settings
    groups_open: int
    groups_logged: int
    results: int
    in_flight: int  # trajectories of groups that a batch owns
    groups_remembered: int
    garbage: int
    reservation: Reservation
    streams: dict[str, StreamState]


def read_shards(run: Run) -> list[ShardState]:
    """Every shard of a run, each read atomically. A transaction has a page of them, in a cluster a single one.

    A server above its maxmemory refuses transactions, and the figures belong to several moments: then a shard is read
    again while they contradict each other.
    """
    keys, states = run.keys.shards, list[ShardState]()
    size = 1 if run.connection.is_cluster else SHARDS_AT_ONCE
    for first in range(0, len(keys), size):
        page = keys[first : first + size]
        try:
            states += _states(run, page, atomic=True)
        except OutOfMemoryError:
            for each in page:
                for _ in range(1 + READ_AGAIN):
                    (state,) = _states(run, [each], atomic=False)
                    if next(problems_of(state), None) is None:
                        break
                states.append(state)
    return states


def _states(run: Run, page: Sequence[ShardKeys], *, atomic: bool) -> list[ShardState]:
    # Plain commands: a user who may only look has no right to run scripts.
    pipe: Any = run.connection.scripts.pipeline(transaction=atomic)
    streams = [streams_of(run, keys) for keys in page]
    for keys, of_shard in zip(page, streams, strict=True):
        for key in (keys.ledger, keys.trainer, keys.sizes, keys.owners):
            pipe.hgetall(key)
        pipe.zcard(keys.open)
        for key in (keys.groups, keys.results):
            pipe.xlen(key)
        for key in (keys.ended, keys.ended_before):
            pipe.hlen(key)
        pipe.llen(keys.garbage)
        for stream in of_shard.values():
            pipe.xlen(stream.key)
            pipe.xrange(stream.key, count=1)
            pipe.xinfo_groups(stream.key)  # an error where the stream is yet to be made
    reply = map(or_nothing, pipe.execute(raise_on_error=False))
    now_ms, states = run.now_ms(), list[ShardState]()
    for of_shard in streams:
        ledger = as_mapping(next(reply))
        trainer, size_fields, owners = (as_texts(next(reply)) for _ in range(3))
        states.append(
            ShardState(
                counters=known_counters(ledger),
                broken=[name for name in COUNTERS if as_int(ledger.get(name, b"0")) is None],
                trainer=trainer,
                groups_open=next(reply),
                groups_logged=next(reply),
                results=next(reply),
                in_flight=sum(int(match[1]) for match in map(OWNER.fullmatch, owners.values()) if match),
                groups_remembered=next(reply) + next(reply),
                garbage=next(reply),
                reservation=reservation_of(size_fields, run.manifest.max_trajectory_bytes),
                streams={name: _stream_state(each.group, reply, now_ms) for name, each in of_shard.items()},
            )
        )
    return states


def _stream_state(group: str, reply: Iterator[Any], now_ms: int) -> StreamState:
    length, oldest, consumer_groups = next(reply), next(reply), next(reply)
    fields: dict[str, Any] = next(
        (fields for fields in map(as_mapping, consumer_groups) if fields["name"] == group.encode()), {}
    )
    age_s = max(0, now_ms - int(oldest[0][0].partition(b"-")[0])) / 1000 if oldest else None
    return StreamState(length, fields.get("pending", 0), fields.get("consumers", 0), age_s)


def problems_of(shard: ShardState) -> Iterator[str]:
    """Contradictions, one a line; none when the shard balances."""
    counters, ledger = shard.counters, Ledger.of(shard.counters)
    if ledger.pushed != ledger.accounted:
        yield f"pushed is {ledger.pushed}, accounted for are {ledger.accounted}"
    scoring = sum(stream.length for name, stream in shard.streams.items() if name.startswith("scoring:"))
    for counter, length, what in (
        ("rollouts_packets", shard.streams["rollouts"].length, "entries in the rollouts stream"),
        ("scoring_packets", scoring, "entries in the scorers' streams"),
        ("groups_open", shard.groups_open, "open groups"),
        ("groups_logged", shard.groups_logged, "entries in the groups log"),
        ("in_flight", shard.in_flight, "trajectories of named batches"),
    ):
        if counters[counter] != length:
            yield f"ledger {counter} is {counters[counter]}, there are {length} {what}"
    for name in ("rollouts", "scoring"):
        packets = counters[f"{name}_packets"]
        if not packets <= counters[name] <= MAX_PACKET_MEMBERS * packets:
            yield f"ledger {name} is {counters[name]}, in {packets} packets"
    kinds = counters["groups_abandoned"], counters["groups_eval"]
    of_open_groups = counters["open"] or shard.reservation.total_bytes or any(kinds)
    if of_open_groups and not shard.groups_open:
        yield "no group is open, but open trajectories, reserved bytes, abandoned or evaluation groups are counted"
    if sum(kinds) > shard.groups_open:
        yield f"{kinds[0]} groups are abandoned and {kinds[1]} are for evaluation, {shard.groups_open} are open"
    logged = counters["grouped"] + counters["in_flight"]
    if bool(logged) != bool(shard.groups_logged):
        yield f"ledger grouped + in_flight is {logged}, the groups log has {shard.groups_logged} entries"
    # An open group may have columns of its own before anything is pushed to it.
    is_empty = not (ledger.queued or logged or shard.garbage or shard.results or shard.groups_open)
    if is_empty and 0 < counters["live_bytes"] <= MOST_BYTES:
        yield f"ledger live_bytes is {counters['live_bytes']}, nothing is stored"
    yield from (f"ledger {name} is no whole number" for name in shard.broken)
    yield from (f"ledger {name} is {count}" for name, count in counters.items() if count < 0)
    for name in ("live_bytes", "dead_bytes", "kept_bytes"):
        if counters[name] > MOST_BYTES:
            yield f"ledger {name} is {counters[name]}, more than a server holds"


KNOWN: Final = 8  # payloads after which their sizes count; until then a slot needs max_trajectory_bytes
RARE: Final = 0.01  # the share of payloads that may be larger than what a slot needs
MOST: Final = 240  # buckets above would be of payloads that no server holds
#: Payloads by their bucket, and unfilled slots by the bytes reserved for each.
_NUMBERED: Final = re.compile(r"([hu])([0-9]{1,15})")


class Reservation(NamedTuple):
    """Bytes reserved for all unfilled slots, and bytes that one more slot needs."""

    total_bytes: int
    slot_bytes: int


def reservation_of(fields: Mapping[str, str], max_trajectory_bytes: int) -> Reservation:
    """From a shard's hash `sizes`. A value that is no number counts as 0."""
    counts = {name: as_count(value) for name, value in fields.items()}
    numbered: dict[str, dict[int, int]] = {"h": {}, "u": {}}
    for name, count in counts.items():
        if match := _NUMBERED.fullmatch(name):
            numbered[match[1]][int(match[2])] = count
    slot_bytes, larger, payloads = max_trajectory_bytes, 0, sum(numbered["h"].values())
    for bucket, count in sorted(numbered["h"].items(), reverse=True) if payloads >= KNOWN else ():
        larger += count
        if larger > RARE * payloads:
            size, computed_for, results = _bound(bucket), counts.get("in", 0), counts.get("out", 0)
            if computed_for > 0 and results > 0:
                size = _bound(_bucket(size * (1 + results / computed_for)))
            slot_bytes = min(max_trajectory_bytes, size)
            break
    unfilled = sum(max(size, slot_bytes) * count for size, count in numbered["u"].items())
    return Reservation(unfilled, slot_bytes)


def _bound(bucket: int) -> int:
    """The largest size in a bucket: four buckets to each power of two."""
    return math.ceil(2 ** (min(bucket, MOST) / 4))


def _bucket(size: float) -> int:
    bucket = max(0, math.ceil(4 * math.log(max(1, size)) / math.log(2)))
    while _bound(bucket) < size and bucket < MOST:
        bucket += 1
    return bucket
