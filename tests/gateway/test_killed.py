"""Gateway, server, engine and agent are killed while agents play: the run has what they have seen, once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from streamadv.gateway import Keys
from streamadv.run import open_run
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer, free_port
from tests.support import some_of
from tests.unit.integrations.fake_engine import END, ROLES, FakeEngine, serving

from .engine import Engine, talkative
from .play import pushed

pytestmark = [pytest.mark.server, pytest.mark.processes, pytest.mark.slow]
TURNS = 6
SIZE = 3


class Process:
    """A gateway process on a port of its own, started again after each kill."""

    def __init__(self, redis_url: str, run: str, *words: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = ["gateway", "--port", str(self.port), "--redis", redis_url, "--run", run, *words]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "streamadv",
            *self._words,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ},
        )
        assert self._process.stdout is not None
        assert (await self._process.stdout.readline()).decode().strip() == self.url

    async def stop(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return await self._process.wait()


@asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    await process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            await process.stop(signal.SIGKILL)


async def until_answered(http: aiohttp.ClientSession, url: str, key: str, body: Any) -> Any:
    """As SDKs do: ask again while nobody answers or says to, and mark it."""
    number = 0
    while True:
        headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(number)}
        with suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            async with http.post(url, json=body, headers=headers) as answer:
                if answer.status < 300:
                    return await answer.json()
                assert answer.status in (429, 503), await answer.text()
        number += 1
        await asyncio.sleep(0.05)


async def play(
    http: aiohttp.ClientSession, rollout: dict[str, Any], turned: asyncio.Queue[None], may_end: asyncio.Event
) -> list[str]:
    messages, heard = [], []
    for number in range(TURNS):
        messages.append({"role": "user", "content": f"question {number}"})
        url = f"{rollout['base_url']}/chat/completions"
        answer = await until_answered(http, url, rollout["api_key"], {"messages": messages})
        messages.append(answer["choices"][0]["message"])
        heard.append(str(answer["choices"][0]["message"]["content"]))
        turned.put_nowait(None)
    await may_end.wait()
    ended = await until_answered(
        http, rollout["end_url"], rollout["close_key"], {"reward": float(rollout["index"])}
    )
    assert ended["result"] in ("pushed", "duplicate")
    return heard


@pytest.mark.parametrize("number", some_of([signal.SIGKILL, signal.SIGTERM], 2))
async def test_turns_outlive_their_gateway(redis_url: str, run: str, number: int) -> None:
    async def stop(process: Process) -> None:
        status = await process.stop(number)
        assert status == (0 if number == signal.SIGTERM else -number)
        await process.start()

    await check_kills(redis_url, run, stop)


@pytest.mark.parametrize("forgets", some_of([False, True], 2))
async def test_turns_outlive_the_server(tmp_path: Path, run: str, forgets: bool) -> None:
    """One that forgets is told them again by the gateway."""
    with EmbeddedServer(None if forgets else tmp_path / "data", appendfsync="always") as server:

        async def stop(process: Process) -> None:
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

        # What was pushed to a server that forgets comes again from its producer for some seconds: no end before a kill.
        await check_kills(server.url, run, stop, ends_last=forgets)


@pytest.mark.release
async def test_turns_outlive_server_and_gateway_at_once(tmp_path: Path, run: str) -> None:
    with EmbeddedServer(tmp_path / "data", appendfsync="always") as server:

        async def stop(process: Process) -> None:
            await process.stop(signal.SIGKILL)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await process.start()

        await check_kills(server.url, run, stop)


@pytest.mark.release
async def test_turns_outlive_their_engine(redis_url: str, run: str) -> None:
    """It dies in the middle of answers: nothing of them counts."""

    async def stop(process: Process) -> None:
        engine.dies = 2

    engine = talkative()
    assert isinstance(engine, Engine)
    await check_kills(redis_url, run, stop, engine)


#: Asks twice, without any package.
AGENT = """
import json, os, urllib.request
said = []
for number in range(2):
    said.append({"role": "user", "content": f"question {number}"})
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps({"messages": said}).encode(), key)
    said.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
"""


async def test_an_agent_that_is_killed_in_the_middle_of_a_turn(redis_url: str, run: str) -> None:
    """Its rollout fails after the grace, its sibling is pushed, and nothing of the group is left open."""

    def policy(prompt: Sequence[int]) -> str:
        if prompt.count(ROLES["user"]) == 2:
            reached.set()
            go_on.wait()
        return "an answer"

    reached, go_on = threading.Event(), threading.Event()
    with serving(Engine(policy)) as engine:
        process = Process(redis_url, run, "--engine", engine.url, "--mode", "chat", "--grace-s", "0.2")
        async with running(process), aiohttp.ClientSession() as http:
            key = Keys.from_environment().sign("operator", run, None)
            asked = {"size": 1, "redundancy": 1}
            begun = await until_answered(http, f"{process.url}/v1/groups", key, asked)
            killed, sibling = begun["rollouts"]
            found = {"OPENAI_BASE_URL": killed["base_url"], "OPENAI_API_KEY": killed["api_key"]}
            agent = await asyncio.create_subprocess_exec(
                sys.executable, "-c", AGENT, env={**os.environ, **found}
            )
            await asyncio.to_thread(reached.wait)
            agent.kill()
            await agent.wait()
            await until_over(http, killed)
            ended = await until_answered(http, killed["end_url"], killed["close_key"], {"reward": 1.0})
            assert ended["detail"] == "its client went away in the middle of an answer"
            go_on.set()
            url = f"{sibling['base_url']}/chat/completions"
            hello = {"messages": [{"role": "user", "content": "hello"}]}
            await until_answered(http, url, sibling["api_key"], hello)
            ended = await until_answered(http, sibling["end_url"], sibling["close_key"], {"reward": 1.0})
            assert ended["result"] == "pushed"
    assert [name.rpartition("/")[2] for name in pushed(redis_url, run)] == ["1"]
    assert not read_status(open_run(Connection(redis_url), run)).groups.open


async def until_over(http: aiohttp.ClientSession, rollout: dict[str, Any]) -> None:
    url, key = rollout["base_url"].removesuffix("/v1"), {"Authorization": f"Bearer {rollout['close_key']}"}
    while True:
        async with http.get(url, headers=key) as answer:
            if answer.status == 410:
                return
        await asyncio.sleep(0.05)


async def check_kills(
    redis_url: str,
    run: str,
    kill: Callable[[Process], Awaitable[None]],
    engine: FakeEngine | None = None,
    ends_last: bool = False,
) -> None:
    """Agents play while something is killed: what they have heard is what was pushed, as the engine said it."""
    with serving(engine or talkative()) as serves:
        process = Process(redis_url, run, "--engine", serves.url, "--mode", "chat")
        turned: asyncio.Queue[None] = asyncio.Queue()
        may_end = asyncio.Event()
        if not ends_last:
            may_end.set()
        async with running(process), aiohttp.ClientSession() as http:
            key = Keys.from_environment().sign("operator", run, None)
            begun = await until_answered(http, f"{process.url}/v1/groups", key, {"size": SIZE})
            players = [asyncio.create_task(play(http, one, turned, may_end)) for one in begun["rollouts"]]
            for _ in range(3):
                for _ in range(4):
                    await turned.get()
                await kill(process)
            may_end.set()
            heard = await asyncio.gather(*players)
    found = pushed(redis_url, run)
    assert isinstance(serves, Engine)
    wire = {tuple(ids): logs for _, ids, logs in serves.said}
    assert len(found) == SIZE
    for name, rows in found.items():
        answers = heard[int(name.rpartition("/")[2])]
        ((ids, logs),) = rows.sampled
        assert ids == [token for text in answers for token in [*text.encode(), END]]
        said = [wire[*text.encode(), END] for text in answers]
        assert logs == [log for part in said for log in part]
