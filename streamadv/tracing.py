"""Traces in OpenTelemetry: spans of every step from the beginning of a group to its commit.

A process records them once it has a tracer provider, which the program sets, `opentelemetry-instrument`, or, for
commands, `set_up`. Until then nothing of OpenTelemetry is imported, and a call here is a look at `sys.modules`. Only
the package `opentelemetry-api` is needed. Names of spans and attributes are those of its conventions for messaging.

All spans of a group are in one trace, those of a batch in another one. No context travels: every process derives the
ids of a trace and of its first span from the run and the id of the group or batch, and asks its own sampler about them.

An error of a sampler or span processor is a warning: nothing of the run depends on a span.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from . import clock
from .extras import is_installed, remedy
from .messages import log_fields, one_line
from .version import __version__

logger = logging.getLogger(__name__)

#: The present, as spans have it: nanoseconds since 1970.
now = time.time_ns
#: Links of a batch to the traces of its groups at most: what exporters keep by default.
MAX_LINKS: Final = 128
#: Seconds in which the end of a process waits for its last spans to be exported.
FLUSH_S: Final = 5.0
#: Seconds between two lines about errors of the provider.
LOG_INTERVAL_S: Final = 30.0
SYSTEM: Final = "streamadv"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Step(NamedTuple):
    """What a span tells of: a step on the way of a trajectory."""

    name: str
    type: Literal["create", "send", "receive", "process", "settle"]
    kind: Literal["PRODUCER", "CLIENT", "CONSUMER"]
    stream: str


BEGIN: Final = Step("begin", "create", "PRODUCER", "rollouts")
TURN: Final = Step("turn", "process", "CLIENT", "rollouts")
PUSH: Final = Step("push", "send", "PRODUCER", "rollouts")
SCORE: Final = Step("score", "process", "CONSUMER", "scoring")
GROUP: Final = Step("group", "process", "CONSUMER", "rollouts")
NAME: Final = Step("name", "process", "CONSUMER", "groups")
COMPUTE: Final = Step("compute", "process", "CONSUMER", "work")
DELIVER: Final = Step("deliver", "receive", "CLIENT", "results")
TRAIN: Final = Step("train", "process", "CONSUMER", "results")
COMMIT: Final = Step("commit", "settle", "CLIENT", "groups")


def is_on() -> bool:
    """Whether this process records traces."""
    return _api() is not None


def record(
    step: Step,
    run: str,
    groups: Iterable[str],
    since: int,
    *,
    rollouts: int = 0,
    k: int | None = None,
    batch: str | None = None,
    outcomes: Mapping[str, str] = _NONE,
    failed: Mapping[str, str] = _NONE,
    detail: str = "",
) -> None:
    """Spans for a step that ends now: one in the trace of each group, and one in that of the batch.

    groups: ids, read only where traces are recorded. since: when it began (`now`). rollouts: how many it is about.
    k, batch: number and id of the batch. outcomes: how groups ended. failed: reasons by group, one of a small fixed
    set. detail: text for all that failed.

    The first span of a group is BEGIN, that of a batch NAME. Spans have a link to the user's current one, or are its
    children if it is in the same trace.
    """
    api = _api()
    if api is None:
        return
    shared: dict[str, Any] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": step.name,
        "messaging.operation.type": step.type,
        "messaging.destination.name": step.stream,
        "streamadv.run": run,
    }
    shared |= {"messaging.batch.message_count": rollouts} if rollouts else {}
    shared |= {} if k is None else {"streamadv.batch": k}
    try:
        of_batch = None if batch is None else _first_span(api, NAME, run, batch)
        in_batch = [of_batch] if of_batch is not None and of_batch.trace_flags.sampled else []
        of_groups = []
        for group_id in groups:
            first = _first_span(api, BEGIN, run, group_id)
            if first.trace_flags.sampled:
                attributes = {**shared, "messaging.message.conversation_id": group_id}
                if group_id in outcomes:
                    attributes["streamadv.outcome"] = outcomes[group_id]
                span = _start(api, step, first, step is BEGIN, in_batch, attributes, since)
                if group_id in failed:
                    span.set_attribute("error.type", failed[group_id])
                    span.set_status(api.Status(api.StatusCode.ERROR, detail or failed[group_id]))
                span.end()
                of_groups.append(first)
        for first in in_batch:
            links = of_groups[:MAX_LINKS] if step is NAME else []
            _start(api, step, first, step is NAME, links, shared, since).end()
    except Exception as error:
        _provider_failed(error)


@contextmanager
def pushing(run: str, group_id: str, rollouts: int) -> Iterator[None]:
    """Around a push: an exception that leaves the block marks its span as failed."""
    since, failed, detail = now(), _NONE, ""
    try:
        yield
    except Exception as error:
        failed, detail = {group_id: type(error).__name__}, str(error)
        raise
    finally:
        record(PUSH, run, [group_id], since, rollouts=rollouts, failed=failed, detail=detail)


@contextmanager
def inside(run: str, group_id: str) -> Iterator[None]:
    """Around a call of the user's: spans that it begins are in the group's trace, if it has no current span itself."""
    api, token = _api(), None
    if api is not None and not api.get_current_span().get_span_context().is_valid:
        from opentelemetry import context

        try:
            token = context.attach(_under(api, _first_span(api, BEGIN, run, group_id)))
        except Exception as error:
            _provider_failed(error)
    try:
        yield
    finally:
        if token is not None:
            context.detach(token)


def _api() -> Any | None:
    """The module `opentelemetry.trace` if this process has a tracer provider."""
    api = sys.modules.get("opentelemetry.trace")
    get_provider = getattr(api, "get_tracer_provider", None)  # None while another thread imports it
    try:
        is_there = get_provider is not None and not isinstance(get_provider(), api.ProxyTracerProvider)  # type: ignore[union-attr]
    except Exception as error:  # it loads what OTEL_PYTHON_TRACER_PROVIDER names
        _provider_failed(error)
        return None
    return api if is_there else None


def _first_span(api: Any, step: Step, run: str, name: str) -> Any:
    """The span context with which the trace of a group or batch begins: the same in every process.

    Whether it is sampled: what the provider's sampler says of a trace with this id that nobody has decided about.
    """
    digest = blake2b("\0".join((step.name, run, name)).encode(), digest_size=24).digest()
    trace_id, span_id = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")
    sampler = getattr(api.get_tracer_provider(), "sampler", None)  # of the SDK's
    is_sampled = (
        sampler is None
        or sampler.should_sample(_under(api), trace_id, f"{step.name} {step.stream}").decision.is_sampled()
    )
    return api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=api.TraceFlags(is_sampled))


def _under(api: Any, parent: Any | None = None) -> Any:
    """A context with this parent, or without any."""
    from opentelemetry.context import Context

    return Context() if parent is None else api.set_span_in_context(api.NonRecordingSpan(parent), Context())


def _start(
    api: Any, step: Step, first: Any, is_first: bool, to: list[Any], attributes: Mapping[str, Any], since: int
) -> Any:
    """A span in the trace that begins with `first`. is_first: it is this one. to: what it has links to."""
    tracer, current = _tracer_of(api.get_tracer_provider()), api.get_current_span().get_span_context()
    is_in_trace = current.trace_id == first.trace_id
    context = _under(api, current if is_in_trace else first)
    if is_first and hasattr(tracer, "id_generator"):  # the SDK's, else the trace has no first span
        context, tracer, ids = _under(api), copy(tracer), copy(tracer.id_generator)
        ids.generate_trace_id, ids.generate_span_id = lambda: first.trace_id, lambda: first.span_id
        tracer.id_generator = ids
    links = list(map(api.Link, to if is_in_trace or not current.is_valid else [*to, current]))
    name, kind = f"{step.name} {step.stream}", getattr(api.SpanKind, step.kind)
    return tracer.start_span(name, context, kind, attributes, links, start_time=since)


_failed_at = -LOG_INTERVAL_S  # when that was said last


def _provider_failed(error: Exception) -> None:
    """Say it now and then: this may happen with every span."""
    global _failed_at
    if clock.now() - _failed_at >= LOG_INTERVAL_S:
        _failed_at = clock.now()
        advice = "look at OTEL_PYTHON_TRACER_PROVIDER, samplers and processors"
        text = f"{type(error).__name__}: {error}"
        _warn(one_line(f"spans are lost, the tracer provider fails: {advice}: {text}"))


@lru_cache(1)  # the making of a tracer takes longer than that of a span
def _tracer_of(provider: Any) -> Any:
    return provider.get_tracer("streamadv", __version__, schema_url=SCHEMA_URL)


# Commands

_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def set_up(service: str) -> None:
    """Record traces in this process if the environment asks for it, as OpenTelemetry's variables say.

    It asks by OTEL_TRACES_EXPORTER or an endpoint of OTLP. service: its name, unless OTEL_SERVICE_NAME is set. What is
    not installed is one warning: the variables may be meant for other processes.
    """
    asked = next((name for name in (_EXPORTER, *_ENDPOINTS) if os.environ.get(name)), None)
    exporters = os.environ.get(_EXPORTER) or "otlp"
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if asked is None or exporters.strip() == "none" or is_disabled or is_on():
        return
    if not is_installed("opentelemetry.sdk"):
        _warn(f"{asked} is set, and opentelemetry-sdk is not installed: {remedy('opentelemetry.sdk')}")
        return
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in attributes
    resource = Resource.create({} if is_named else {"service.name": service})
    # Not shut down at the exit: `flush` does it, and never for long.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    found = [exporter for name in exporters.split(",") if (exporter := _exporter(name.strip())) is not None]
    for exporter in found:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    if found:
        trace.set_tracer_provider(provider)


def flush() -> None:
    """Export what is recorded, before the process ends: for FLUSH_S at most, if nobody takes it."""
    api = _api()
    force_flush = None if api is None else getattr(api.get_tracer_provider(), "force_flush", None)
    if force_flush is not None:
        thread = threading.Thread(target=force_flush, name="streamadv-flush-traces", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def _exporter(name: str) -> Any | None:
    """A new exporter of this name, as packages register it; None, with a warning, if none is installed."""
    names = [name]
    if name == "otlp":
        protocol = next((os.environ[each] for each in _PROTOCOLS if os.environ.get(each)), None)
        names = list(_OTLP.values()) if protocol is None else [_OTLP.get(protocol, protocol)]
    for each in names:
        for found in entry_points(group="opentelemetry_traces_exporter", name=each):
            return found.load()()
    package = f"opentelemetry-exporter-{names[0].replace('_', '-')}"
    _warn(f"no traces are exported: no installed package has the exporter {name}: pip install {package}")
    return None


def _warn(text: str) -> None:
    logger.warning("%s", text, extra=log_fields("traces_off"))
