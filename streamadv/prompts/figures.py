"""What tries of prompts have shown: their rewards and tokens, by source and by prompt, as far as the run keeps them.

A group that ends leaves its figures beside its outcome in its shard's stream `prompt_ends` (`lua/lib/prompt_end.lua`),
which has the last 4,096 ends. So what is known is of the last groups, whatever the length of the data set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from .spec import PromptSet

_NUMBER: Final = r"(-?[0-9][0-9.e+-]{0,29})"
FIGURES: Final = re.compile(rf"([0-9]{{1,9}}),{_NUMBER},{_NUMBER},{_NUMBER},([0-9]{{1,15}})")
FILTERS: Final = frozenset(("zero_variance", "difficulty"))


class Figures(NamedTuple):
    """Of the rewards of one group, without baselines."""

    rewards: int
    mean: float
    deviation: float
    """Standard deviation: of the population, not of a sample."""
    least: float
    tokens: int
    """Of all trajectories with their prompts; 0 where a group was dropped before the trainer read it."""


def figures_of(rewards: list[float], tokens: int) -> str:
    """As scripts note them; '-' without rewards."""
    if not rewards:
        return "-"
    mean = sum(rewards) / len(rewards)
    deviation = math.dist(rewards, [mean] * len(rewards)) / math.sqrt(len(rewards))
    return f"{len(rewards)},{mean:.6g},{deviation:.6g},{min(rewards)!r},{tokens}"


def parse_figures(text: str) -> Figures | None:
    """None where there are none, or what is there no process of the run has written."""
    match = FIGURES.fullmatch(text)
    if match is None:
        return None
    try:
        return Figures(int(match[1]), float(match[2]), float(match[3]), float(match[4]), int(match[5]))
    except ValueError:
        return None


class End(NamedTuple):
    """How a group has ended."""

    group_id: str
    outcome: str
    figures: str


def end_of(text: bytes) -> End:
    """From an entry of a shard's stream `prompt_ends`. Of what no process of the run has written all is empty."""
    parts = text.decode(errors="replace").split(" ")
    return End(*parts) if len(parts) == len(End._fields) and parts[1].isidentifier() else End("", "", "")


@dataclass(frozen=True, slots=True)
class TriesSeen:
    """What the last tries of a source, or of a prompt, have shown."""

    tries: int
    """Groups that have ended."""
    trained: int
    filtered: int
    dropped: int
    """Tries that ended otherwise: played again, or given up."""
    rewarded: int
    """Tries whose rewards are known: the figures below are of these, and None (tokens: 0) where there are none."""
    solved: int
    """Tries that were trained or filtered, and all of whose rewards were at least `best_reward`."""
    reward_mean: float | None
    """Mean of the groups' means."""
    reward_deviation: float | None
    """Mean of the groups' standard deviations: near 0 where a group teaches nothing."""
    tokens: int
    """Of all tries, where they are known."""


def by_source(prompts: PromptSet, ends: Iterable[End]) -> dict[str, TriesSeen]:
    """Of each source of a set what its tries among these have shown."""
    found: dict[str, list[End]] = {source: [] for source in prompts.sources}
    for end in ends:
        if (tried := prompts.parse(end.group_id)) is not None:
            found[tried.source].append(end)
    return {source: seen(prompts, of) for source, of in found.items()}


def by_prompt(prompts: PromptSet, ends: Iterable[End]) -> dict[tuple[str, int], TriesSeen]:
    """(source, index) of each prompt with a try among these -> what its tries have shown, over all epochs."""
    found: dict[tuple[str, int], list[End]] = {}
    for end in ends:
        if (tried := prompts.parse(end.group_id)) is not None:
            found.setdefault((tried.source, tried.prompt), []).append(end)
    return {place: seen(prompts, of) for place, of in sorted(found.items())}


def seen(prompts: PromptSet, ends: Iterable[End]) -> TriesSeen:
    """What these tries have shown together. ends: in their order; the last one of a group counts."""
    tried = list({end.group_id: end for end in ends if end.outcome not in ("requeued", "repeated")}.values())
    rewarded = [(end, found) for end in tried if (found := parse_figures(end.figures)) is not None]
    known = [found for _, found in rewarded]
    trained = sum(end.outcome == "trained" for end in tried)
    filtered = sum(end.outcome in FILTERS for end in tried)
    count = len(known)
    return TriesSeen(
        len(tried),
        trained,
        filtered,
        len(tried) - trained - filtered,
        count,
        sum(
            each.least >= prompts.best_reward and (end.outcome == "trained" or end.outcome in FILTERS)
            for end, each in rewarded
        ),
        sum(each.mean for each in known) / count if count else None,
        sum(each.deviation for each in known) / count if count else None,
        sum(each.tokens for each in known),
    )
