"""The environment: Gymnasium's FrozenLake 4x4 (not slippery), played over several turns of tokens.

A sequence is  BOS, 16 map tokens, then per turn a position token (observation) and an action token. Only
action tokens are trained on. An episode ends at the goal (reward 1), in a hole or after 20 turns.

The environments are real ones: every action goes through `step` of an instance from `gymnasium.make`. They
are stepped one by one rather than through `gymnasium.vector`, which resets an environment that has ended and
goes on stepping it, while here an episode that has ended leaves the lock-step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import MAPS, generate_random_map

from .settings import MAX_TURNS

SIZE: Final = 4
CELLS: Final = SIZE * SIZE
NUM_ACTIONS: Final = 4  # left, down, right, up

BOS: Final = 0
MAP_TOKENS: Final = {"S": 1, "F": 2, "H": 3, "G": 4}
FIRST_POSITION: Final = 5
FIRST_ACTION: Final = FIRST_POSITION + CELLS
VOCABULARY: Final = FIRST_ACTION + NUM_ACTIONS
PROMPT_LENGTH: Final = 1 + CELLS
MAX_LENGTH: Final = PROMPT_LENGTH + 2 * MAX_TURNS

Map = tuple[str, ...]  # four rows of four letters
FIXED_MAP: Final[Map] = tuple(MAPS["4x4"])


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer.json that makes words of the tokens; returns its path."""
    cells = [f"row{cell // SIZE}col{cell % SIZE}" for cell in range(CELLS)]
    words = ["map", *MAP_TOKENS, *cells, "left", "down", "right", "up"]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "map"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    splits = {"pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": []}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", **dict.fromkeys(parts), **splits, "model": model}))
    return path


@dataclass(slots=True)
class Episode:
    """One episode as tokens. The lists have one entry per token."""

    input_ids: list[int]
    response_mask: list[int]
    log_probs: list[float]  # of the action tokens, under the policy that played; 0 elsewhere
    state_keys: list[str] = field(default_factory=list)  # one per turn: the map and the position acted in
    reward: float = 0.0
    truncated: bool = False

    def observe(self, lake: Map, position: int) -> None:
        self.input_ids.append(FIRST_POSITION + position)
        self.response_mask.append(0)
        self.log_probs.append(0.0)
        self.state_keys.append(f"{''.join(lake)}:{position}")

    def act(self, action: int, log_prob: float) -> None:
        self.input_ids.append(FIRST_ACTION + action)
        self.response_mask.append(1)
        self.log_probs.append(log_prob)


def draw_map(kind: str, generator: random.Random) -> Map:
    """The fixed map, or a random solvable one."""
    if kind == "fixed":
        return FIXED_MAP
    return tuple(generate_random_map(size=SIZE, seed=generator.randrange(2**31)))


def prompt(lake: Map) -> Episode:
    """The sequence before the first turn: BOS and the map."""
    tokens = [BOS, *(MAP_TOKENS[letter] for row in lake for letter in row)]
    return Episode(tokens, [0] * PROMPT_LENGTH, [0.0] * PROMPT_LENGTH)


class Lakes:
    """Environments played in lock-step, one per map, reused while the maps stay the same."""

    def __init__(self) -> None:
        self._maps: list[Map] = []
        self._environments: list[gymnasium.Env[Any, Any]] = []

    def reset(self, maps: Sequence[Map]) -> list[int]:
        """Start an episode on each map; returns the positions (0..15)."""
        if list(maps) != self._maps:
            self._maps = list(maps)
            self._environments = [
                gymnasium.make(
                    "FrozenLake-v1",
                    desc=list(lake),
                    is_slippery=False,
                    max_episode_steps=MAX_TURNS,
                    disable_env_checker=True,  # checks spaces, not dynamics, and costs as much as the step
                )
                for lake in maps
            ]
        return [int(environment.reset()[0]) for environment in self._environments]

    def step(self, index: int, action: int) -> tuple[int, float, bool, bool]:
        """One action in environment `index`: position, reward, terminated, truncated."""
        position, reward, terminated, truncated, _ = self._environments[index].step(action)
        return int(position), float(reward), bool(terminated), bool(truncated)
