"""Turns are spans in the trace of their group."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.unit.integrations.fake_engine import serving

from .engine import talkative
from .play import gateway_of, playing

pytestmark = pytest.mark.server


@pytest.mark.parametrize("begun_by", ["the gateway", "a producer"])
async def test_turns_are_spans_of_their_group(
    redis_url: str, run: str, begun_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            if begun_by == "the gateway":
                (rollout,) = await gateway.begin()
                first = await gateway.say(rollout, "hello")
                await gateway.say(rollout, "hello", first, "and?")
                await gateway.end(rollout, reward=1.0)
            else:
                async with gateway.producer.group(1) as group:
                    agent = gateway_of(gateway).access(next(iter(group)))
                    handed = {"base_url": agent.base_url, "api_key": agent.api_key}
                    first = await gateway.say(handed, "hello")
                    await gateway.say(handed, "hello", first, "and?")
                    await agent.end(reward=1.0)
    begin, first_turn, second_turn = [
        next(span for span in exporter.get_finished_spans() if span.name == "begin rollouts"),
        *(span for span in exporter.get_finished_spans() if span.name == "turn rollouts"),
    ]
    for turn in (first_turn, second_turn):
        assert turn.context.trace_id == begin.context.trace_id
        assert turn.parent is not None
        assert turn.parent.span_id == begin.context.span_id
        assert turn.attributes is not None
        assert turn.attributes["streamadv.run"] == run
    assert first_turn.start_time < first_turn.end_time <= second_turn.start_time < second_turn.end_time
