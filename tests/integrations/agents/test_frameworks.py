"""Frameworks of agents, as they are, with a tool: what was pushed is what the engine has said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.engine import Engine, caller
from tests.gateway.play import playing, pushed
from tests.unit.integrations.fake_engine import FakeEngine, serving

pytestmark = [pytest.mark.server, pytest.mark.slow]
QUESTION = "What is at 7?"
ANSWER = "a door"


def look(at: int) -> str:
    """Look at a place.

    Args:
        at: the place.
    """
    return f"{ANSWER} at {at}"


async def by_openai_agents(url: str, key: str) -> str:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        model = OpenAIChatCompletionsModel("gpt-4o", client)
        agent = Agent(name="scout", instructions="Look.", model=model, tools=[function_tool(look)])
        return str((await Runner.run(agent, QUESTION)).final_output)


async def by_openai_agents_with_responses(url: str, key: str) -> str:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        model = OpenAIResponsesModel("gpt-4o", client)
        agent = Agent(name="scout", instructions="Look.", model=model, tools=[function_tool(look)])
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)


async def by_langgraph(url: str, key: str) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="gpt-4o", base_url=url, api_key=key)  # type: ignore[arg-type]
    found = await create_react_agent(model, [look]).ainvoke({"messages": [("user", QUESTION)]})
    return str(found["messages"][-1].content)


async def by_pydantic_ai(url: str, key: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("gpt-4o", provider=OpenAIProvider(base_url=url, api_key=key))
    return str((await Agent(model, tools=[look]).run(QUESTION)).output)


async def by_smolagents(url: str, key: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("gpt-4o", api_base=url, api_key=key)
    agent = ToolCallingAgent([tool(look)], model, verbosity_level=0)
    return str(await asyncio.to_thread(agent.run, QUESTION))


def looks_and_tells() -> FakeEngine:
    return caller('<hm>!look {"at":  7}', ANSWER)


def says_its_last_word_by_a_tool() -> FakeEngine:
    """For smolagents, which writes calls and results of tools anew, as text."""
    tells = f'!final_answer {{"answer": "{ANSWER}"}}'
    looks = '<hm>!look {"at":  7}'
    return Engine(
        lambda prompt: tells if f"{ANSWER} at 7".encode() in bytes(t % 256 for t in prompt) else looks
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("play", "engine", "rows"),
    [
        (by_openai_agents, looks_and_tells, 1),
        (by_openai_agents_with_responses, looks_and_tells, 1),
        (by_langgraph, looks_and_tells, 1),
        (by_pydantic_ai, looks_and_tells, 1),
        (by_smolagents, says_its_last_word_by_a_tool, 2),
    ],
    ids=lambda value: value.__name__ if callable(value) and value.__name__.startswith("by") else "",
)
async def test_an_agent_of_a_framework(
    redis_url: str,
    run: str,
    play: Callable[[str, str], Awaitable[str]],
    engine: Callable[[], FakeEngine],
    rows: int,
) -> None:
    with serving(engine()) as serves:
        assert isinstance(serves, Engine)
        async with playing(redis_url, run, serves, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            assert ANSWER in await play(rollout["base_url"], rollout["api_key"])
            _, ended = await gateway.end(rollout, reward=1.0)
            assert (ended["turns"], ended["rows"]) == (2, rows), ended
    (found,) = pushed(redis_url, run).values()
    said: Any = serves.said
    assert [token for ids, _ in found.sampled for token in ids] == [
        token for _, ids, _ in said for token in ids
    ]
    assert [log for _, logs in found.sampled for log in logs] == [log for *_, logs in said for log in logs]
