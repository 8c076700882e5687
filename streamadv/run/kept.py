"""Kept: groups that have ended stay in the stream `kept` of their shard, within a budget, for people to look at.

The scripts that end groups keep them (`lua/lib/keep.lua`); the grouper tells these scripts the budget and forgets the
oldest. Which groups are kept is decided by their ids, so all processes agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import WireError
from ..messages import one_line
from ..trajectory.columns import KNOWN_COLUMNS, Array
from .manifest import KEPT_KINDS, Manifest
from .run import Shard

#: Share of the server's maxmemory that kept groups of a run may fill.
MAXMEMORY_SHARE: Final = 0.1
#: Groups that one call forgets, see `lua/lib/trim.lua`.
TRIM_COUNT: Final = 64
#: What a field of an output hash begins with that holds the results of one group.
RESULTS_OF: Final = "kept:"
#: What one begins with that holds what the trainer has made of a trajectory: `late:<rollout index>:<group id>`.
LATE_OF: Final = "late:"
#: dtypes of results: of rewards, and of columns.
_DTYPES: Final = {dtype.str: dtype for dtype in (np.dtype("<f8"), *KNOWN_COLUMNS.values())}


def share_kept(manifest: Manifest, kind: str) -> float:
    """The share of groups of a kind that the run keeps."""
    if manifest.archive:
        return 1.0
    return manifest.keep[kind] if manifest.keep_bytes else 0.0


def is_kept(group_id: str, share: float) -> bool:
    """Whether the group is among this share, as `is_chosen` in `lua/lib/keep.lua` says too."""
    hash_of_id = 0
    for byte in group_id.encode() if share > 0 else b"":
        hash_of_id = (16777619 * hash_of_id + byte) % 67108859
    hash_of_id = (hash_of_id * hash_of_id + 16777619) % 67108859
    return hash_of_id * hash_of_id % 67108859 < share * 67108859


def trim_kept(shard: Shard, manifest: Manifest, memory: Mapping[str, Any]) -> bool:
    """Tell the shard what it may keep, and forget what is too much. True if there may be more of that.

    memory: the server's `INFO memory`.
    """
    limit, budget = int(int(memory.get("maxmemory", 0)) * MAXMEMORY_SHARE), manifest.keep_bytes
    budget = (min(budget, limit) if limit else budget) // len(manifest.keys.salts)
    shares = [1.0 if manifest.archive else manifest.keep[kind] for kind in KEPT_KINDS]
    keeping = [str(budget), *map(repr, shares), *(["archive"] if manifest.archive else [])]
    forgotten: int = shard.call("trim_kept", [" ".join(keeping)])  # see `lua/lib/keep.lua`
    return forgotten >= TRIM_COUNT


class Numbers(NamedTuple):
    """A result of a group: its name, what has a number of it, and the numbers of all its members end to end."""

    name: str
    level: str  # trajectory, row, step or token
    values: Array


def pack_results(results: Sequence[Numbers]) -> bytes:
    """The results of one group as bytes."""
    head = [[name, level, values.dtype.str, len(values)] for name, level, values in results]
    return b"\n".join([json.dumps(head).encode(), b"".join(values.tobytes() for *_, values in results)])


def unpack_results(raw: bytes) -> list[Numbers]:
    """What `pack_results` made. Raises WireError."""
    text, _, rest = raw.partition(b"\n")
    results, at = list[Numbers](), 0
    try:
        for name, level, dtype, count in json.loads(text):
            values = np.frombuffer(rest, _DTYPES[dtype], count, at)
            results.append(Numbers(str(name), str(level), values))
            at += values.nbytes
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"results of a kept group: {one_line(str(error))}") from error
    return results


def unpack_late(raw: bytes) -> dict[int, list[Numbers]]:
    """What the trainer has made of the members of a kept group, by rollout index, as `commit.lua` has put it together.

    Raises WireError.
    """
    found, at = dict[int, list[Numbers]](), 0
    try:
        while at < len(raw):
            head = raw.index(b"\n", at)
            index, size = map(int, raw[at:head].split())
            found[index] = unpack_results(raw[head + 1 : head + 1 + size])
            at = head + 1 + size
    except ValueError as error:
        raise WireError(f"late columns of a kept group: {one_line(str(error))}") from error
    return found
