"""Rollouts: agents in one event loop that share a model and a slow tool. Any number of these processes may run."""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import torch
from directory import MAX_TURNS, TOKENS_PER_TURN, Latency, Question, asks_for
from policy import new_policy

import streamadv as sa
from streamadv.integrations.engines import Episode, LocalEngine


async def play(rollout: sa.AsyncRollout, question: Question, engine: LocalEngine, latency: Latency) -> None:
    """One rollout: the policy calls the tool until it answers. An exception in here would fail it alone."""
    episode = Episode(question.prompt)
    while True:
        turn = await engine.complete(episode.tokens, max_tokens=TOKENS_PER_TURN)
        episode.add(turn)
        name = asks_for(turn.token_ids)
        if name is None or episode.turns == MAX_TURNS:
            break
        await asyncio.sleep(latency.draw())
        episode.observe(question.reply(name, episode.turns))
    await rollout.push(**episode.record(status="completed"), reward=question.reward(turn.token_ids))


async def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    chance = random.Random(f"rollouts/{options.seed}")
    latency = Latency(options.latency, chance)
    engine = LocalEngine(new_policy(), max_batch=256, seed=options.seed)
    weights = sa.weights.Loader(options.weights)
    async with sa.Producer(sa.redis_url()) as producer:
        await producer.wait_for_weights()  # the trainer that names some also paces the groups
        async with asyncio.TaskGroup() as tasks:
            async for group in producer.groups(options.group_size, data_source="directory", ahead=0):
                await engine.refresh(weights)  # they are there when a group is admitted
                tasks.create_task(group.run(play, Question.draw(chance, options.levels), engine, latency))
        await producer.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder of the versions")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--levels", type=int, choices=(1, 2, 3), default=3, help="of a question")
    parser.add_argument("--latency", type=float, default=0.1, help="median seconds of a tool call")
    parser.add_argument("--seed", type=int, default=0)
    sa.run_program(main, parser.parse_args())
