"""A run waits for the groups that agents play, and for launchers until they have finished, but for no gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import streamadv as sa
from streamadv.cli import main
from streamadv.cli.status import lines_of
from streamadv.run import Run, open_run
from streamadv.run.heartbeats import Attendance, is_over
from streamadv.status import read_status
from streamadv.store.connection import Connection
from tests.support import group_all
from tests.unit.integrations.fake_engine import serving

from .engine import talkative
from .play import Playing, gateway_of, playing

pytestmark = pytest.mark.server


def states(joined: Run) -> list[str]:
    return sorted(producer.state for producer in read_status(joined).producers)


async def finish(gateway: Playing) -> None:
    key = gateway.keys.sign("operator", gateway.producer.run, None)
    status, answer, _ = await gateway.post(f"{gateway.url}/v1/finish", key, {})
    assert (status, answer["finished"]) == (200, True)


async def test_producers_that_have_finished_end_a_run_before_a_gateway(redis_url: str, run: str) -> None:
    async def play(rollout: sa.AsyncRollout, gateway: Playing) -> None:
        agent = gateway_of(gateway).access(rollout)
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        assert (await gateway.post(f"{agent.base_url}/chat/completions", agent.api_key, asked))[0] == 200
        assert not is_over(joined, attendance)
        await agent.end(reward=1.0)

    joined = open_run(Connection(redis_url), run)
    attendance = Attendance(joined)
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            assert states(joined) == ["serves"]
            assert not is_over(joined, attendance)  # a producer may come yet
            async with sa.Producer(redis_url, run) as producer:
                async with producer.group(2, deadline_s=600) as group:
                    await group.run(play, gateway)
                await producer.finish()
            group_all(joined)
            assert is_over(joined, attendance)
        assert states(joined) == ["finished"]  # the gateway has gone


async def test_settings_do_not_change_under_a_gateway(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ["runs", "change", "--redis", redis_url, "--run", run, "--max-bytes", "64mb"]
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine):
            assert await asyncio.to_thread(main, change) == 1
            assert f"run {run} is in use by producer " in capsys.readouterr().err
        assert await asyncio.to_thread(main, change) == 0


async def test_a_run_waits_for_launchers_until_they_have_finished(redis_url: str, run: str) -> None:
    joined = open_run(Connection(redis_url), run)
    attendance = Attendance(joined)
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            first, second = await gateway.begin(2)
            assert states(joined) == ["open"]
            for rollout in (first, second):
                await gateway.say(rollout, "hello")
            await gateway.end(first, reward=1.0)
            group_all(joined)
            assert not is_over(joined, attendance)
            await finish(gateway)
            assert not is_over(joined, attendance)  # a rollout is open
            await gateway.end(second, reward=1.0)
            group_all(joined)
            assert states(joined) == ["finished"]
            assert is_over(joined, attendance)
            await gateway.begin()
            assert states(joined) == ["open"]


async def test_only_an_operator_finishes(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            for key in ("", rollout["api_key"], rollout["close_key"]):
                status, *_ = await gateway.post(f"{gateway.url}/v1/finish", key, {})
                assert status in (401, 403)


async def test_status_says_what_a_gateway_plays(redis_url: str, run: str) -> None:
    async def shown(gateway: Playing) -> str:
        await gateway.producer._drive(gateway.producer._logic.heartbeat())
        lines = map(str.strip, lines_of(read_status(joined), joined.manifest))
        (line,) = [line for line in lines if line.startswith("producer ")]
        return line.partition(": ")[2]

    joined = open_run(Connection(redis_url), run)
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            assert (await shown(gateway)).endswith(" ago, 0 rollouts open")
            rollouts: list[dict[str, Any]] = await gateway.begin(2)
            for rollout in rollouts:
                await gateway.say(rollout, "hello")
            for session in gateway.front.sessions._open.values():
                session.seen -= 90.0
            await gateway.say(rollouts[1], "hello again")
            line = await shown(gateway)
            assert line.startswith("alive")
            assert line.endswith(", 2 rollouts open, one without a turn for 90 s")
