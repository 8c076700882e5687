"""The rollout process: plays whole groups with the newest published weights and pushes them.

`python -m streamadv.demo.rollouts DIRECTORY INDEX`, with the URL in STREAMADV_REDIS_URL. Begins with the first weights;
once the last update is published, the groups begun are played and pushed, and the producer finishes.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import streamadv as sa
from streamadv import metrics

from ..settings import load_settings
from .environment import PROMPT_LENGTH, Episode, Lakes, draw_map
from .policy import Policy, play
from .settings import GROUP_SIZE, GROUPS_PER_ROUND, DemoSettings

ADMISSION_WAIT_S: Final = 1.0  # how often a waiting process looks whether it should stop
POLL_S: Final = 0.05
NEXT_ADMISSION_WAIT_S: Final = 0.05  # a round is worth starting with fewer groups than the full lock-step


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    directory, index = Path(arguments[0]), int(arguments[1])
    settings = DemoSettings.read(directory)
    metrics.serve(load_settings().metrics_port, settings.run)
    while sa.weights.newest(directory) is None:
        time.sleep(POLL_S)
    # a restarted process plays on, it repeats nothing
    chance = random.Random(f"{settings.seed}/{index}/{number_of_start(directory, index)}")
    generator = torch.Generator().manual_seed(chance.randrange(2**63))
    policy, lakes, loader = Policy(), Lakes(), sa.weights.Loader(directory)
    with sa.Producer(
        os.environ["STREAMADV_REDIS_URL"], run=settings.run, name=f"rollouts-{index}"
    ) as producer:
        while groups := begin_round(
            producer, lambda: (sa.weights.newest(directory) or 0) >= settings.updates
        ):
            version = loader.refresh(policy)
            maps = [lake for _ in groups for lake in [draw_map(settings.maps, chance)] * GROUP_SIZE]
            episodes = play(policy, lakes, maps, generator)
            for place, group in enumerate(groups):
                members = episodes[place * GROUP_SIZE : (place + 1) * GROUP_SIZE]
                group.push([rollout(i, episode, version) for i, episode in enumerate(members)])
        producer.finish()
    return 0


def number_of_start(directory: Path, index: int) -> int:
    """How often this process was started before."""
    file = directory / f"rollouts-{index}"
    number = len(file.read_text()) if file.exists() else 0
    file.write_text("." * (number + 1))
    return number


def begin_round(producer: Any, stopped: Callable[[], bool]) -> list[Any]:
    """Begin up to GROUPS_PER_ROUND groups: waits for the first, takes of the rest what is admitted at once.

    Waiting for all of them could never end: what is begun counts against `max_staleness`. Empty when stopped.
    """
    groups: list[Any] = []
    while len(groups) < GROUPS_PER_ROUND and not stopped():
        wait = NEXT_ADMISSION_WAIT_S if groups else ADMISSION_WAIT_S
        try:
            groups.append(producer.begin_group(size=GROUP_SIZE, data_source="frozen_lake", timeout=wait))
        except sa.errors.Busy:
            if groups:
                break
    return groups


def rollout(index: int, episode: Episode, version: int) -> dict[str, Any]:
    """One episode as the pipeline takes it: columns, reward, and one step per turn."""
    turns = len(episode.state_keys)
    steps = []
    for turn, state_key in enumerate(episode.state_keys):
        action = PROMPT_LENGTH + 2 * turn + 1  # after the prompt, each turn is a position and an action
        reward = episode.reward if turn == turns - 1 else 0.0
        steps.append({"start": action, "end": action + 1, "reward": reward, "state_key": state_key})
    return {
        "rollout_index": index,
        "input_ids": episode.input_ids,
        "response_mask": episode.response_mask,
        "rollout_log_probs": episode.log_probs,
        "reward": episode.reward,
        "rewards": {"goal": episode.reward},  # estimators over named components have one
        "status": "truncated" if episode.truncated else "completed",
        "model_version": version,
        "steps": steps,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
