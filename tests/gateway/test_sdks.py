"""The SDKs of OpenAI and Anthropic at the gateway."""

from __future__ import annotations

import pytest

from tests.unit.integrations.fake_engine import serving

from .engine import talkative
from .play import playing, pushed

pytestmark = pytest.mark.server
openai = pytest.importorskip("openai", reason="pip install 'streamadv[sdks]'")
anthropic = pytest.importorskip("anthropic", reason="pip install 'streamadv[sdks]'")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_three_turns_are_one_row(redis_url: str, run: str, api: str, streams: bool) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            said: list[dict[str, str]] = []
            for number in range(3):
                said.append({"role": "user", "content": f"question {number}"})
                text = await ask(api, streams, rollout, said)
                assert text.startswith("answer")
                said.append({"role": "assistant", "content": text})
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 1
    (found,) = pushed(redis_url, run).values()
    (row,) = found.sampled
    assert row[0] == [token for _, ids, _ in engine.said for token in ids]  # type: ignore[attr-defined]


async def ask(api: str, streams: bool, rollout: dict[str, str], said: list[dict[str, str]]) -> str:
    url, key = rollout["base_url"], rollout["api_key"]
    if api == "messages":
        async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key) as client:
            asked = {"model": "claude", "max_tokens": 500, "messages": said}
            if not streams:
                return str((await client.messages.create(**asked)).content[0].text)
            async with client.messages.stream(**asked) as stream:
                return str((await stream.get_final_message()).content[0].text)
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        if api == "chat" and not streams:
            made = await client.chat.completions.create(model="gpt-4o", messages=said)
            return str(made.choices[0].message.content)
        if api == "chat":
            chunks = await client.chat.completions.create(model="gpt-4o", messages=said, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        if not streams:
            return str((await client.responses.create(model="gpt-4o", input=said)).output_text)
        async with client.responses.stream(model="gpt-4o", input=said) as stream:
            return str((await stream.get_final_response()).output_text)


async def test_what_is_over_is_not_asked_again(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            await gateway.end(rollout, fail="enough")
            said = [{"role": "user", "content": "hello"}]
            with pytest.raises(openai.APIStatusError, match="is over"):
                await ask("chat", False, rollout, said)
            with pytest.raises(anthropic.APIStatusError, match="is over"):
                await ask("messages", False, rollout, said)
