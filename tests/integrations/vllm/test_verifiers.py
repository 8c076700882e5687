"""verifiers' training client on a real vLLM: what the engine says on the wire is what its episodes push."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import streamadv as sa
from tests.gateway.play import pushed

from .tap import Tap
from .wire import check_wire

vf = pytest.importorskip("verifiers.v1")
from streamadv.integrations import verifiers  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]
TASK = {"type": "T", "data": {"idx": 0, "prompt": "hi"}}
ROLLOUTS, TURNS = 8, 3


async def test_episodes_of_its_training_client(redis_url: str, run: str, tap: Tap, model: Path) -> None:
    from verifiers.v1.clients import TrainClient
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.types import SamplingConfig, UserMessage

    config = vf.TrainClientConfig(base_url=f"{tap.url}/v1", renderer_model_name=str(model))
    client, sampling = TrainClient(config), SamplingConfig(temperature=1.0, max_tokens=12)

    async def play(rollout: sa.AsyncRollout) -> None:
        said = {"task": TASK, "agent": {"config": {}}, "rewards": {"right": {"score": 1.0, "weight": 1.0}}}
        trace: Any = vf.WireEpisode.model_validate(
            {"task": TASK, "ok": True, "traces": [{**said, "ok": True}]}
        )
        (one,) = trace.traces
        messages: list[Any] = []
        for number in range(TURNS):
            messages.append(UserMessage(content=f"where is {rollout.rollout_index} {number}?"))
            turn = prepare_turn(one, list(messages))
            body = {"model": "tiny", "messages": [message.model_dump() for message in messages]}
            answer = await client.get_response(ChatDialect(), body, sampling, turn=turn)
            turn.commit(answer)
            messages.append(answer.message)
        assert await verifiers.push(rollout, trace) == "pushed"

    async with sa.Producer(redis_url, run) as producer:
        async with producer.group(ROLLOUTS) as group:
            await group.run(play)
        assert not group.failures
    await client.close()
    found = list((await asyncio.to_thread(pushed, redis_url, run)).values())
    assert len(found) == ROLLOUTS
    check_wire(found, tap.said, ROLLOUTS * TURNS)
