"""The book: every group that can be looked at, a line each, and how lines are chosen and counted.

Kept groups do not change, so each is read once. What is open, waiting or dead is read anew, at most every few seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from .. import clock
from ..errors import SettingError
from ..messages import brief
from ..run import Run
from ..status.seen import PLACES, SeenGroup, Where, read_groups_at, read_kept_since
from ..status.why import why

#: Lines of a page.
PAGE: Final = 100
#: Bins of a histogram.
BINS: Final = 16
#: A book is read again after so many seconds, and after so many times as long as reading took.
FRESH_S: Final = 1.5
PATIENCE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Line:
    """A group in a table."""

    where: Where
    shard: int
    entry: str
    group_id: str
    outcome: str
    why: str
    batch: int | None
    named_for: int | None  # the batch at whose naming it was dropped
    version: int | None
    versions: tuple[int, int] | None
    source: str
    rewards: tuple[tuple[int, float | None, bool], ...]  # rollout index, reward, whether it counts
    tokens: int
    ended_ms: int | None
    kl: float | None  # of its batch, see `kl_of`

    @classmethod
    def of(cls, group: SeenGroup, run: Run) -> Self:
        spans = [member.versions for member in group.members if member.versions]
        return cls(
            group.where,
            group.shard,
            group.entry,
            group.group_id,
            group.outcome,
            why(group, run.manifest),
            group.batch if group.where != "kept" or group.outcome == "trained" else None,
            group.naming[0] if group.naming else None,
            group.version,
            (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None,
            group.data_source or "",
            tuple(
                (member.rollout_index, member.reward, member.rollout_index in group.counting)
                for member in group.members
            ),
            sum(member.num_tokens for member in group.members),
            group.ended_ms,
            kl_of(group.record),
        )

    @property
    def known(self) -> list[float]:
        """The rewards that count."""
        return [reward for _, reward, counts in self.rewards if counts and reward is not None]

    @property
    def mean(self) -> float | None:
        """Their mean."""
        return sum(self.known) / len(self.known) if self.known else None

    @property
    def deviation(self) -> float | None:
        """Their standard deviation, of the sample."""
        if (mean := self.mean) is None or len(self.known) < 2:
            return None
        return math.sqrt(sum((reward - mean) ** 2 for reward in self.known) / (len(self.known) - 1))

    @property
    def length(self) -> float | None:
        """Mean tokens of a rollout."""
        return self.tokens / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which lines are asked for, as an address says it. None and "": any."""

    where: str = ""
    outcome: str = ""
    source: str | None = None
    batch: int | None = None
    naming: int | None = None  # dropped while this batch was named
    low: float | None = None  # mean reward
    high: float | None = None
    short: float | None = None  # mean tokens
    long: float | None = None
    find: str = ""  # part of the group's id
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """From the words of an address. Raises SettingError."""
        numbers: dict[str, Callable[[str], float]] = {"batch": int, "naming": int, "page": int}
        numbers |= dict.fromkeys(("low", "high", "short", "long"), float)
        given: dict[str, Any] = {}
        for name, text in query.items():
            if name not in cls.__slots__:
                continue
            try:
                given[name] = numbers[name](text) if name in numbers else text
            except ValueError:
                raise SettingError(f"{name} is {brief(text)}, needs a number") from None
        return cls(**{**given, "page": max(1, given.get("page", 1))})

    def has(self, line: Line) -> bool:
        """Whether the line is asked for."""
        return (
            self.where in ("", line.where)
            and self.outcome in ("", line.outcome)
            and self.source in (None, line.source)
            and self.batch in (None, line.batch)
            and self.naming in (None, line.named_for)
            and self.find in line.group_id
            and _within(line.mean, self.low, self.high)
            and _within(line.length, self.short, self.long)
        )

    def words(self, **changes: Any) -> dict[str, str]:
        """As words of an address, on the first page unless told otherwise."""
        changed = replace(self, **{"page": 1, **changes})
        words = {name: getattr(changed, name) for name in self.__slots__}
        return {
            name: str(value)
            for name, value in words.items()
            if value is not None and (value != "" or name == "source") and (name, value) != ("page", 1)
        }


@dataclass(frozen=True, slots=True)
class Bin:
    low: float
    high: float
    count: int


class Book:
    """All lines of a run. Belongs to one thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._kept: list[dict[str, Line]] = [{} for _ in run.shards]  # by entry, the oldest first
        self._lines: list[Line] = []
        self._due = 0.0

    def lines(self) -> list[Line]:
        """Open groups, then what waits, was kept and is dead: of each the newest first."""
        if (began := clock.now()) < self._due:
            return self._lines
        lines = list[Line]()
        for place in PLACES:
            if place == "kept":
                found = self.kept()
            else:
                found = [Line.of(group, self._run) for group in read_groups_at(self._run, place)]
            lines += sorted(found, key=lambda line: line.ended_ms or 0, reverse=True)
        self._lines = lines
        self._due = clock.now() + max(FRESH_S, PATIENCE * (clock.now() - began))
        return lines

    def kept(self) -> list[Line]:
        """Lines of the kept groups alone, the oldest first in each shard."""
        for shard, known in zip(self._run.shards, self._kept, strict=True):
            first, new = read_kept_since(shard, next(reversed(known), ""))
            known.update({group.entry: Line.of(group, self._run) for group in new})
            for entry in list(known):
                if first is not None and _order(entry) >= _order(first):
                    break
                del known[entry]  # forgotten by the run
        return [line for known in self._kept for line in known.values()]


def batches_of(lines: Sequence[Line]) -> dict[int, float | None]:
    """Mean reward of the groups in the book, by batch."""
    by_batch: dict[int, list[float]] = {}
    for line in lines:
        if line.batch is not None:
            by_batch.setdefault(line.batch, []).extend(line.known)
    return {k: sum(rewards) / len(rewards) if rewards else None for k, rewards in sorted(by_batch.items())}


#: Metrics of a batch that say how far the policy has moved, the first one first: to the reference policy, and between
#: the policy that has played and the one that is trained.
KL_METRICS: Final = ("critic/kl", "rollout_corr/kl")


def kl_of(record: Mapping[str, Any]) -> float | None:
    """The mean KL of a kept group's batch; None if its chain has measured none."""
    metrics = record.get("metrics")
    found = [metrics.get(name) for name in KL_METRICS] if isinstance(metrics, dict) else []
    return next((value for value in found if isinstance(value, float)), None)


def facets(lines: Sequence[Line], choice: Choice) -> dict[str, dict[str, int]]:
    """How many lines each place, outcome and source has, under the rest of the choice."""
    counts = {}
    anything: dict[str, Any] = {"where": "", "outcome": "", "source": None}
    for name, value in anything.items():
        others = replace(choice, **{name: value})
        counted = Counter(getattr(line, name) for line in lines if others.has(line))
        counts[name] = dict(sorted(counted.items()))
    return counts


def histogram(values: Sequence[float | None]) -> list[Bin]:
    """The values in bins of one width; those that are None are in none."""
    known = [value for value in values if value is not None]
    if not known:
        return []
    low, high = min(known), max(known)
    if low == high:
        return [Bin(low, high, len(known))]
    width, counts = (high - low) / BINS, [0] * BINS
    for value in known:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    edges = [low + number * width for number in range(BINS)] + [high]
    return [Bin(edges[number], edges[number + 1], count) for number, count in enumerate(counts)]


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def _order(entry: str) -> tuple[int, int]:
    ms, _, number = entry.partition("-")
    return int(ms), int(number or 0)
