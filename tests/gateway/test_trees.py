"""Agents that nobody wrote: random trees of conversations, before an engine that drifts, fails and dies.

What an agent has heard is trained on once, after exactly the tokens that the engine has read before it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.support import some_of
from tests.unit.integrations.fake_engine import serving

from .engine import Engine
from .play import Playing, Rows, playing, pushed

pytestmark = pytest.mark.server
STEPS = 24
WORDS = ("a door", "été 🚪", "", "  two  blanks ", "line\nline", "<|end|>", "x" * 40, "answer?")
Message = dict[str, Any]


class Chatter(Engine):
    """Says something else each time: words, thoughts, calls of tools, or nothing."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(self._say, thinks=draw.random() < 0.5)
        self.draw, self.number = draw, 0
        self.drifts = draw.random() < 0.5

    def _say(self, prompt: object) -> str:
        self.number += 1
        kind = self.draw.random()
        if kind < 0.1:
            return ""
        call = f'!look {{"at":  {self.number}}}' if 0.5 < kind < 0.8 else ""
        thought = f"<thought {self.number}>" if kind < 0.4 else ""
        return f"{thought}{self.draw.choice(WORDS).replace('!', '')} {self.number}{call}"


class Agent:
    """Walks at random through a tree of conversations."""

    def __init__(self, gateway: Playing, rollout: dict[str, Any], draw: random.Random) -> None:
        self.gateway, self.rollout, self.draw = gateway, rollout, draw
        self.talks: list[list[Message]] = [[]]
        self.heard = 0  # choices
        self.last: tuple[str, dict[str, Any], dict[str, Any]] | None = None

    async def step(self) -> None:
        draw = self.draw
        kind = draw.choice(
            ("on", "on", "on", "branch", "edit", "compact", "n", "cut", "retry", "at once", "gone")
        )
        talk = list(draw.choice(self.talks))
        if kind == "branch" and talk:
            talk = talk[: draw.randrange(len(talk))]
        elif kind == "edit" and talk:
            at = draw.randrange(len(talk))
            talk[at] = {**talk[at], "content": f"edited {draw.random()}"}
        elif kind == "compact":
            talk = [{"role": "user", "content": f"so far: {draw.choice(WORDS)}"}]
        if kind == "retry" and self.last is not None:
            url, asked, answer = self.last
            again = {"x_stainless_retry_count": "1"}
            assert (await self._post(url, asked, **again)) == answer
        elif kind == "at once":
            await asyncio.gather(*(self.ask(talk) for _ in range(3)))
        elif kind == "gone":
            await self.leave(talk)
        elif kind == "n":
            await self.ask(talk, n=draw.randrange(2, 4))
        elif kind == "cut":
            await self.ask(talk, max_tokens=draw.randrange(1, 6))
        else:
            await self.ask(talk, stream=draw.random() < 0.3)

    def _asked(self, talk: list[Message], **more: Any) -> tuple[str, dict[str, Any], list[Message]]:
        if not talk or talk[-1]["role"] not in ("user", "tool"):
            talk = [*talk, {"role": "user", "content": self.draw.choice(WORDS) + str(self.draw.random())}]
        place = self.draw.choice(("", "", "", "/a/critic"))
        url = self.rollout["base_url"].replace("/v1", f"{place}/v1") + "/chat/completions"
        return url, {"messages": talk, **more}, talk

    async def ask(self, talk: list[Message], **more: Any) -> None:
        url, asked, talk = self._asked(talk, **more)
        answer = await self._post(url, asked)
        self.last = None if more.get("stream") else (url, asked, answer)
        messages = [choice["message"] for choice in answer["choices"]]
        self.heard += len(messages)
        message = {name: value for name, value in self.draw.choice(messages).items() if value is not None}
        if self.draw.random() < 0.5:
            message.pop("reasoning", None)  # clients drop it
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "a wall"}
            for call in message.get("tool_calls", ())
        ]
        self.talks.append([*talk, message, *results])

    async def leave(self, talk: list[Message]) -> None:
        """Ask, and go away at some moment."""
        url, asked, _ = self._asked(talk)
        asking = asyncio.create_task(self._post(url, asked))
        for _ in range(self.draw.randrange(12)):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        if not asking.cancelled():
            self.heard += 1

    async def _post(self, url: str, asked: dict[str, Any], **headers: str) -> dict[str, Any]:
        status, answer, _ = await self.gateway.post(url, self.rollout["api_key"], asked, **headers)
        assert status == 200, answer
        return read_events(answer) if isinstance(answer, str) else dict(answer)


def read_events(text: str) -> dict[str, Any]:
    """The answer that a stream makes."""
    message: Message = {"role": "assistant", "content": ""}
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                message |= choice["delta"]
    return {"choices": [{"message": message}]}


def spans_of(found: Rows) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Of each turn: the tokens before it, its tokens, its log-probs. A prompt stands between two turns of a row."""
    spans = []
    for row in found.rows:
        mask = [0, *row["response_mask"], 0]
        edges = [at for at in range(len(mask) - 1) if mask[at] != mask[at + 1]]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            logs = tuple(row["rollout_log_probs"][start:end])
            spans.append((tuple(row["input_ids"][:start]), tuple(row["input_ids"][start:end]), logs))
    return spans


@pytest.mark.parametrize("mode", ["tokens", "chat"])
@pytest.mark.parametrize("seed", some_of(range(6), 3))
async def test_what_was_heard_is_trained_on_once_after_what_was_read(
    redis_url: str, run: str, seed: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamadv.gateway.engines.PAUSE_S", 0.001)
    monkeypatch.setattr("streamadv.gateway.engines.BREAK_S", 0.001)
    draw = random.Random(seed)
    engine = Chatter(draw)
    with serving(engine):
        async with playing(redis_url, run, engine, mode=mode, grace_s=600.0) as gateway:
            (rollout,) = await gateway.begin()
            agent = Agent(gateway, rollout, draw)
            for _ in range(STEPS):
                if draw.random() < 0.2:
                    engine.dies = 1
                elif draw.random() < 0.1:
                    engine.refusals[:] = [503]
                await agent.step()
            _, ended = await gateway.end(rollout, reward=1.0)
            assert ended["result"] == "pushed", ended
    (found,) = pushed(redis_url, run).values()
    wire = Counter((tuple(prompt), tuple(ids), tuple(logs)) for prompt, ids, logs in engine.said)
    trained = Counter(spans_of(found))
    assert trained <= wire
    assert agent.heard <= trained.total() <= len(engine.said)
