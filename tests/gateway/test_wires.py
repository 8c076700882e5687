"""The SDKs of OpenAI and Anthropic as they were recorded (`record.py`): the gateway says what they have accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.integrations.fake_engine import serving

from .engine import Engine, caller
from .play import playing, pushed
from .record import ANSWERS, WIRES

pytestmark = pytest.mark.server


@pytest.fixture(params=sorted(WIRES.glob("*.json")), ids=lambda file: file.stem)
def recorded(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(request.param.read_text())
    return found


async def test_a_recorded_conversation(redis_url: str, run: str, recorded: list[dict[str, Any]]) -> None:
    with serving(caller(*ANSWERS)) as engine:
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            for heard in recorded:
                url = rollout["base_url"].removesuffix("/v1") + heard["path"]
                key = rollout["api_key"]
                headers = {name: value.replace("KEY", key) for name, value in heard["headers"].items()}
                async with gateway.http.post(url, data=json.dumps(heard["body"]), headers=headers) as answer:
                    text = await answer.text()
                assert answer.status == heard["status"] == 200, text
                assert said(text) == said(heard["answer"])
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == 1
    assert isinstance(engine, Engine)
    (found,) = pushed(redis_url, run).values()
    tokens = [token for _, ids, _ in engine.said for token in ids]
    assert found.sampled == [(tokens, [log for *_, logs in engine.said for log in logs])]


def said(text: str) -> list[object]:
    """An answer, or the lines of a stream, as JSON where they are."""
    lines = text.splitlines() if text.startswith(("data:", "event:")) else [text]
    values = (line.removeprefix("data: ") for line in lines)
    return [json.loads(value) if value.startswith("{") else value for value in values]
