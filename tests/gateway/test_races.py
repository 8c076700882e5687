"""Requests that meet each other: ends at once, retries elsewhere, deadlines under an answer, engines that stall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import streamadv as sa
from streamadv.store.connection import Connection
from tests.unit.integrations.fake_engine import serving

from .engine import talkative
from .play import Playing, playing, pushed

pytestmark = pytest.mark.server


def at(gateway: Playing, rollout: dict[str, Any], other: Playing) -> dict[str, Any]:
    """The rollout as another gateway plays it."""
    return {
        name: value.replace(gateway.url, other.url) if isinstance(value, str) else value
        for name, value in rollout.items()
    }


class Gate:
    """Holds back the requests of a gateway to its engines, or their answers."""

    def __init__(self, gateway: Playing) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self._post = gateway.front._engines._post
        gateway.front._engines._post = self._slow  # type: ignore[method-assign]

    async def _slow(self, *args: Any) -> Any:
        self.reached.set()
        await self.go_on.wait()
        return await self._post(*args)


async def until(found: Callable[[], Any]) -> Any:
    """What is found once it is there."""
    async with asyncio.timeout(30):
        while not (value := found()):  # noqa: ASYNC110  what others have at the server has no event
            await asyncio.sleep(0.02)
        return value


async def test_ends_at_once_are_one_and_all_hear_of_it(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as first, playing(redis_url, run, engine) as second:
            (rollout,) = await first.begin()
            await first.say(rollout, "hello")
            elsewhere = at(first, rollout, second)
            answers = await asyncio.gather(*(second.end(elsewhere, reward=float(n)) for n in range(4)))
            assert {str(answer) for answer in answers} == {str(answers[0])}
            assert answers[0][1]["result"] == "pushed"
            assert await second.end(elsewhere, reward=9.0) == answers[0]
            assert (await first.end(rollout, reward=9.0))[1]["result"] == "duplicate"
    assert len(pushed(redis_url, run)) == 1


async def test_a_retry_hears_what_another_gateway_has_answered_since(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as first, playing(redis_url, run, engine) as second:
            (rollout,) = await first.begin()
            elsewhere = at(first, rollout, second)
            said = ["hello", await first.say(rollout, "hello"), "and?"]
            await second.say(elsewhere, *said)  # it knows the rollout now
            said += [await first.say(rollout, *said), "go on"]
            answer = await first.say(rollout, *said)
            again = {"x_stainless_retry_count": "1"}
            assert await second.say(elsewhere, *said, headers=again) == answer
            assert len(engine.said) == 4  # type: ignore[attr-defined]


async def test_a_retry_waits_for_the_commit_that_its_client_has_left(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            await gateway.say(rollout, "hello")
            reached, go_on = asyncio.Event(), asyncio.Event()
            appending = gateway.front.sessions._store.append

            async def slow(*args: Any) -> Any:
                reached.set()
                await go_on.wait()
                return await appending(*args)

            gateway.front.sessions._store.append = slow  # type: ignore[method-assign]
            client = asyncio.create_task(gateway.chat(rollout, "another"))
            await reached.wait()
            client.cancel()
            session = next(iter(gateway.front.sessions._open.values()))
            await until(lambda: not session.asking)
            again = asyncio.create_task(
                gateway.say(rollout, "another", headers={"x_stainless_retry_count": "1"})
            )
            await until(lambda: session.asking)
            go_on.set()
            await again
            assert len(engine.said) == 2  # type: ignore[attr-defined]
            assert (await gateway.end(rollout, reward=1.0))[1]["turns"] == 2


async def test_a_first_answer_that_takes_long_keeps_its_group_open(redis_url: str, run: str) -> None:
    server = Connection(redis_url)

    def deadline() -> float:
        (key,) = server.scripts.scan_iter(match="*:open")
        return float(server.scripts.zrange(key, 0, -1, withscores=True)[0][1])

    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin(deadline_s=30)
            first, gate = deadline(), Gate(gateway)
            client = asyncio.create_task(gateway.chat(rollout, "hello"))
            await gate.reached.wait()
            await until(lambda: deadline() > first + 500_000)
            gate.go_on.set()
            await client


async def test_an_engine_that_stalls_is_given_up(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine, answer_s=0.2) as gateway:
            (rollout,) = await gateway.begin()
            gate = Gate(gateway)
            status, answer, headers = await gateway.chat(rollout, "hello")
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (
                503, "engine_unavailable", "2",
            )  # fmt: skip
            gate.go_on.set()
            await gateway.say(rollout, "hello")


async def test_a_client_that_gives_up_one_of_its_requests_is_still_there(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine, grace_s=0.1) as gateway:
            (rollout,) = await gateway.begin()
            gate = Gate(gateway)
            clients = [asyncio.create_task(gateway.chat(rollout, f"hello {n}")) for n in range(2)]
            await until(lambda: [one.asking for one in gateway.front.sessions._open.values()] == [2])
            (session,) = gateway.front.sessions._open.values()
            clients[0].cancel()
            await until(lambda: session.cut_at)
            gate.go_on.set()
            assert (await clients[1])[0] == 200
            assert session.cut_at is None
            assert (await gateway.end(rollout, reward=1.0))[1]["result"] == "pushed"


@pytest.mark.parametrize("way", ["tokens", "rows"])
async def test_what_could_not_be_pushed_is_refused_at_its_turn(
    redis_url: str, run: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "rows":
        monkeypatch.setattr("streamadv.gateway.sessions.MAX_ROWS", 4)
    settings = sa.RunSettings(max_trajectory_bytes=8192)
    with sa.Producer(redis_url, run, settings=settings if way == "tokens" else None):
        pass
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            for number in range(30):  # each time another context: another row
                status, answer, _ = await gateway.chat(rollout, f"{number} " + "x" * 50)
                if status != 200:
                    break
            assert (status, answer["error"]["code"]) == (413, "rollout_too_large")
            status, answer = await gateway.end(rollout, reward=1.0, status="truncated")
            assert (status, answer["result"]) == (200, "pushed")
            assert 3 < answer["rows"] < 12


async def test_fields_that_change_what_is_sampled_do_not_reach_the_engine(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            for name, value in (("bad_words", ["no"]), ("allowed_token_ids", [1]), ("min_tokens", 5)):
                status, answer, _ = await gateway.chat(rollout, "hi", **{name: value})
                assert (status, answer["error"]["code"]) == (400, "sampling_fixed")
            odd = {"kv_transfer_params": {}, "chat_template": "x", "priority": -9, "verbosity": "low"}
            await gateway.say(rollout, "hi", stop=["x"], tool_choice="none", **odd)
    asked = engine.requests[-1][1]
    assert not asked.keys() & odd.keys()
    assert asked["stop"] == ["x"]
