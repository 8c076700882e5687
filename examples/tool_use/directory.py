"""The task: follow a chain of managers in a directory that only a slow tool can read.

    prompt   <bos> two carol           "who is two levels above Carol?"
    turn 1   lookup carol | one dave   two tokens of the policy | what the tool says: levels left, and a name
    turn 2   lookup dave | zero erin
    turn 3   answer erin               ends the episode: reward 1 if it is right, else 0

Every question has a directory of its own, so nothing can be learnt by heart. A turn that is neither a lookup nor an
answer ends the episode with reward 0, and so does the sixth turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NAMES: Final = ["alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy"]
LEVELS: Final = ["zero", "one", "two", "three"]
WORDS: Final = ["<pad>", "<bos>", "lookup", "answer", *LEVELS, *NAMES]
PAD, BOS, LOOKUP, ANSWER = range(4)
FIRST_LEVEL: Final = WORDS.index(LEVELS[0])
FIRST_NAME: Final = WORDS.index(NAMES[0])
TOKENS_PER_TURN: Final = 2
MAX_TURNS: Final = 6


@dataclass(frozen=True)
class Question:
    managers: Sequence[int]  # token of each name's manager, in the order of NAMES
    levels: int
    start: int

    @classmethod
    def draw(cls, chance: random.Random, levels: int = 3) -> Question:
        """levels: how many there are at most, 1 to 3."""
        names = range(FIRST_NAME, len(WORDS))
        return cls([chance.choice(names) for _ in NAMES], chance.randint(1, levels), chance.choice(names))

    @property
    def prompt(self) -> list[int]:
        return [BOS, FIRST_LEVEL + self.levels, self.start]

    def manager(self, name: int) -> int:
        return self.managers[name - FIRST_NAME]

    def reply(self, name: int, turn: int) -> list[int]:
        """What the tool says in turn 1, 2 ...: the levels that are left, and the manager."""
        return [FIRST_LEVEL + max(self.levels - turn, 0), self.manager(name)]

    def reward(self, turn: Sequence[int]) -> float:
        """Of an episode that ends with this turn."""
        solution = self.start
        for _ in range(self.levels):
            solution = self.manager(solution)
        return float(list(turn) == [ANSWER, solution])


def asks_for(turn: Sequence[int]) -> int | None:
    """The name that a turn looks up; None for any other turn."""
    verb, name = turn
    return name if verb == LOOKUP and name >= FIRST_NAME else None


@dataclass(frozen=True)
class Latency:
    """Seconds that a call of the tool takes: log-normal, which has a long tail."""

    median: float
    chance: random.Random
    sigma: float = 1.0

    def draw(self) -> float:
        return self.median * min(self.chance.lognormvariate(0, self.sigma), 20.0)
