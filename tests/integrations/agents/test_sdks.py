"""The SDKs of OpenAI and Anthropic at the gateway: every API, plain and streamed, with tools and thoughts."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.engine import Engine, caller, talkative
from tests.gateway.play import Playing, playing, pushed
from tests.unit.integrations.fake_engine import FakeEngine, serving

pytestmark = pytest.mark.server
STREAMS = pytest.mark.parametrize("streams", [False, True])
APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}


def client_of(api: str, rollout: dict[str, str]) -> Any:
    url, key = rollout["base_url"], rollout["api_key"]
    if api == "messages":
        return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key)
    return openai.AsyncOpenAI(base_url=url, api_key=key)


async def ask(api: str, streams: bool, client: Any, said: list[Any], **more: Any) -> Any:
    """The answer: a message, a response, or a message of Anthropic's."""
    if api == "messages":
        asked = {"model": "claude", "max_tokens": 500, "messages": said, **more}
        if not streams:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()
    if api == "chat" and not streams:
        return (
            (await client.chat.completions.create(model="gpt-4o", messages=said, **more)).choices[0].message
        )
    if api == "chat":
        async with client.chat.completions.stream(model="gpt-4o", messages=said, **more) as stream:
            return (await stream.get_final_completion()).choices[0].message
    if not streams:
        return await client.responses.create(model="gpt-4o", input=said, **more)
    async with client.responses.stream(model="gpt-4o", input=said, **more) as stream:
        return await stream.get_final_response()


def text_of(api: str, answer: Any) -> str:
    if api == "messages":
        return "".join(part.text for part in answer.content if part.type == "text")
    return str(answer.output_text if api == "responses" else answer.content)


async def ended_as_one_row(gateway: Playing, rollout: dict[str, Any]) -> None:
    assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 1


def check_wire(redis_url: str, run: str, engine: FakeEngine) -> None:
    """What was pushed is what the engine has said."""
    assert isinstance(engine, Engine)
    (found,) = pushed(redis_url, run).values()
    tokens = [token for _, ids, _ in engine.said for token in ids]
    logs = [log for *_, logs in engine.said for log in logs]
    assert found.sampled == [(tokens, logs)]


@STREAMS
@APIS
async def test_three_turns_are_one_row(redis_url: str, run: str, api: str, streams: bool) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            said: list[dict[str, str]] = []
            async with client_of(api, rollout) as client:
                for number in range(3):
                    said.append({"role": "user", "content": f"question {number}"})
                    text = text_of(api, await ask(api, streams, client, said))
                    assert text.startswith("answer")
                    said.append({"role": "assistant", "content": text})
            await ended_as_one_row(gateway, rollout)
    check_wire(redis_url, run, engine)


@STREAMS
@APIS
async def test_a_tool_and_a_thought(redis_url: str, run: str, api: str, streams: bool) -> None:
    with serving(caller('<where am I>let me see!look {"at":  7}', "a door")) as engine:
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            async with client_of(api, rollout) as client:
                said: list[Any] = [{"role": "user", "content": "what is there?"}]
                answer = await ask(api, streams, client, said, tools=[tool_of(api)])
                add_result(api, answer, said)
                assert text_of(api, await ask(api, streams, client, said, tools=[tool_of(api)])) == "a door"
            await ended_as_one_row(gateway, rollout)
    check_wire(redis_url, run, engine)
    rendered = [asked for path, asked in engine.requests if path.endswith("/render")][
        -2
    ]  # the last one has a stand-in
    *_, called, result = rendered["messages"]
    assert called["tool_calls"][0]["function"]["name"] == "look"
    assert (result["role"], result["content"]) == ("tool", "a wall")
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]


def tool_of(api: str) -> dict[str, Any]:
    if api == "messages":
        return {"name": "look", "description": "looks", "input_schema": SCHEMA}
    function = {"name": "look", "description": "looks", "parameters": SCHEMA}
    return {"type": "function", "function": function} if api == "chat" else {"type": "function", **function}


def add_result(api: str, answer: Any, said: list[Any]) -> None:
    """What the agent was told, and what its tool says."""
    if api == "chat":
        (call,) = answer.tool_calls
        assert json.loads(call.function.arguments) == {"at": 7}
        # as clients do that keep a call in their own form
        written = {"name": "look", "arguments": json.dumps({"at": 7})}
        calls = [{"id": call.id, "type": "function", "function": written}]
        said.append({"role": "assistant", "content": answer.content, "tool_calls": calls})
        said.append({"role": "tool", "tool_call_id": call.id, "content": "a wall"})
    elif api == "responses":
        kinds = [item.type for item in answer.output]
        assert kinds == ["reasoning", "message", "function_call"]
        assert answer.output[0].content[0].text == "where am I"
        assert json.loads(answer.output[2].arguments) == {"at": 7}
        said += [item.model_dump(exclude_none=True) for item in answer.output]
        result = {"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "a wall"}
        said.append(result)
    else:
        assert [part.type for part in answer.content] == ["thinking", "text", "tool_use"]
        assert (answer.content[0].thinking, answer.stop_reason) == ("where am I", "tool_use")
        assert answer.content[2].input == {"at": 7}
        said.append({"role": "assistant", "content": [part.model_dump() for part in answer.content]})
        result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "a wall"}
        said.append({"role": "user", "content": [result]})


@STREAMS
async def test_completions_of_tokens(redis_url: str, run: str, streams: bool) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            prompt = list(b"once upon")
            async with client_of("completions", rollout) as client:
                for _ in range(3):
                    made = await client.completions.create(model="gpt-4o", prompt=prompt, stream=streams)
                    choices = [(await anext(made)).choices[0]] if streams else made.choices
                    assert choices[0].text.startswith("answer")
                    prompt = [*prompt, *engine.said[-1][1], *b" and"]  # type: ignore[attr-defined]
            await ended_as_one_row(gateway, rollout)
    check_wire(redis_url, run, engine)


@STREAMS
async def test_choices_are_rows_of_their_own_and_the_chosen_one_goes_on(
    redis_url: str, run: str, streams: bool
) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            async with client_of("chat", rollout) as client:
                said = [{"role": "user", "content": "hello"}]
                if streams:
                    asked = {"model": "gpt-4o", "messages": said, "n": 3}
                    async with client.chat.completions.stream(**asked) as stream:
                        choices = (await stream.get_final_completion()).choices
                else:
                    made = await client.chat.completions.create(model="gpt-4o", messages=said, n=3)
                    choices = made.choices
                assert len({choice.message.content for choice in choices}) == 3
                said.append({"role": "assistant", "content": choices[1].message.content})
                said.append({"role": "user", "content": "and?"})
                await ask("chat", streams, client, said)
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 3
    (found,) = pushed(redis_url, run).values()
    first, second, third, last = [ids for _, ids, _ in engine.said]  # type: ignore[attr-defined]
    assert [ids for ids, _ in found.sampled] == [first, second + last, third]


async def test_tools_of_free_text_and_tools_that_openai_would_run(redis_url: str, run: str) -> None:
    with serving(caller('!patch {"input": "*** Begin"}', "done")) as engine:
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            tools = [{"type": "custom", "name": "patch", "description": "patches"}, {"type": "web_search"}]
            async with client_of("responses", rollout) as client:
                for streams in (False, True):
                    said: list[Any] = [{"role": "user", "content": "mend it"}]
                    answer = await ask("responses", streams, client, said, tools=tools)
                    (call,) = answer.output
                    assert (call.type, call.input) == ("custom_tool_call", "*** Begin")
                    said += [
                        call.model_dump(exclude_none=True),
                        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"},
                    ]
                    answer = await ask("responses", streams, client, said, tools=tools)
                    assert answer.output_text == "done"
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 2
    assert len(engine.requests[-1][1]["chat_request"]["tools"]) == 1


async def test_what_is_over_is_not_asked_again(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            await gateway.end(rollout, fail="enough")
            said = [{"role": "user", "content": "hello"}]
            for api, kind in (("chat", openai.APIStatusError), ("messages", anthropic.APIStatusError)):
                async with client_of(api, rollout) as client:
                    with pytest.raises(kind, match="is over"):
                        await ask(api, False, client, said)
