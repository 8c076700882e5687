"""What evaluation groups have shown: reward by policy version and data source. `lua/lib/evaluation.lua` adds it up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from ..run import Run
from ..store.replies import replies_of

#: Numbers of a pair of version and data source: see `note_evaluation` in the script.
SUMS: Final = 10


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of one policy version on one data source, over the groups of role eval that have ended.

    std_error: of `mean`, between groups, so that the rollouts of one prompt need not be independent of each other; None
    for fewer than two groups. `mean`, `best`, `min` and `max` are None without a reward.
    """

    data_source: str
    version: int | None  # None: pushed without one
    groups: int  # with a reward
    trajectories: int  # with a reward
    failed: int  # rollouts without one: failed, aborted, cancelled, unscorable, or never pushed
    mean: float | None  # over trajectories
    std_error: float | None
    best: float | None  # mean over groups of the best reward in each: pass@k where rewards are 0 or 1
    min: float | None
    max: float | None

    @classmethod
    def of(cls, data_source: str, version: int | None, parts: Sequence[Sequence[float]]) -> Self:
        """parts: of each shard that has some of it."""
        groups, n, failed, s, ss, ns, nn, best = (sum(part[i] for part in parts) for i in range(SUMS - 2))
        counts = int(groups), int(n), int(failed)
        if not (groups and n):
            return cls(data_source, version, *counts, None, None, None, None, None)
        mean, std_error = s / n, None
        if groups > 1:
            # Sum over groups of (sum of its rewards - its trajectories * mean)^2: the rounded one is never below 0.
            squares = max(0.0, ss - 2 * mean * ns + mean * mean * nn)
            std_error = math.sqrt(squares * groups / (groups - 1)) / n
        with_rewards = [part for part in parts if part[0]]
        low, high = min(part[8] for part in with_rewards), max(part[9] for part in with_rewards)
        return cls(data_source, version, *counts, mean, std_error, best / groups, low, high)


def read_evaluations(run: Run) -> list[Evaluation]:
    """All that are stored, by data source and version."""
    parts: defaultdict[tuple[str, int | None], list[list[float]]] = defaultdict(list)
    pipe = run.connection.scripts.pipeline(transaction=False)
    for keys in run.keys.shards:
        pipe.hgetall(keys.evals)
    for fields in replies_of(pipe):
        for pair, sums in _parts(fields or {}):
            parts[pair].append(sums)
    found = [Evaluation.of(*pair, sums) for pair, sums in parts.items()]
    return sorted(found, key=lambda each: (each.data_source, -1 if each.version is None else each.version))


def newest(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Of each data source the one of the highest version that has a reward."""
    by_source: dict[str, Evaluation] = {}
    for evaluation in evaluations:  # ascending in the version
        if evaluation.mean is not None:
            by_source[evaluation.data_source] = evaluation
    return list(by_source.values())


def _parts(fields: Mapping[bytes, bytes]) -> Iterator[tuple[tuple[str, int | None], list[float]]]:
    """The pairs of one shard. What somebody else has written there is left out."""
    for field, value in fields.items():
        version, separator, source = field.decode(errors="backslashreplace").partition(" ")
        try:
            sums = [float(number) for number in value.split()]
        except ValueError:
            continue
        is_version = version == "-" or (version.isdecimal() and len(version) <= 16)
        if separator and is_version and len(sums) == SUMS and all(map(math.isfinite, sums)):
            yield (source, None if version == "-" else int(version)), sums
