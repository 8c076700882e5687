"""Tokens mode: rows stay whole before an engine whose template writes answers otherwise, and versions are per token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.integrations.fake_engine import END, ROLES, serving

from .engine import Engine, talkative
from .play import playing, pushed

pytestmark = pytest.mark.server


@pytest.mark.parametrize(("mode", "rows"), [("tokens", 1), ("auto", 1), ("chat", 3)])
async def test_a_template_that_drifts(redis_url: str, run: str, mode: str, rows: int) -> None:
    engine = talkative()
    assert isinstance(engine, Engine)
    engine.drifts = True
    with serving(engine):
        async with playing(redis_url, run, engine, mode=mode) as gateway:
            (rollout,) = await gateway.begin()
            said: list[str] = []
            for number in range(3):
                said.append(f"question {number}")
                said.append(await gateway.say(rollout, *said, max_tokens=5 if number == 1 else None))
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == rows
    (found,) = pushed(redis_url, run).values()
    heard = engine.said[1:] if mode == "tokens" and len(engine.said) > 3 else engine.said
    assert [token for ids, _ in found.sampled for token in ids] == [
        token for _, ids, _ in heard[-3:] for token in ids
    ]


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ("<thought>an answer", {}),  # the template drops thoughts of earlier turns
        ("one line\nand another", {"stop": ["\n"]}),
        ("Action: look\nObservation: a door", {"stop": ["Observation:"]}),
        ("an answer that is cut off", {"max_tokens": 6}),
        ("ends as the stand-in does: A", {}),
        ("<thought>!look", {"tools": [{"type": "function", "function": {"name": "look"}}]}),
    ],
)
async def test_whatever_ends_an_answer_the_next_prompt_goes_on_from_it(
    redis_url: str, run: str, policy: str, asked: dict[str, Any]
) -> None:
    engine = Engine(lambda _: policy, thinks=True)
    with serving(engine):
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            messages: list[dict[str, Any]] = []
            for number in range(3):
                messages.append({"role": "user", "content": f"question {number}"})
                url = f"{rollout['base_url']}/chat/completions"
                body = {"messages": messages, **asked}
                status, answer, _ = await gateway.post(url, rollout["api_key"], body)
                assert status == 200, answer
                message = answer["choices"][0]["message"]
                message.pop("reasoning")  # clients drop it
                messages.append(message)
                if calls := message.get("tool_calls"):
                    messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "a door"})
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 1
    (found,) = pushed(redis_url, run).values()
    assert found.sampled[0][0] == [token for _, ids, _ in engine.said for token in ids]
    (first, sampled, _), (second, *_) = engine.said[:2]
    ended = [*first, *sampled, *([] if sampled[-1] == END else [END])]
    assert second[: len(ended)] == ended
    assert second[len(ended)] in ROLES.values()
    assert second.count(END) == ended.count(END) + (2 if "!" in policy else 1)


async def test_each_token_has_the_version_that_sampled_it(redis_url: str, run: str) -> None:
    engine = talkative()
    assert isinstance(engine, Engine)
    engine.versions = [(7, 0.5), (8, 0.5)]
    with serving(engine):
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            await gateway.say(rollout, "hello")
            await gateway.end(rollout, reward=1.0)
    (found,) = pushed(redis_url, run).values()
    (row,) = found.rows
    versions = [version for version, mask in zip(row["versions"], row["response_mask"], strict=True) if mask]
    half = round(len(versions) / 2)
    assert versions == [7] * half + [8] * (len(versions) - half)


async def test_an_engine_that_is_away_at_first_is_asked_again_what_it_can_do(
    redis_url: str, run: str
) -> None:
    with serving(talkative()) as engine:
        engine.refusals[:] = [503]
        async with playing(redis_url, run, engine, mode="auto") as gateway:
            (rollout,) = await gateway.begin()
            await gateway.say(rollout, "hello")
    assert "/inference/v1/generate" in [path for path, _ in engine.requests]
