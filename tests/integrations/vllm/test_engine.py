"""A real vLLM: what it says on the wire is what the run gets, token for token, log-prob for log-prob."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamadv as sa
from streamadv.integrations.engines import EngineClient, Episode
from streamadv.run import open_run
from streamadv.store.connection import Connection
from tests.gateway.play import Playing, gateway_of, playing, pushed

from .serving import EXAMPLE
from .tap import Tap
from .wire import check_wire

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]
openai = pytest.importorskip("openai")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
ROLLOUTS, GROUP = 200, 8


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of examples/any_agent."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in ("agent", "task"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("mode", ["tokens", "chat"])
async def test_an_agent_with_a_tool_at_the_gateway(redis_url: str, run: str, tap: Tap, mode: str) -> None:
    """An agent by OpenAI's package that knows nothing of training plays 200 rollouts, half of them in each mode."""
    from agent import solve
    from task import House

    ended: list[dict[str, Any]] = []
    asked = openai.AsyncOpenAI(api_key="of each rollout", max_retries=8, timeout=300)

    async def play(rollout: sa.AsyncRollout, gateway: Playing) -> None:
        house = House()
        agent = gateway_of(gateway).access(rollout)
        client = asked.with_options(base_url=agent.base_url, api_key=agent.api_key)
        await solve(client, house)
        ended.append(await agent.end(reward=house.reward()))

    async with playing(redis_url, run, tap, mode=mode) as gateway:  # type: ignore[arg-type]
        tap.said.clear()  # what it was asked at the start
        for _ in range(ROLLOUTS // 2 // GROUP + 1):
            async with gateway.producer.group(GROUP) as group:
                await group.run(play, gateway)
            assert not group.failures
    found = list(pushed(redis_url, run).values())
    assert len(found) >= ROLLOUTS // 2
    check_wire(found, tap.said, sum(one["turns"] for one in ended))
    rows = sum(len(trajectory.rows) for trajectory in found)
    assert rows == len(found) or mode == "chat"


async def test_the_client_of_engines(tap: Tap, model: Path) -> None:
    """Chats and tokens: ids and log-probs are the engine's, and those of the model that it serves."""
    async with EngineClient(tap.url, max_tokens=12, temperature=1.0) as engine:
        engine.version = 3
        answers = [
            await engine.chat([{"role": "user", "content": f"where is {word}?"}]) for word in "abcdefgh"
        ]
        episode = Episode(answers[0].prompt_ids)
        for _ in range(3):
            episode.add(await engine.complete(episode.tokens))
            episode.observe([10, 11])
        called = await engine.chat(
            [{"role": "user", "content": "where is the drum?"}],
            tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}],
        )
    assert len(tap.said) == 12
    sampled = [*answers, called]
    for answer, (ids, logs, _) in zip(sampled, [*tap.said[:8], tap.said[-1]], strict=True):
        assert (tuple(answer.token_ids), list(answer.log_probs or ())) == (ids, logs)
        assert answer.version == 3
    (record,) = [episode.record()]
    mine = record["response_mask"] == 1
    wire = tap.said[8:11]
    assert record["input_ids"][mine].tolist() == [token for ids, *_ in wire for token in ids]
    expected = log_probs_of(model, record["input_ids"].tolist())[mine]
    assert np.abs(record["rollout_log_probs"][mine] - expected).max() < 1e-4


def log_probs_of(model: Path, ids: Sequence[int]) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = torch.log_softmax(found(torch.tensor([ids])).logits[0], -1)
    return np.r_[0.0, scores[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()]


async def test_weights_change_in_the_middle_of_an_answer(
    redis_url: str, run: str, tap: Tap, model: Path, tmp_path: Path
) -> None:
    """Each token is of the weights that its version names: the model's log-probs by them are the engine's."""
    other = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "other")
    folders = {0: model, 1: tmp_path / "other"}
    queue = sa.TrainerQueue(redis_url, run, batch_groups=1, chain="grpo")
    options = {"load_weights": True, "mode": "tokens", "sampling": {"temperature": 1.0, "ignore_eos": True}}
    async with playing(redis_url, run, tap, **options) as gateway:  # type: ignore[arg-type]
        await asyncio.to_thread(queue.open, weights=model.as_uri())
        while gateway.front._engines.all[0].version != 0:  # noqa: ASYNC110  a process has no event
            await asyncio.sleep(0.05)
        (rollout,) = await gateway.begin()
        asking = asyncio.create_task(gateway.chat(rollout, "where is the drum?", max_tokens=900))
        await tap.asked.wait()  # it is being sampled
        await asyncio.to_thread(name_weights, redis_url, run, 1, folders[1].as_uri())
        status, answer, _ = await asking
        assert status == 200, answer
        await gateway.end(rollout, reward=1.0)
    await asyncio.to_thread(queue.close)
    (found,) = pushed(redis_url, run).values()
    (row,) = found.rows
    mine = np.array(row["response_mask"]) == 1
    versions = np.array(row["versions"])[mine]
    assert versions.tolist() == sorted(versions)
    assert set(versions) == {0, 1}
    for version, folder in folders.items():
        expected = log_probs_of(folder, row["input_ids"])[mine][versions == version]
        sampled = np.array(row["rollout_log_probs"])[mine][versions == version]
        assert np.abs(sampled - expected).max() < 1e-4


def name_weights(redis_url: str, run: str, version: int, uri: str) -> None:
    """As a trainer does with `queue.trained`."""
    joined = open_run(Connection(redis_url), run)
    joined.connection.scripts.hset(joined.keys.home.trainer, "weights", f"{version} {uri}")
