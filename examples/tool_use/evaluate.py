"""Evaluation: versions that were kept answer the same questions, on which none was trained.

It may run during training or after it. `streamadv evals` shows the rewards by version.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import torch
from directory import Latency, Question
from policy import new_policy
from rollouts import play

import streamadv as sa
from streamadv.integrations.engines import LocalEngine


async def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    chance = random.Random(f"evaluation/{options.seed}")
    latency = Latency(options.latency, chance)
    questions = [Question.draw(chance) for _ in range(options.questions)]
    kept = sa.weights.versions(options.weights)
    policy = new_policy()
    engine = LocalEngine(policy, max_batch=256, seed=options.seed)
    async with sa.Producer(sa.redis_url()) as producer:
        for version in [version for version in kept if version % options.every == 0 or version == kept[-1]]:
            engine.version = sa.weights.load(sa.weights.path_of(options.weights, version), policy)
            async with asyncio.TaskGroup() as tasks:
                for question in questions:
                    group = await producer.begin_group(4, role="eval", data_source=options.data_source)
                    tasks.create_task(group.run(play, question, engine, latency))
        await producer.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder of the versions")
    parser.add_argument("--every", type=int, default=10, help="versions: its multiples, and the newest")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--data-source", default="directory", help="name of the results")
    parser.add_argument("--latency", type=float, default=0.01, help="median seconds of a tool call")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    sa.run_program(main, parser.parse_args())
