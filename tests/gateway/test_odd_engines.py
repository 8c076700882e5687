"""Engines that say what nobody can train on, or nothing that is an answer: the client hears it, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.integrations.fake_engine import END, serving

from .engine import Engine, caller, talkative
from .play import Playing, playing, pushed

pytestmark = pytest.mark.server
MODES = pytest.mark.parametrize("mode", ["chat", "tokens"])


class Odd(Engine):
    """Changes what it has sampled: `change` gets each choice that carries tokens, `answers` each answer of a path."""

    def __init__(self, text: str = "an answer") -> None:
        super().__init__(lambda _: text)
        self.change: Callable[[dict[str, Any]], object] = lambda _: None
        self.answers: Callable[[str, dict[str, Any]], Any] = lambda _, answer: answer

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        made = super().answer(path, asked)
        for choice in made.get("choices", ()) if not path.endswith("/derender") else ():
            self.change(choice)
        found: dict[str, Any] = self.answers(path, made)
        return found


def set_log_prob(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda choice: choice["logprobs"]["content"][0].update(logprob=value)


def set_id(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda choice: choice["token_ids"].__setitem__(0, value)


@pytest.mark.parametrize(
    ("mode", "change", "words"),
    [
        ("chat", set_log_prob(None), "finite"),
        ("tokens", set_log_prob(None), "finite"),
        ("chat", set_id(2**31), "token ids"),
        ("tokens", set_id(2**31), "token ids"),
        ("chat", set_id(-1), "token ids"),
        ("chat", set_id(1.5), "token ids"),
        ("chat", lambda choice: choice["logprobs"]["content"].pop(), "log-probs"),
        ("tokens", lambda choice: choice["logprobs"]["content"].pop(), "log-probs"),
        ("chat", lambda choice: choice.update(logprobs=None), "log-probs"),
        ("tokens", lambda choice: choice.update(logprobs=None), "log-probs"),
    ],
)
async def test_what_nobody_can_train_on_fails_its_rollout(
    redis_url: str, run: str, mode: str, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    engine = Odd()
    engine.change = change
    with serving(engine):
        async with playing(redis_url, run, engine, mode=mode) as gateway:
            (rollout,) = await gateway.begin()
            status, answer, headers = await gateway.chat(rollout, "hello")
            assert (status, answer["error"]["code"]) == (502, "lost_tokens"), answer
            assert words in answer["error"]["message"]
            assert headers["x-should-retry"] == "false"
            assert (await gateway.chat(rollout, "hello"))[0] == 410


@MODES
@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, {"choices": [{}]}, {"error": "no"}, [], "no", {"choices": None}, {"token_ids": 5}],
)
async def test_what_is_no_answer_may_be_asked_again(redis_url: str, run: str, mode: str, answer: Any) -> None:
    engine = Odd()
    with serving(engine):
        async with playing(redis_url, run, engine, mode=mode) as gateway:
            (rollout,) = await gateway.begin()
            paths = ("/render", "/generate", "/derender") if mode == "tokens" else ("/completions",)
            for odd in paths:
                engine.answers = lambda path, made, odd=odd: answer if path.endswith(odd) else made
                status, said, headers = await gateway.chat(rollout, "hello")
                assert (status, headers.get("Retry-After")) in ((503, "2"), (502, None)), said
                if status == 502:  # an answer without token ids
                    return
            engine.answers = lambda _, made: made
            assert await gateway.say(rollout, "hello") == "an answer"
            assert (await gateway.end(rollout, reward=1.0))[1]["turns"] == 1


async def test_an_answer_without_end_is_given_up(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamadv.gateway.engines.MAX_ANSWER", 1000)
    monkeypatch.setattr("streamadv.gateway.engines.PAUSE_S", 0.01)
    with serving(Odd("x" * 2000)) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            status, answer, _ = await gateway.chat(rollout, "hello")
            assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
            assert "larger than 1000 bytes" in answer["error"]["message"]


async def test_an_answer_that_says_nothing(redis_url: str, run: str) -> None:
    """Its only token is the one that ends it, and agents do not see that."""
    with serving(caller("")) as engine:
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            assert await gateway.say(rollout, "hello") == ""
            assert await gateway.say(rollout, "hello", "", "are you there?") == ""
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 1
    (found,) = pushed(redis_url, run).values()
    assert found.sampled[0][0] == [END, END]


@pytest.mark.parametrize(
    "arguments", ["[" * 5000, '{"at": 1' + "0" * 400 + "}", '{"at": NaN}', "\\ud800", '"text"', ""]
)
@pytest.mark.parametrize("api", ["chat/completions", "messages", "responses"])
async def test_arguments_that_the_policy_writes_as_it_likes(
    redis_url: str, run: str, arguments: str, api: str
) -> None:
    with serving(caller(f"!look {arguments}", "a door")) as engine:
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            name = "input" if api == "responses" else "messages"
            asked = {name: [{"role": "user", "content": "look"}], "max_tokens": 9000}
            status, answer, _ = await gateway.post(f"{rollout['base_url']}/{api}", rollout["api_key"], asked)
            assert status == 200, answer
            assert (await gateway.end(rollout, reward=1.0))[1]["turns"] == 1


async def test_gateways_by_turns_know_what_each_other_have_answered(redis_url: str, run: str) -> None:
    """Behind a balancer that does not keep a rollout at one gateway, before a template that drifts."""
    engine = talkative()
    assert isinstance(engine, Engine)
    engine.drifts = True
    with serving(engine):
        async with (
            playing(redis_url, run, engine, mode="tokens") as first,
            playing(redis_url, run, engine, mode="tokens") as second,
        ):
            (rollout,) = await first.begin()
            said: list[str] = []
            for number in range(6):
                one: Playing = (first, second)[number % 2]
                at = {**rollout, "base_url": rollout["base_url"].replace(first.url, one.url)}
                said.append(f"question {number}")
                said.append(await one.say(at, *said))
            assert (await first.end(rollout, reward=1.0))[1]["rows"] == 1
    (found,) = pushed(redis_url, run).values()
    assert found.sampled[0][0] == [token for _, ids, _ in engine.said for token in ids]


async def test_a_launcher_that_says_odd_things_is_told_so(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            key = gateway.keys.sign("operator", run, None)
            for said in (
                {"timeout_s": "x"}, {"timeout_s": []}, {"size": "8"}, {"size": 10**9}, {"deadline_s": "x"}, {"role": 5},
                {"metadata": 5}, {"data_source": 5}, {"group_id": "a b"}, {"redundancy": -1}, {"round": 5},
            ):  # fmt: skip
                status, answer, _ = await gateway.post(f"{gateway.url}/v1/groups", key, said)
                assert status == 400, (said, answer)
            (rollout,) = await gateway.begin()
            await gateway.say(rollout, "hello")
            for said in (
                {"reward": 1.0, "data_source": 5}, {"reward": 1.0, "rewards": [1]},
                {"reward": [1]}, {"reward": 10**400}, {"reward": 1.0, "status": 5},
                {"reward": 1.0, "turn_rewards": ["x"]}, {"fail": "why", "reason": 5}, {"reward": 1.0, "metadata": []},
            ):  # fmt: skip
                status, answer = await gateway.end(rollout, **said)
                assert status == 400, (said, answer)
            assert (await gateway.end(rollout, reward=1.0))[0] == 200


async def test_ids_of_groups_as_users_have_them(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            names = ("a/b", "a%2Fb", "été", "a?b#c", "prompt:train:math:0:7:1")
            for name in names:
                (rollout,) = await gateway.begin(group_id=name)
                await gateway.say(rollout, "hello")
                assert (await gateway.end(rollout, reward=1.0))[0] == 200, name
    await asyncio.sleep(0)
    assert len(pushed(redis_url, run)) == len(names)
