"""Whether a shard's ledger agrees with itself and with the structures it counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..trajectory.packet import MAX_PACKET_MEMBERS

if TYPE_CHECKING:
    from .shard import ShardState

#: No server holds so many bytes: somebody has written the number, and admission waits for it to fall.
MOST_BYTES: Final = 1 << 50


def problems_of(shard: ShardState) -> list[str]:
    """Contradictions, one a line; [] when the shard balances."""
    return [*_sums(shard), *_structures(shard), *_numbers(shard)]


def _sums(shard: ShardState) -> Iterator[str]:
    pushed, accounted = shard.ledger.pushed, shard.ledger.accounted
    if pushed != accounted:
        yield f"pushed is {pushed}, accounted for are {accounted}"


def _structures(shard: ShardState) -> Iterator[str]:
    scoring = sum(stream.length for name, stream in shard.streams.items() if name.startswith("scoring:"))
    for counter, length, what in (
        ("rollouts_packets", shard.streams["rollouts"].length, "entries in the rollouts stream"),
        ("scoring_packets", scoring, "entries in the scorers' streams"),
        ("groups_open", shard.groups_open, "open groups"),
        ("groups_logged", shard.groups_logged, "entries in the groups log"),
        ("in_flight", shard.in_flight, "trajectories of named batches"),
    ):
        if shard.count(counter) != length:
            yield f"ledger {counter} is {shard.count(counter)}, there are {length} {what}"
    for name in ("rollouts", "scoring"):
        packets = shard.count(f"{name}_packets")
        if not packets <= shard.count(name) <= MAX_PACKET_MEMBERS * packets:
            yield f"ledger {name} is {shard.count(name)}, in {packets} packets"
    kinds = shard.count("groups_abandoned"), shard.count("groups_eval")
    of_open_groups = shard.count("open") or shard.reservation.total_bytes or any(kinds)
    if of_open_groups and not shard.groups_open:
        yield "no group is open, but open trajectories, reserved bytes, abandoned or evaluation groups are counted"
    if sum(kinds) > shard.groups_open:
        yield f"{kinds[0]} groups are abandoned and {kinds[1]} are for evaluation, {shard.groups_open} are open"
    logged = shard.count("grouped") + shard.count("in_flight")
    if bool(logged) != bool(shard.groups_logged):
        yield f"ledger grouped + in_flight is {logged}, the groups log has {shard.groups_logged} entries"
    is_empty = not (shard.ledger.queued or logged or shard.garbage or shard.results)
    if is_empty and 0 < shard.count("live_bytes") <= MOST_BYTES:
        yield f"ledger live_bytes is {shard.count('live_bytes')}, nothing is stored"


def _numbers(shard: ShardState) -> Iterator[str]:
    for name in shard.broken:
        yield f"ledger {name} is no whole number"
    for name, count in shard.counters.items():
        if count < 0:
            yield f"ledger {name} is {count}"
    for name in ("live_bytes", "dead_bytes"):
        if shard.count(name) > MOST_BYTES:
            yield f"ledger {name} is {shard.count(name)}, more than a server holds"
