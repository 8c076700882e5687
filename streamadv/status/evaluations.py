"""Results of evaluation groups: reward by data source and round, or by policy version where groups name no round.

`lua/lib/evaluation.lua` adds them up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, Self

from ..run import Run
from ..store.replies import as_text, replies_of

#: Numbers of a pair of data source and version, see `note_evaluation` in the script. A round has three more.
SUMS: Final = 10
ROUND_SUMS: Final = 13


class _Pair(NamedTuple):
    """What a shard has sums of."""

    data_source: str
    round: str | None
    version: int | None  # None: pushed without one, or the sums of a round say which


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of one round, or of one policy version, on one data source, over the groups of role eval that have ended.

    std_error: of `mean`, between groups, so that the rollouts of one prompt need not be independent of each other; None
    for fewer than two groups. `mean`, `best`, `min` and `max` are None without a reward.
    """

    data_source: str
    round: str | None  # None: of the groups of this version that name none
    oldest_version: int | None  # of a round; else the same as `version`
    version: int | None  # of a round the newest one; None: pushed without one
    groups: int  # with a reward
    trajectories: int  # with a reward
    failed: int  # rollouts without one: failed, aborted, cancelled, unscorable, or never pushed
    mean: float | None  # over trajectories
    std_error: float | None
    best: float | None  # mean over groups of the best reward in each: pass@k where rewards are 0 or 1
    min: float | None
    max: float | None

    @property
    def versions(self) -> str | None:
        """`34`, or `34..35` of a round that was played with several; None: pushed without one."""
        span = dict.fromkeys((self.oldest_version, self.version))
        return None if self.version is None else "..".join(map(str, span))

    @classmethod
    def of(cls, pair: _Pair, parts: Sequence[Sequence[float]]) -> Self:
        """parts: of each shard that has some of it."""
        oldest = newest = pair.version
        if pair.round is not None and (last := max(part[11] for part in parts)) >= 0:
            oldest, newest = int(min(part[10] for part in parts)), int(last)
        groups, n, failed, s, ss, ns, nn, best = (sum(part[i] for part in parts) for i in range(SUMS - 2))
        what = pair.data_source, pair.round, oldest, newest, int(groups), int(n), int(failed)
        if not (groups and n):
            return cls(*what, None, None, None, None, None)
        mean, std_error = s / n, None
        if groups > 1:
            # Sum over groups of (sum of its rewards - its trajectories * mean)^2: the rounded one is never below 0.
            squares = max(0.0, ss - 2 * mean * ns + mean * mean * nn)
            std_error = math.sqrt(squares * groups / (groups - 1)) / n
        with_rewards = [part for part in parts if part[0]]
        low, high = min(part[8] for part in with_rewards), max(part[9] for part in with_rewards)
        return cls(*what, mean, std_error, best / groups, low, high)


def read_evaluations(run: Run) -> list[Evaluation]:
    """All that are stored, by data source and version; rounds of one version in the order in which they were played."""
    parts: defaultdict[_Pair, list[list[float]]] = defaultdict(list)
    pipe = run.connection.scripts.pipeline(transaction=False)
    for keys in run.keys.shards:
        pipe.hgetall(keys.evals)
    for field, value in chain.from_iterable((fields or {}).items() for fields in replies_of(pipe)):
        version, separator, source = field.partition(b" ")
        name, count = None, SUMS
        if version == b"round":
            (name, separator, source), version, count = source.partition(b" "), b"-", ROUND_SUMS
        try:
            sums = [float(number) for number in value.split()]
        except ValueError:  # somebody else has written it
            continue
        is_version = version == b"-" or (version.isdigit() and len(version) <= 16)
        if separator and is_version and len(sums) == count and all(map(math.isfinite, sums)):
            of_round = None if name is None else as_text(name)
            pair = _Pair(as_text(source), of_round, None if version == b"-" else int(version))
            parts[pair].append(sums)
    found = [
        (Evaluation.of(pair, sums), max(part[ROUND_SUMS - 1 :] for part in sums))
        for pair, sums in parts.items()
    ]
    found.sort(
        key=lambda each: (each[0].data_source, -1 if each[0].version is None else each[0].version, each[1])
    )
    return [evaluation for evaluation, _ in found]


def newest(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Of each data source the one of the highest version that has a reward; of rounds of that version the last one."""
    # They ascend: of each source the last one stays.
    return list({each.data_source: each for each in evaluations if each.mean is not None}.values())
