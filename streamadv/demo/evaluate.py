"""The evaluation process: plays 512 sampled episodes with published weights, apart from all training.

`python -m streamadv.demo.evaluate DIRECTORY` plays with every tenth version, and with the last one, with which it ends;
one message for each. The success rate of the training batches would flatter: groups without variance are not in
them, and groups share prompts.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Final

import torch

import streamadv as sa

from ..processes import messages
from .environment import Lakes, draw_map
from .policy import Policy, play
from .settings import EVALUATE_EVERY, EVALUATION_EPISODES, DemoSettings

LOCK_STEP: Final = 64
POLL_S: Final = 0.1


def success_rate(policy: Policy, maps: str, seed: str) -> float:
    """Share of EVALUATION_EPISODES sampled episodes that reach the goal."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(chance.randrange(2**63))
    lakes = Lakes()
    solved = 0.0
    for _ in range(EVALUATION_EPISODES // LOCK_STEP):
        drawn = [draw_map(maps, chance) for _ in range(LOCK_STEP)]
        solved += sum(episode.reward for episode in play(policy, lakes, drawn, generator))
    return solved / EVALUATION_EPISODES


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    directory = Path(arguments[0])
    settings = DemoSettings.read(directory)
    policy, version = Policy(), -1
    while version != (last := settings.last(directory)):
        found = sa.weights.versions(directory)
        due = [each for each in found if each == last or (each > version and each % EVALUATE_EVERY == 0)]
        try:
            version = sa.weights.load(sa.weights.path_of(directory, due[0]), policy)
        except (IndexError, sa.errors.WeightsMissingError):
            time.sleep(POLL_S)  # there are none, or the trainer has gone back to its checkpoint
            continue
        rate = success_rate(policy, settings.maps, f"evaluation/{settings.seed}/{version}")
        messages.send("evaluation", version=version, success_rate=rate)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
