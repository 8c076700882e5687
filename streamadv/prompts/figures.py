"""What tries of prompts have shown: their rewards and tokens, by source and by prompt, as far as the run keeps them.

A group that ends leaves its figures beside its outcome in its shard's stream `prompt_ends` (`lua/lib/prompt_end.lua`),
which has the last 4,096 ends. So what is known is of the last groups, whatever the length of the data set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from .spec import GROUP_ID, PromptSet, Tried

_NUMBER: Final = r"(-?[0-9][0-9.e+-]{0,29})"
FIGURES: Final = re.compile(rf"([0-9]{{1,9}}),{_NUMBER},{_NUMBER},{_NUMBER},([0-9]{{1,15}})")
#: A line of a shard's stream `prompt_ends`.
END: Final = re.compile(rf"^{GROUP_ID.pattern} ([A-Za-z_][A-Za-z0-9_]*) (\S*)$", re.MULTILINE)
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


#: A try of a prompt, how its group has ended, and its figures.
End: TypeAlias = tuple[Tried, str, str]


def ends_of(prompts: PromptSet, text: str) -> Iterator[End]:
    """How tries of these prompts have ended, from lines of `prompt_ends`; what no process of the run has written is
    left out."""
    for match in END.finditer(text):
        *group, outcome, figures = match.groups()
        if (tried := prompts.tried(*group)) is not None:
            yield tried, outcome, figures


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


def by_source(prompts: PromptSet, ends: str) -> dict[str, TriesSeen]:
    """Of each source of a set what its tries among these have shown. ends: lines of `prompt_ends`."""
    found: dict[str, list[End]] = {source: [] for source in prompts.sources}
    for end in ends_of(prompts, ends):
        found[end[0].source].append(end)
    return {source: seen(prompts, of) for source, of in found.items()}


def by_prompt(prompts: PromptSet, ends: str) -> dict[tuple[str, int], TriesSeen]:
    """(source, index) of each prompt with a try among these -> what its tries have shown, over all epochs."""
    found: dict[tuple[str, int], list[End]] = {}
    for end in ends_of(prompts, ends):
        found.setdefault((end[0].source, end[0].prompt), []).append(end)
    return {place: seen(prompts, of) for place, of in sorted(found.items())}


def seen(prompts: PromptSet, ends: Iterable[End]) -> TriesSeen:
    """What these tries have shown together. ends: in their order; the last one of a group counts."""
    tried = {
        tried: (outcome, figures)
        for tried, outcome, figures in ends
        if outcome not in ("requeued", "repeated")
    }
    rewarded = [
        (outcome, found)
        for outcome, figures in tried.values()
        if (found := parse_figures(figures)) is not None
    ]
    known = [found for _, found in rewarded]
    trained = sum(outcome == "trained" for outcome, _ in tried.values())
    filtered = sum(outcome in FILTERS for outcome, _ in tried.values())
    count = len(known)
    return TriesSeen(
        len(tried),
        trained,
        filtered,
        len(tried) - trained - filtered,
        count,
        sum(
            each.least >= prompts.best_reward and (outcome == "trained" or outcome in FILTERS)
            for outcome, each in rewarded
        ),
        sum(each.mean for each in known) / count if count else None,
        sum(each.deviation for each in known) / count if count else None,
        sum(each.tokens for each in known),
    )
