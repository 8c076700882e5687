"""A policy plays episodes: all environments in lock-step, one forward pass per turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from .environment import Episode, Lakes, Map, prompt
from .policy import Cache, Policy


@torch.no_grad()
def play(policy: Policy, lakes: Lakes, maps: Sequence[Map], generator: torch.Generator) -> list[Episode]:
    """One sampled episode on each of `maps`, in their order. An episode that has ended leaves the lock-step."""
    episodes = [prompt(lake) for lake in maps]
    for episode, lake, position in zip(episodes, maps, lakes.reset(maps), strict=True):
        episode.observe(lake, position)
    running = list(range(len(episodes)))
    cache = Cache(len(episodes))
    seen = 0
    while running:
        tokens = torch.tensor([episodes[index].input_ids[seen:] for index in running])
        seen += tokens.shape[1]
        log_probs = F.log_softmax(policy(tokens, cache)[:, -1], dim=-1)
        actions = torch.multinomial(log_probs.exp(), 1, generator=generator)
        decisions = zip(
            actions.squeeze(1).tolist(), log_probs.gather(1, actions).squeeze(1).tolist(), strict=True
        )
        going_on: list[int] = []
        for row, (index, (action, log_prob)) in enumerate(zip(running, decisions, strict=True)):
            episode = episodes[index]
            episode.act(action, log_prob)
            position, reward, terminated, episode.truncated = lakes.step(index, action)
            episode.reward += reward
            if not (terminated or episode.truncated):
                episode.observe(maps[index], position)
                going_on.append(row)
        if len(going_on) < len(running):
            cache.keep(torch.tensor(going_on, dtype=torch.int64))
            running = [running[row] for row in going_on]
    return episodes
