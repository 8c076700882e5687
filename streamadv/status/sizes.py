"""What admission reserves for slots of open groups, for observers: `lua/lib/slot_bytes.lua` in Python.

The scripts decide admission itself. A test compares both on random histograms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from ..store.replies import as_count

KNOWN: Final = 8  # payloads after which their sizes count; until then a slot needs max_trajectory_bytes
RARE: Final = 0.01  # the share of payloads that may be larger than what a slot needs
MOST: Final = 240  # buckets above would be of payloads that no server holds


class Reservation(NamedTuple):
    """Bytes reserved for all unfilled slots, and bytes that one more slot needs."""

    total_bytes: int
    slot_bytes: int


def reservation(fields: Mapping[str, str], max_trajectory_bytes: int) -> Reservation:
    """From a shard's hash `sizes`. A value that is no number counts as 0."""
    counts = {name: as_count(value) for name, value in fields.items()}
    slot_bytes = _slot_bytes(counts, max_trajectory_bytes)
    unfilled = _numbered(counts, "u").items()
    return Reservation(sum(max(size, slot_bytes) * count for size, count in unfilled), slot_bytes)


def _slot_bytes(counts: Mapping[str, int], max_trajectory_bytes: int) -> int:
    payloads, larger = _numbered(counts, "h"), 0
    if sum(payloads.values()) < KNOWN:
        return max_trajectory_bytes
    for bucket, count in sorted(payloads.items(), reverse=True):
        larger += count
        if larger > RARE * sum(payloads.values()):
            size, computed_for, results = _bound(bucket), counts.get("in", 0), counts.get("out", 0)
            if computed_for > 0 and results > 0:
                size = _bound(_bucket(size * (1 + results / computed_for)))
            return min(max_trajectory_bytes, size)
    return max_trajectory_bytes


def _bound(bucket: int) -> int:
    """The largest size in a bucket: four buckets to each power of two."""
    return math.ceil(2 ** (min(bucket, MOST) / 4))


def _bucket(size: float) -> int:
    bucket = max(0, math.ceil(4 * math.log(max(1, size)) / math.log(2)))
    while _bound(bucket) < size and bucket < MOST:
        bucket += 1
    return bucket


def _numbered(counts: Mapping[str, int], kind: str) -> dict[int, int]:
    """Counts by the number behind the letter `kind` in their names, of at most 15 digits."""
    return {
        int(name[1:]): count
        for name, count in counts.items()
        if name[:1] == kind and len(name) <= 16 and name[1:].isascii() and name[1:].isdigit()
    }
