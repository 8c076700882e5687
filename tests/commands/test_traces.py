"""Traces across processes: a producer's trace goes on in the worker processes and in `streamadv consume`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamadv.producer import Producer
from tests.support import some_of

pytestmark = [pytest.mark.server]

ROW = {"input_ids": [1, 2], "response_mask": [0, 1]}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """This process records traces."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def start(url: str, run: str, output: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    """A command that writes its spans, as JSON, into `output`."""
    command = [sys.executable, "-m", "streamadv", *words, "--redis", url, "--run", run]
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OTEL_TRACES_EXPORTER": "console", **variables},
        )


def spans_in(output: Path) -> list[dict[str, Any]]:
    """What the SDK's console exporter has printed: JSON objects one after another."""
    text, at, spans = output.read_text(), 0, []
    while start := text.find("{", at) + 1:
        span, at = json.JSONDecoder().raw_decode(text, start - 1)
        spans.append(span)
    return spans


@pytest.mark.release
@pytest.mark.processes
@pytest.mark.slow
def test_a_trace_goes_through_all_processes(
    redis_url: str, run: str, tmp_path: Path, recorded: InMemorySpanExporter
) -> None:
    outputs = {name: tmp_path / name for name in ("grouper", "advantage", "consume")}
    workers = [
        start(redis_url, run, outputs["grouper"], "worker", "grouper"),
        start(redis_url, run, outputs["advantage"], "worker", "advantage", OTEL_SERVICE_NAME="mine"),
    ]
    with Producer(redis_url, run) as producer:
        group = producer.begin_group(2, group_id="g")
        group.push([{**ROW, "rollout_index": index, "reward": 1.0} for index in range(2)])
        words = ("consume", "-o", str(tmp_path / "out"), "--max-groups", "1", "--timeout", "240")
        consumer = start(redis_url, run, outputs["consume"], *words)
        _, log = consumer.communicate(timeout=240)
    assert consumer.returncode == 0, log
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=240)
        assert worker.returncode == 0, log
    spans = {name: spans_in(output) for name, output in outputs.items()}
    steps = {
        name: [
            span["name"]
            for span in spans[name]
            if span["attributes"].get("messaging.message.conversation_id") == "g"
        ]
        for name in spans
    }
    assert steps == {
        "grouper": ["group rollouts"],
        "advantage": ["compute work"],
        "consume": ["name groups", "deliver results", "train results", "commit groups"],
    }
    begin, push = recorded.get_finished_spans()
    trace_id = f"0x{begin.context.trace_id:032x}"
    of_group = [
        span
        for name in spans
        for span in spans[name]
        if "messaging.message.conversation_id" in span["attributes"]
    ]
    assert {span["context"]["trace_id"] for span in of_group} == {trace_id}
    assert push.context.trace_id == begin.context.trace_id
    of_batch = [span for name in spans for span in spans[name] if span not in of_group]
    assert len({span["context"]["trace_id"] for span in of_batch}) == 1
    assert len(of_batch) == 5
    services = [spans[name][0]["resource"]["attributes"]["service.name"] for name in outputs]
    assert services == ["streamadv-grouper", "mine", "streamadv-consume"]


def run_streamadv(code: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in a process in which `code` has run before."""
    program = f"import sys\n{code}\nfrom streamadv.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )


#: A worker that ends at once.
NO_SERVER = ("worker", "grouper", "--redis", "nowhere://")
WITHOUT_SDK = "sys.modules['opentelemetry.sdk'] = None"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "variables", "expected"),
    [
        (
            WITHOUT_SDK,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"},
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and opentelemetry-sdk is not installed: "
            "pip install 'streamadv[otel]'",
        ),
        ("", {"OTEL_TRACES_EXPORTER": "nowhere"}, "no installed package has the exporter nowhere"),
    ],
)
def test_what_is_missing_is_one_line(code: str, variables: dict[str, str], expected: str) -> None:
    done = run_streamadv(code, *NO_SERVER, **variables)
    warning, error = done.stderr.splitlines()
    assert expected in warning
    assert "nowhere://" in error


@pytest.mark.processes
@pytest.mark.parametrize(
    "variables", some_of([{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}], 3)
)
def test_unasked_nothing_is_imported(variables: dict[str, str]) -> None:
    code = "import atexit; atexit.register(lambda: print('opentelemetry.sdk.trace.export' in sys.modules))"
    assert run_streamadv(code, *NO_SERVER, **variables).stdout.strip() == "False"


def test_what_a_task_plays_is_in_the_trace_of_its_group(
    redis_url: str, run: str, recorded: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer("test")

    async def play(rollout: Any) -> None:
        with tracer.start_as_current_span("turn"):
            await rollout.push(**ROW, reward=1.0)

    async def produce() -> None:
        async with Producer(redis_url, run) as producer, producer.group(2, group_id="g") as group:
            await group.run(play)

    asyncio.run(produce())
    spans = recorded.get_finished_spans()
    assert [span.name for span in spans].count("turn") == 2
    assert len({span.context.trace_id for span in spans}) == 1
