"""Agents at the gateway: what the engine says on the wire is what the run gets, once, whatever they do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import streamadv as sa
from streamadv.gateway import GatewayError
from streamadv.run import open_run
from streamadv.store.connection import Connection
from tests.support import group_all, problems
from tests.unit.integrations.fake_engine import serving

from .engine import talkative
from .play import gateway_of, playing, pushed

pytestmark = pytest.mark.server


async def test_a_conversation_is_one_row_as_the_engine_said_it(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin(metadata={"task": "t1"}, data_source="sums")
            said: list[str] = []
            for number in range(3):
                said.append(f"question {number}")
                said.append(await gateway.say(rollout, *said))
            status, answer = await gateway.end(rollout, reward=1.0, metadata={"score": 3})
            assert (status, answer["result"], answer["rows"], answer["turns"]) == (200, "pushed", 1, 3)
            assert await gateway.end(rollout, reward=0.0) == (200, answer)
            status, refusal, headers = await gateway.chat(rollout, "more")
            assert (status, refusal["error"]["code"], headers["x-should-retry"]) == (
                410,
                "rollout_over",
                "false",
            )
    (found,) = pushed(redis_url, run).values()
    ids, logs = (
        [token for _, ids, _ in engine.said for token in ids],
        [log for *_, logs in engine.said for log in logs],
    )
    assert found.sampled == [(ids, logs)]
    assert found.header["metadata"] == {"task": "t1", "score": 3}
    assert {asked["model"] for path, asked in engine.requests if path == "/v1/chat/completions"} == {"tiny"}


async def test_what_the_gateway_answers_has_no_ids(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            _, answer, _ = await gateway.chat(rollout, "hello")
            assert answer["choices"][0].keys() == {"index", "message", "finish_reason"}
            assert "prompt_token_ids" not in answer
            _, answer, _ = await gateway.chat(rollout, "hello", logprobs=True)
            assert answer["choices"][0]["logprobs"]["content"]
            _, events, _ = await gateway.chat(
                rollout, "hello", stream=True, stream_options={"include_usage": True}
            )
            assert events.startswith("data: {")
            assert events.endswith("data: [DONE]\n\n")


async def test_rewritten_history_choices_and_agents_are_rows_of_their_own(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            await gateway.say(rollout, "a long context")
            await gateway.say(rollout, "what it came to, in short", n=2)
            url = rollout["base_url"].replace("/v1", "/a/critic/v1")
            asked = {"messages": [{"role": "user", "content": "a long context"}]}
            assert (await gateway.post(f"{url}/chat/completions", rollout["api_key"], asked))[0] == 200
            _, answer = await gateway.end(rollout, reward=1.0, turn_rewards=[0.0, 0.25, 0.5, 0.75])
            assert answer["rows"] == 4
    (found,) = pushed(redis_url, run).values()
    assert [ids for ids, _ in found.sampled] == [ids for _, ids, _ in engine.said]
    assert list(found.header["agents"]) == [None, None, None, "critic"]


async def test_a_producer_hands_rollouts_out(redis_url: str, run: str) -> None:
    async def play(rollout: sa.AsyncRollout, gateway: Any, http: Any) -> None:
        agent = gateway_of(gateway).access(rollout)
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        status, *_ = await gateway.post(f"{agent.base_url}/chat/completions", agent.api_key, asked)
        assert status == 200
        if rollout.rollout_index == 2:
            raise RuntimeError("the sandbox has died")
        assert (await agent.end(reward=float(rollout.rollout_index), metadata={"mine": 1}))[
            "result"
        ] == "pushed"

    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            async with gateway.producer.group(
                2, redundancy=1, metadata={"task": "t"}, deadline_s=600
            ) as group:
                await group.run(play, gateway, None)
            assert list(group.failures) == [2]
    found = pushed(redis_url, run)
    assert len(found) == 2
    assert {str(rows.header["metadata"]) for rows in found.values()} == {"{'task': 't', 'mine': 1}"}


async def test_the_ways_to_end(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            failed, cancelled, silent, wrong = await gateway.begin(4)
            assert (await gateway.end(failed, fail="the judge broke", reason="aborted"))[1][
                "ended"
            ] == "failed"
            assert (await gateway.end(cancelled, cancel=True))[1]["ended"] == "cancelled"
            assert (await gateway.end(silent, reward=1.0))[1]["detail"] == "no turn has come to the gateway"
            await gateway.say(wrong, "hello")
            for said, words in (
                ({"reward": "much"}, "reward"),
                ({"rewrad": 1}, "rewrad"),
                ({}, "reward"),
                ({"reward": 1, "turn_rewards": [1, 2]}, "turn_rewards"),
            ):
                status, answer = await gateway.end(wrong, **said)
                assert status == 400
                assert words in answer["error"]["message"]
            assert (await gateway.end(wrong, reward=1.0, status="truncated"))[1]["result"] == "pushed"
    joined = open_run(Connection(redis_url), run)
    group_all(joined)
    assert problems(joined) == []


async def test_sampling_is_the_runs(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine, sampling={"temperature": 0.7, "top_p": 0.9}) as gateway:
            (rollout,) = await gateway.begin()
            status, answer, _ = await gateway.chat(rollout, "hi", top_k=5)
            assert (status, answer["error"]["code"]) == (400, "sampling_fixed")
            await gateway.say(rollout, "hi", temperature=0, top_p=1.0, seed=3, max_tokens=100, user="me")
    asked = engine.requests[-1][1]
    assert (asked["temperature"], asked["top_p"], asked["seed"], asked["max_tokens"]) == (0.7, 0.9, 3, 100)
    assert "user" not in asked


async def test_a_retry_gets_the_first_answer_also_from_another_gateway(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as first, playing(redis_url, run, engine) as second:
            (rollout,) = await first.begin()
            answer = await first.say(rollout, "hello")
            elsewhere = {**rollout, "base_url": rollout["base_url"].replace(first.url, second.url)}
            again = {"x_stainless_retry_count": "1"}
            assert await first.say(rollout, "hello", headers=again) == answer
            assert await second.say(elsewhere, "hello", headers=again) == answer
            assert await first.say(rollout, "hello") != answer  # without a mark it is another sample
            key = {"Idempotency_Key": "k1"}
            answers = await asyncio.gather(*(first.say(rollout, "hello", headers=key) for _ in range(3)))
            assert len(set(answers)) == 1
            assert len(engine.said) == 3
            _, told = await second.end(
                {**rollout, "end_url": rollout["end_url"].replace(first.url, second.url)}, reward=1.0
            )
            assert (told["turns"], told["rows"]) == (
                3,
                3,
            )  # also those that the other gateway had appended since
            status, refusal, _ = await first.chat(rollout, "hello")
            assert (status, refusal["error"]["code"]) == (410, "rollout_over")


async def test_an_answer_with_lost_tokens_fails_its_rollout(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            engine.hides = 1  # type: ignore[attr-defined]
            status, answer, headers = await gateway.chat(rollout, "hello")
            assert (status, answer["error"]["code"], headers["x-should-retry"]) == (
                502,
                "lost_tokens",
                "false",
            )
            assert "parser" in answer["error"]["message"]
            assert (await gateway.chat(rollout, "hello"))[0] == 410


async def test_an_engine_that_is_away_hands_its_rollouts_over(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine, serving(talkative(1)) as other:
        async with playing(redis_url, run, engine, other) as gateway:
            (rollout,) = await gateway.begin()
            first = await gateway.say(rollout, "hello")
            assert (len(engine.said), len(other.said)) == (1, 0)
            engine.refusals[:] = [503] * 3
            await gateway.say(rollout, "hello", first, "and?")
            assert (len(engine.said), len(other.said)) == (1, 1)
            other.refusals[:] = [400]
            status, answer, _ = await gateway.chat(rollout, "hello")
            assert (status, answer) == (400, {"error": {"message": "not now"}})
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 1


async def test_no_engine_is_a_503_that_clients_repeat(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamadv.gateway.engines.PAUSE_S", 0.01)
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            engine.refusals[:] = [503] * 4
            status, answer, headers = await gateway.chat(rollout, "hello")
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (
                503,
                "engine_unavailable",
                "2",
            )


async def test_history_that_nobody_has_is_refused(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            status, answer, headers = await gateway.chat(rollout, "hello", "what I said", "and?")
            assert (status, answer["error"]["code"], headers["x-should-retry"]) == (
                409,
                "history_lost",
                "false",
            )
        async with playing(redis_url, run, engine, allow_history=True) as gateway:
            (rollout,) = await gateway.begin()
            await gateway.say(rollout, "an example", "its answer", "and?")


async def test_a_server_that_has_lost_turns_gets_them_again(redis_url: str, run: str) -> None:
    server = Connection(redis_url)
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            first = await gateway.say(rollout, "hello")
            (key,) = server.scripts.scan_iter(match="*:group:*")
            server.scripts.hdel(key, "turn:0:0", "turns:0", "turned")
            await gateway.say(rollout, "hello", first, "and?")
            assert server.scripts.hget(key, "turns:0").startswith(b"2 ")
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 1


async def test_a_client_that_goes_away_stops_its_engine_and_fails_its_rollout(
    redis_url: str, run: str
) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine, grace_s=0.1) as gateway:
            (rollout,) = await gateway.begin()
            reached, go_on = asyncio.Event(), asyncio.Event()
            asking = gateway.front._engines._post

            async def slow(*args: Any) -> Any:
                reached.set()
                await go_on.wait()
                return await asking(*args)

            gateway.front._engines._post = slow  # type: ignore[method-assign]
            client = asyncio.create_task(gateway.chat(rollout, "hello"))
            await reached.wait()
            client.cancel()
            for _ in range(500):
                status, answer = (
                    await gateway.end(rollout, reward=1.0) if not len(gateway.front.sessions) else (0, {})
                )
                if status:
                    break
                await asyncio.sleep(0.02)
            assert answer["detail"] == "its client went away in the middle of an answer"
            assert engine.said == []


async def test_a_group_that_is_not_admitted_is_a_503(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        with sa.Producer(redis_url, run, settings=sa.RunSettings(batch_groups=1, max_staleness=0)):
            pass
        async with playing(redis_url, run, engine) as gateway:
            await gateway.begin()
            key = gateway.keys.sign("operator", run, None)
            status, answer, headers = await gateway.post(f"{gateway.url}/v1/groups", key, {"timeout_s": 0})
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "not_admitted", "2")
            assert "max_staleness" in answer["error"]["message"]


async def test_end_raises_for_a_wrong_reward(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            group = await gateway.producer.begin_group(1)
            (rollout,) = group
            agent = gateway_of(gateway).access(rollout)
            await gateway.post(
                f"{agent.base_url}/chat/completions",
                agent.api_key,
                {"messages": [{"role": "user", "content": "hi"}]},
            )
            with pytest.raises(sa.errors.TrajectoryError, match="reward"):
                await agent.end(reward=float("nan"))
            with pytest.raises(GatewayError, match="status"):
                await agent.end(reward=1.0, status="finished")
            assert not rollout.ended
            await agent.end(reward=1.0)
            assert rollout.ended
