"""The client keeps what the engine has sampled: vLLM's and SGLang's requests and answers, tools, retries."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from streamadv.errors import MissingDependencyError, SettingError
from streamadv.integrations.engines import EngineClient, EngineError, Episode, client
from streamadv.store.embedded import free_port

from .fake_engine import END, ROLES, FakeEngine, serving

DIALECTS = {"vllm": "vllm", "sglang": "sglang", "sglang-0.5.10": "sglang"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def policy(prompt: Sequence[int]) -> str:
    """Calls the tool, then answers."""
    return "<it is>sunny" if ROLES["tool"] in prompt else "<hm>!weather"


@pytest.fixture(params=list(DIALECTS))
def engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    with serving(FakeEngine(policy, request.param)) as found:
        yield found


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSE_S", 0.001)


def asking(engine: FakeEngine, **options: Any) -> EngineClient:
    return EngineClient(engine.url, kind=DIALECTS[engine.dialect], **options)  # type: ignore[arg-type]


async def converse(found: EngineClient, **sampling: Any) -> Episode:
    """A chat with one tool call."""
    episode, messages = Episode(), [{"role": "user", "content": "weather?"}]
    while True:
        completion = await found.chat(messages, tools=TOOLS, **sampling)
        episode.add(completion)
        messages.append(dict(completion.message))
        if not completion.tool_calls:
            return episode
        assert [call["function"]["name"] for call in completion.tool_calls] == ["weather"]
        for call in completion.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "31 C"})


async def test_a_chat_with_tools_is_one_row_of_the_engines_tokens(engine: FakeEngine) -> None:
    async with asking(engine, temperature=0.7) as found:
        found.version = 4
        episode = await converse(found, max_tokens=50)
    record = episode.record()
    trained = record["response_mask"] == 1
    assert record["input_ids"][trained].tolist() == [*b"<hm>!weather", END, *b"<it is>sunny", END]
    logs = [-(number + 1) / 8 for number in range(13)]
    assert record["rollout_log_probs"][trained].tolist() == [*logs, *logs]
    assert bytes(t for t in record["input_ids"][~trained].tolist() if t < 256).endswith(b"weather?31 C")
    assert set(record["versions"][trained].tolist()) == {4}
    assert [step["end"] - step["start"] for step in record["steps"]] == [13, 13]
    assert episode.breaks == []
    asked = [asked for _, asked in engine.requests]
    assert all(each["temperature"] == 0.7 and each["max_tokens"] == 50 for each in asked)
    assert asked[0]["model"] == "tiny"


async def test_a_template_that_changes_earlier_turns_costs_a_row() -> None:
    with serving(FakeEngine(policy, thinks=True)) as engine:
        async with asking(engine) as found:
            episode = await converse(found)
    rows = episode.record()["rows"]
    written = [row["input_ids"][row["response_mask"] == 1].tolist() for row in rows]
    assert written == [[*b"<hm>!weather", END], [*b"<it is>sunny", END]]
    assert len(episode.breaks) == 1


async def test_token_in_token_out(engine: FakeEngine) -> None:
    engine.weight_version = "12"
    async with asking(engine) as found:
        found.version = 11
        episode = Episode([ROLES["user"], *b"weather?", END])
        first = await found.complete(episode.tokens, max_tokens=100)
        episode.add(first)
        episode.observe([ROLES["tool"], *b"31 C", END])
        second = await found.complete(episode.tokens, max_tokens=3)
        episode.add(second)
    assert (first.text, first.finish_reason, second.finish_reason) == ("<hm>!weather", "stop", "length")
    record = episode.record()
    assert record["status"] == "truncated"
    assert bytes(record["input_ids"][-3:].tolist()) == b"<it"
    version = 12 if engine.dialect != "vllm" else 11  # SGLang says it
    assert record["model_version"] == (version, version)
    path = "/v1/completions" if engine.dialect == "vllm" else "/generate"
    assert [path for path, _ in engine.requests] == [path] * 2


async def test_a_request_is_tried_again_while_the_engine_is_busy() -> None:
    with serving(FakeEngine(policy)) as engine:
        async with asking(engine, tries=3) as found:
            engine.refusals = [503, 429]
            assert (await found.complete([1])).text == "<hm>!weather"
            assert len(engine.requests) == 3
            engine.refusals = [503] * 9
            with pytest.raises(EngineError, match=r"/v1/completions: 503 .*not now"):
                await found.complete([1])
            assert len(engine.requests) == 6
            engine.refusals = [400]
            with pytest.raises(EngineError, match="400"):
                await found.complete([1])
            assert len(engine.requests) == 7
    async with EngineClient(f"http://127.0.0.1:{free_port()}", model="m", tries=2) as found:
        with pytest.raises(EngineError, match="ClientConnectorError"):
            await found.complete([1])


@pytest.mark.parametrize("options", [{"kind": "tgi"}, {"tries": 0}])
def test_settings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"kind is 'tgi'|tries is 0"):
        EngineClient("http://localhost", **options)


@pytest.mark.parametrize(("module", "package"), [("client", "aiohttp"), ("local", "torch")])
def test_a_missing_package_is_one_line(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"streamadv.integrations.engines.{module}"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingDependencyError, match=f"needs {package}: pip install 'streamadv"):
        importlib.import_module(name)
