"""An environment of verifiers asks a real vLLM: its episodes have the engine's tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import streamadv as sa
from streamadv.integrations import verifiers
from tests.gateway.play import pushed

from .tap import Tap
from .wire import check_wire

openai = pytest.importorskip("openai")
vf = pytest.importorskip("verifiers.v1")
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(300)]
GROUPS, SIZE, TURNS = 4, 8, 2
#: verifiers finds its taskset and harness here, see `env`.
__all__ = ["Asking", "Rings"]


class Question(vf.Task[vf.TaskData]):  # type: ignore[misc, name-defined]
    @vf.reward  # type: ignore[untyped-decorator]
    async def is_short(self, trace: Any) -> float:
        return 1.0 / len(trace.nodes)


class Rings(vf.Taskset[Question, vf.TasksetConfig]):  # type: ignore[misc, name-defined]
    def load(self) -> Iterable[Question]:
        for thing in ("drum", "goblet", "hammer", "candle"):
            yield Question(vf.TaskData(prompt=f"is the ring under the {thing}?"), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc, name-defined]
    """Asks by OpenAI's package, in this process."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(  # type: ignore[no-untyped-def]
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(TURNS):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                messages.append({"role": "user", "content": "are you sure?"})
        return vf.ProgramResult(0, "", "")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "rings", sys.modules[__name__])
    agent = vf.AgentConfig(harness={"id": "rings"}, runtime=vf.SubprocessConfig())
    return vf.load_environment(vf.SingleAgentEnvConfig(taskset=vf.TasksetConfig(id="rings"), agent=agent))


async def test_episodes_have_the_tokens_of_the_engine(
    redis_url: str, run: str, tap: Tap, model: Path, env: Any
) -> None:
    """verifiers makes the tokens of its prompts itself."""
    client = vf.TrainClientConfig(base_url=f"{tap.url}/v1", renderer_model_name=str(model))
    context = vf.ModelContext("tiny", client, vf.SamplingConfig(max_tokens=16, temperature=1.0))

    async def play(rollout: sa.AsyncRollout, task: Question) -> None:
        await verifiers.push(rollout, await env.run_episode(task, context))

    tap.said.clear()
    async with env.serving(), sa.Producer(redis_url, run=run) as producer:
        for task in env.taskset:
            async with producer.group(SIZE) as group:
                await group.run(play, task)
            assert not group.failures
    found = list(pushed(redis_url, run).values())
    assert len(found) == GROUPS * SIZE
    check_wire(found, tap.said, GROUPS * SIZE * TURNS)
