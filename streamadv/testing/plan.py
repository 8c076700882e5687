"""What a schedule consists of: choices under labels.

A seed draws them; a list of those that differ from the plain course replays the schedule, and can be cut down, because
each keeps its meaning when others go.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import SettingError

#: A label -> what was chosen there, as JSON has it.
Choices = dict[str, Any]


class Plan:
    """The choices of one schedule. Give a seed or the choices."""

    def __init__(self, seed: int | str | None = None, choices: Mapping[str, Any] | None = None) -> None:
        self._random = random.Random(f"streamadv {seed}")
        self._given = choices
        self.taken: Choices = {}
        """What was chosen so far, where it is not None."""

    def choose(self, label: str, draw: Callable[[random.Random], Any]) -> Any:
        """What was given for this label, or what `draw` makes; None is the plain course."""
        chosen = self._given.get(label) if self._given is not None else draw(self._random)
        if chosen is not None:
            self.taken[label] = chosen
        return chosen

    def draw(self, draw: Callable[[random.Random], Any]) -> Any:
        """What `draw` makes of the seed, which only says how others are drawn; None in a replay."""
        return draw(self._random) if self._given is None else None


def cut_down(
    choices: Mapping[str, Any], fails: Callable[[Choices], bool], tries: int = 400, keep: str = ""
) -> Choices:
    """The fewest choices found with which `fails` still holds, by leaving out halves, quarters ... and single ones.

    keep: choices with labels that begin so stay. Raises SettingError if `fails` does not hold with all of them.
    """
    if not fails(dict(choices)):
        raise SettingError(
            "choices: nothing fails with all of them: give those of a world whose schedule failed"
        )
    kept = {label: value for label, value in choices.items() if keep and label.startswith(keep)}
    rest = [label for label in choices if label not in kept]

    def of(labels: list[str]) -> Choices:
        return kept | {label: choices[label] for label in labels}

    part = max(1, len(rest) // 2)
    while rest and tries > 0:
        start, shorter = 0, False
        while start < len(rest) and tries > 0:
            without = rest[:start] + rest[start + part :]
            tries -= 1
            if fails(of(without)):
                rest, shorter = without, True
            else:
                start += part
        if part == 1 and not shorter:
            break
        part = max(1, part // 2) if not shorter or part > 1 else 1
    return of(rest)
