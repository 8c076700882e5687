"""What admission reserves for places of open groups, read from a shard's `sizes` as `lua/lib/sizes.lua` reads it.

For whoever only looks: admission itself is decided in the scripts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from ..store.replies import as_count

KNOWN: Final = 8  # payloads after which their sizes count; until then a place needs max_trajectory_bytes
RARE: Final = 0.01  # the share of payloads that may be larger than what a place needs
MOST: Final = 240  # buckets above would be of payloads that no server holds


class Reserved(NamedTuple):
    """Bytes reserved for all unfilled places, and bytes that one more place needs."""

    total: int
    each: int


def reserved(fields: Mapping[str, str], max_trajectory_bytes: int) -> Reserved:
    """The reservation of a shard whose hash `sizes` has these fields; what is no number counts as 0."""
    counts = {name: as_count(value) for name, value in fields.items()}
    each = _place_bytes(counts, max_trajectory_bytes)
    return Reserved(sum(max(size, each) * count for size, count in _numbered(counts, "u").items()), each)


def _place_bytes(counts: Mapping[str, int], max_trajectory_bytes: int) -> int:
    known = counts.get("n", 0)
    if known < KNOWN:
        return max_trajectory_bytes
    larger = 0
    for bucket, count in sorted(_numbered(counts, "h").items(), reverse=True):
        larger += count
        if larger > RARE * known:
            size, into, out = _bound(bucket), counts.get("in", 0), counts.get("out", 0)
            if into > 0 and out > 0:
                size = _bound(_bucket(size * (1 + out / into)))
            return min(max_trajectory_bytes, size)
    return max_trajectory_bytes


def _bound(bucket: int) -> int:
    return math.ceil(2 ** (min(bucket, MOST) / 4))


def _bucket(size: float) -> int:
    bucket = max(0, math.ceil(4 * math.log(max(1, size)) / math.log(2)))
    while _bound(bucket) < size and bucket < MOST:
        bucket += 1
    return bucket


def _numbered(counts: Mapping[str, int], kind: str) -> dict[int, int]:
    return {
        int(name[1:]): count
        for name, count in counts.items()
        if name[:1] == kind and len(name) < 17 and name[1:].isascii() and name[1:].isdigit()
    }
