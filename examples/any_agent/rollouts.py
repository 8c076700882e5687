"""Hands rollouts out to the agent: each gets a URL and a key of the gateway, and a reward for its answer."""

from __future__ import annotations

import argparse
import asyncio

from agent import solve
from openai import AsyncOpenAI, OpenAIError
from task import House

import streamadv as sa
from streamadv.gateway import Gateway


async def play(rollout: sa.AsyncRollout, gateway: Gateway, client: AsyncOpenAI) -> None:
    house = House()
    agent = gateway.access(rollout)
    try:
        await solve(client.with_options(base_url=agent.base_url, api_key=agent.api_key), house)
    except OpenAIError as error:
        await agent.end(fail=str(error))
    else:
        await agent.end(reward=house.reward())


async def main(options: argparse.Namespace) -> None:
    gateway = Gateway()  # of `streamadv up --gateway`
    client = AsyncOpenAI(api_key="of each rollout", max_retries=8)
    async with sa.Producer(sa.redis_url()) as producer, asyncio.TaskGroup() as tasks:
        await producer.wait_for_weights()  # the trainer that names some also paces the groups
        async for group in producer.groups(options.group_size, data_source="house", deadline_s=600):
            tasks.create_task(group.run(play, gateway, client))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group-size", type=int, default=8)
    sa.run_program(main, parser.parse_args())
