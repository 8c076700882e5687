"""`--live-streams`: an agent gets what is sampled as it is sampled, and sees no end of an answer that is not kept."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.integrations.fake_engine import FakeEngine, serving

from .engine import Engine
from .play import Playing, playing, pushed

pytestmark = pytest.mark.server
HELLO = [{"role": "user", "content": "hello"}]


class Streaming(Engine):
    """Streams as vLLM does, one token a chunk; before its `stops_at`-th token it waits for `goes_on`."""

    def __init__(self, *answers: str) -> None:
        super().__init__(lambda prompt: answers[min(prompt.count(259) - 1, len(answers) - 1)])
        self.stops_at, self.goes_on, self.breaks_at = -1, threading.Event(), -1

    def chunks(self, path: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        made = self.answer(path, {**asked, "stream": False})
        is_chat = path.startswith("/v1/chat")
        head = {"id": made["id"], "created": 1, "model": "tiny"}
        head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        for choice in made["choices"]:
            ids, logs, at = choice["token_ids"], choice["logprobs"], choice["index"]
            pieces = list(pieces_of(choice, len(ids)))
            for number, piece in enumerate(pieces):
                if number == self.stops_at:
                    self.goes_on.wait()
                if number == self.breaks_at:
                    raise ConnectionResetError("the engine dies")
                listed = {name: values[number : number + 1] for name, values in logs.items()}
                part = {"index": at, "token_ids": ids[number : number + 1], "logprobs": listed, **piece}
                part["finish_reason"] = choice["finish_reason"] if number == len(ids) - 1 else None
                first: dict[str, Any] = {}
                if number == 0 and is_chat:
                    first["prompt_token_ids"] = made["prompt_token_ids"]
                elif number == 0:
                    part["prompt_token_ids"] = choice["prompt_token_ids"]
                yield {**head, "choices": [part], **first}
        yield {**head, "choices": [], "usage": made["usage"]}


def pieces_of(choice: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """What is said, in so many pieces."""
    if "text" in choice:
        yield from ({"text": choice["text"][at : at + 1]} for at in range(count))
        return
    message = choice["message"]
    deltas: list[dict[str, Any]] = []
    for name in ("reasoning", "content"):
        deltas += [{name: letter} for letter in message.get(name) or ""]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        named = {"name": function["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": 0, "id": call["id"], "type": "function", "function": named}]})
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": letter}}]}
            for letter in function["arguments"]
        ]
    for at in range(count):
        yield {"delta": deltas[at] if at < len(deltas) else {}}


async def events_of(gateway: Playing, rollout: dict[str, Any], path: str, asked: Any) -> list[Any]:
    return [event async for event in stream(gateway, rollout, path, asked)]


async def stream(gateway: Playing, rollout: dict[str, Any], path: str, asked: Any, **headers: str) -> Any:
    """Events as they come, parsed."""
    key = {"Authorization": f"Bearer {rollout['api_key']}", **headers}
    body = {"stream": True, **asked}
    async with gateway.http.post(f"{rollout['base_url']}/{path}", json=body, headers=key) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            text = line.decode().strip().removeprefix("data: ")
            if text.startswith("{"):
                yield json.loads(text)


def said_in(events: list[Any]) -> str:
    return "".join(
        choice.get("text", "") + (choice.get("delta", {}).get("content") or "")
        for event in events
        for choice in event["choices"]
    )


def check_wire(redis_url: str, run: str, engine: FakeEngine, rows: int = 1) -> None:
    assert isinstance(engine, Engine)
    (found,) = pushed(redis_url, run).values()
    tokens = [token for _, ids, _ in engine.said for token in ids]
    logs = [log for *_, logs in engine.said for log in logs]
    assert [token for ids, _ in found.sampled for token in ids] == tokens
    assert [log for _, listed in found.sampled for log in listed] == logs
    assert len(found.rows) == rows


async def test_what_is_sampled_leaves_before_the_answer_ends(redis_url: str, run: str) -> None:
    with serving(Streaming("first answer", "second")) as engine:
        assert isinstance(engine, Streaming)
        engine.stops_at = 5
        async with playing(redis_url, run, engine, live_streams=True) as gateway:
            (rollout,) = await gateway.begin()
            events: list[Any] = []
            async for event in stream(gateway, rollout, "chat/completions", {"messages": HELLO}):
                events.append(event)
                if said_in(events) == "first":
                    assert gateway.front.sessions._open  # it is under way
                    engine.goes_on.set()
            assert said_in(events) == "first answer"
            assert [e["choices"][0]["finish_reason"] for e in events[-2:]] == [None, "stop"]
            assert "prompt_token_ids" not in json.dumps(events)
            assert '"token_ids"' not in json.dumps(events)
            assert '"logprobs"' not in json.dumps(events)
            said = [*HELLO, {"role": "assistant", "content": "first answer"}, *HELLO]
            asked = {"messages": said, "stream_options": {"include_usage": True}, "logprobs": True}
            events = await events_of(gateway, rollout, "chat/completions", asked)
            assert said_in(events) == "second"
            assert events[-1]["usage"]["completion_tokens"] == len("second") + 1
            assert '"logprobs"' in json.dumps(events)
            await gateway.end(rollout, reward=1.0)
    check_wire(redis_url, run, engine)


async def test_no_end_is_seen_before_the_turn_is_kept(redis_url: str, run: str) -> None:
    with serving(Streaming("an answer")) as engine:
        async with playing(redis_url, run, engine, live_streams=True) as gateway:
            (rollout,) = await gateway.begin()
            commit, kept = gateway.front.sessions.commit, asyncio.Event()

            async def slow(*args: Any) -> None:
                await kept.wait()
                await commit(*args)

            gateway.front.sessions.commit = slow  # type: ignore[method-assign]
            events: list[Any] = []
            async for event in stream(gateway, rollout, "chat/completions", {"messages": HELLO}):
                events.append(event)
                ends = event["choices"][0]["finish_reason"] is not None
                assert ends == kept.is_set()
                if said_in(events) == "an answer":
                    kept.set()
            assert kept.is_set()
            await gateway.end(rollout, reward=1.0)
    check_wire(redis_url, run, engine)


async def test_thoughts_and_calls_are_put_together_for_what_comes_after(redis_url: str, run: str) -> None:
    with serving(Streaming('<hm>look!find {"at": 7}', "a door")) as engine:
        async with playing(redis_url, run, engine, live_streams=True) as gateway:
            (rollout,) = await gateway.begin()
            events = await events_of(gateway, rollout, "chat/completions", {"messages": HELLO})
            deltas = [event["choices"][0]["delta"] for event in events]
            parts = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
            assert "".join(part.get("arguments", "") for part in parts) == '{"at": 7}'
            (session,) = gateway.front.sessions._open.values()
            (choice,) = session.turns[0].answer["choices"]
            assert choice["message"]["reasoning"] == "hm"
            (call,) = choice["message"]["tool_calls"]
            assert (call["function"]["name"], call["function"]["arguments"]) == ("find", '{"at": 7}')
            asked = {"messages": [*HELLO, choice["message"], *HELLO]}
            retried = {"x-stainless-retry-count": "1"}
            again = [
                e async for e in stream(gateway, rollout, "chat/completions", {"messages": HELLO}, **retried)
            ]
            assert len(again) == 2  # the kept answer, not a new one
            assert said_in(await events_of(gateway, rollout, "chat/completions", asked)) == "a door"
            await gateway.end(rollout, reward=1.0)
    check_wire(redis_url, run, engine, rows=2)  # its template leaves the thought out


async def test_completions_and_several_choices(redis_url: str, run: str) -> None:
    with serving(Streaming("some text")) as engine:
        async with playing(redis_url, run, engine, live_streams=True) as gateway:
            (rollout,) = await gateway.begin()
            asked: dict[str, Any] = {"prompt": list(b"once"), "n": 2}
            events = await events_of(gateway, rollout, "completions", asked)
            for number in (0, 1):
                mine = [e for e in events if e["choices"][0]["index"] == number]
                assert said_in(mine) == "some text"
            await gateway.end(rollout, reward=1.0)
    check_wire(redis_url, run, engine, rows=2)


@pytest.mark.parametrize("breaks_at", [0, 3])
async def test_an_answer_that_is_broken_off_is_no_turn(redis_url: str, run: str, breaks_at: int) -> None:
    with serving(Streaming("an answer")) as engine:
        assert isinstance(engine, Streaming)
        async with playing(redis_url, run, engine, live_streams=True) as gateway:
            (rollout,) = await gateway.begin()
            engine.breaks_at = breaks_at
            key = {"Authorization": f"Bearer {rollout['api_key']}"}
            body = {"messages": HELLO, "stream": True}
            url = f"{rollout['base_url']}/chat/completions"
            async with gateway.http.post(url, json=body, headers=key) as answer:
                assert answer.status == (503 if breaks_at == 0 else 200)
                assert "engine_unavailable" in await answer.text()
            engine.breaks_at = -1
            engine.said.clear()
            events = await events_of(gateway, rollout, "chat/completions", {"messages": HELLO})
            assert said_in(events) == "an answer"
            assert (await gateway.end(rollout, reward=1.0))[1]["turns"] == 1
    check_wire(redis_url, run, engine)


async def test_other_apis_get_streams_of_whole_answers(redis_url: str, run: str) -> None:
    with serving(Streaming("an answer")) as engine:
        async with playing(redis_url, run, engine, live_streams=True) as gateway:
            (rollout,) = await gateway.begin()
            asked = {"messages": HELLO, "max_tokens": 50}
            events = await events_of(gateway, rollout, "messages", asked)
            assert events[-1]["type"] == "message_stop"
            assert (await gateway.end(rollout, reward=1.0))[1]["turns"] == 1
    check_wire(redis_url, run, engine)
