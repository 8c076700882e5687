"""The agent. It looks into boxes, which is its tool, until it says a colour."""

import asyncio
import json
import re
from pathlib import Path

from policy import SETTINGS, new_engine

import streamadv as sa
from streamadv.integrations.engines import Episode

rollouts = SETTINGS["rollouts"]
tasks = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]


async def play(rollout, engine, task):
    """One rollout. What it raises fails this rollout alone."""
    episode, said = Episode(), []
    messages = [{"role": "user", "content": task["question"]}]
    while len(said) < rollouts["max_turns"]:
        turn = await engine.chat(messages, max_tokens=rollouts["max_tokens"])
        episode.add(turn)  # its tokens and log-probs
        said.append(re.sub(r".*\b(\w+)\W*", r"\1", turn.text, flags=re.DOTALL))  # the last word
        found = task["boxes"].get(said[-1])
        if found is None:
            break
        messages += [turn.message, {"role": "user", "content": found}]
    # Without a reward: the judge brings it, and reads the metadata.
    await rollout.push(
        **episode.record(), metadata={"said": said, "box": task["box"], "colour": task["colour"]}
    )


async def main():
    prompts = sa.Prompts(tasks, epochs=rollouts["epochs"], shuffle=0)
    weights = sa.weights.Loader("weights")
    async with (
        new_engine() as engine,
        sa.Producer(sa.redis_url()) as producer,
        asyncio.TaskGroup() as players,
    ):
        await producer.wait_for_weights()  # of the trainer
        async for task, group in producer.prompts(prompts, size=rollouts["group_size"]):
            await engine.refresh(weights)  # the newest ones
            players.create_task(group.run(play, engine, task))


sa.run_program(main)
