"""Traces in OpenTelemetry: spans of every step from the beginning of a group to its commit.

A process records them once it has a tracer provider, which the program sets, `opentelemetry-instrument`, or, for
commands, `set_up`. Until then nothing of OpenTelemetry is imported, and a call here is a look at `sys.modules`. Only
the package `opentelemetry-api` is needed. Names of spans and attributes are those of its conventions for messaging.

All spans of a group are in one trace, that of its beginning. Its context travels in tickets as a `traceparent` (W3C),
with packets as CONTEXT_BYTES bytes; without these there is no trace, or it is not sampled. A batch has a trace of its
own, with links to those of its groups; its context travels in the batch's record.

An error of a sampler or span processor is a warning: nothing of the run depends on a span.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Final, Literal, NamedTuple, Protocol

from . import clock
from .extras import is_installed, remedy
from .messages import log_fields, one_line
from .version import __version__

logger = logging.getLogger(__name__)

#: The context of a span beside a member table: trace id, span id, flags.
CONTEXT_BYTES: Final = 16 + 8 + 1
#: Links of a batch to the traces of its groups at most: what exporters keep by default.
MAX_LINKS: Final = 128
#: Seconds in which the end of a process waits for its last spans to be exported.
FLUSH_S: Final = 5.0
#: Seconds between two lines about errors of the provider.
LOG_INTERVAL_S: Final = 30.0
SYSTEM: Final = "streamadv"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1


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


class Traced(Protocol):
    """A group whose trace context came with its packets, if one did."""

    @property
    def group_id(self) -> str: ...
    @property
    def trace(self) -> bytes | None: ...


class Span:
    """A span under way, or none: `NO_SPAN`."""

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def context(self) -> bytes | None:
        """What travels with a packet. None if the span is not sampled."""
        if self._span is None:
            return None
        context = self._span.get_span_context()
        if not context.trace_flags & _SAMPLED:
            return None
        return bytes(
            context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big") + bytes([_SAMPLED])
        )

    @property
    def traceparent(self) -> str | None:
        """What travels in a ticket or a record, also if the span is not sampled."""
        if self._span is None:
            return None
        context = self._span.get_span_context()
        if not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & _SAMPLED:02x}"

    def fail(self, reason: str, text: str = "") -> None:
        """What the span tells of has failed. reason: one of a small fixed set."""
        if self._span is not None:
            api = sys.modules["opentelemetry.trace"]
            self._span.set_attribute("error.type", reason)
            self._span.set_status(api.Status(api.StatusCode.ERROR, text or reason))

    def end(self, at: int | None = None) -> None:
        """It has ended now, or at this time."""
        if self._span is not None:
            try:
                self._span.end(at)
            except Exception as error:
                _provider_failed(error)


NO_SPAN: Final = Span()
_NOTHING: Final = nullcontext(NO_SPAN)


def is_on() -> bool:
    """Whether this process records traces."""
    return _api() is not None


def now() -> int:
    """The present, as spans have it: nanoseconds since 1970."""
    return time.time_ns()


def context_of(traceparent: str | None) -> bytes | None:
    """The bytes of a `traceparent`; None for none, and for what is none."""
    match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
    return None if match is None else bytes.fromhex("".join(match.groups()))


def is_sampled(context: bytes) -> bool:
    """Whether spans under this context are recorded."""
    return bool(context[-1] & _SAMPLED)


def traces_of(groups: Iterable[Traced]) -> dict[str, bytes]:
    """Trace contexts of groups by id, of those that have one."""
    return {group.group_id: group.trace for group in groups if group.trace is not None}


def begun(run: str, group_id: str, rollouts: int, since: int) -> str | None:
    """The `traceparent` of a group that has been begun now: of a span under the user's current one, if there is one."""
    api = _api()
    if api is None:
        return None
    made = _start(api, BEGIN, None, _attributes(BEGIN, run, group_id, rollouts), (), since)
    made.end()
    return made.traceparent


def pushing(run: str, group_id: str, traceparent: str | None, rollouts: int) -> AbstractContextManager[Span]:
    """Around a push. An exception that leaves the block marks the span as failed. It is not made the current one.

    Its parent is the user's current span, with a link to the group's trace if that is another one; else the group's
    beginning, `traceparent`, if it is known.
    """
    api = _api()
    return _NOTHING if api is None else _pushing(api, run, group_id, traceparent, rollouts)


@contextmanager
def _pushing(api: Any, run: str, group_id: str, traceparent: str | None, rollouts: int) -> Iterator[Span]:
    of_group, context, links = _remote(api, context_of(traceparent)), None, []
    current = api.get_current_span().get_span_context()
    if of_group is not None and not current.is_valid:
        context = _in_context(api, of_group)
    elif of_group is not None and of_group.trace_id != current.trace_id:
        links = [api.Link(of_group)]
    started = _start(api, PUSH, context, _attributes(PUSH, run, group_id, rollouts), links)
    try:
        yield started
    except Exception as error:
        started.fail(type(error).__name__, str(error))
        raise
    finally:
        started.end()


def travelling(traceparent: str | None, push: Span) -> bytes | None:
    """What goes with the packets of a push: where its group's trace began, or the push itself if nobody knows that.

    None if it is not sampled.
    """
    if traceparent is None:
        return push.context
    context = context_of(traceparent)
    return context if context is not None and is_sampled(context) else None


@contextmanager
def inside(traceparent: str | None) -> Iterator[None]:
    """Around a call of the user's: spans that it begins are in the group's trace, if it has no current span itself."""
    api = _api()
    remote = None if api is None else _remote(api, context_of(traceparent))
    if api is None or remote is None or api.get_current_span().get_span_context().is_valid:
        yield
        return
    from opentelemetry import context

    token = context.attach(_in_context(api, remote))
    try:
        yield
    finally:
        context.detach(token)


def record(
    step: Step,
    run: str,
    groups: Mapping[str, bytes],
    since: int,
    *,
    k: int | None = None,
    batch: str | None = None,
    failed: Mapping[str, str] | None = None,
    outcomes: Mapping[str, str] | None = None,
    until: int | None = None,
) -> None:
    """A span in the trace of each group for a step that has ended now, or at `until`.

    groups: trace contexts by id. since: when it began (`now`). k: of the batch. batch: `traceparent` of its trace, to
    which the spans get a link. failed: reasons by group, of those that are dropped or dead. outcomes: how groups ended.
    """
    api = _api() if groups else None
    if api is None:
        return
    end, of_batch = until or now(), _remote(api, context_of(batch))
    links = [] if of_batch is None else [api.Link(of_batch)]
    for group_id, context in groups.items():
        parent = _remote(api, context)
        if parent is None:
            continue
        attributes = _attributes(step, run, group_id)
        if k is not None:
            attributes["streamadv.batch"] = k
        if outcomes and group_id in outcomes:
            attributes["streamadv.outcome"] = outcomes[group_id]
        made = _start(api, step, _in_context(api, parent), attributes, links, since)
        if failed and group_id in failed:
            made.fail(failed[group_id])
        made.end(end)


def record_batch(
    step: Step, run: str, k: int, since: int, batch: str | None, groups: Mapping[str, bytes] | None = None
) -> str | None:
    """A span in the trace of a batch for a step that has ended now; returns its `traceparent` if it is sampled.

    batch: `traceparent` of the trace; None begins one, with links to those of the first MAX_LINKS of `groups`.
    """
    api = _api()
    parent = None if api is None else _remote(api, context_of(batch))
    if api is None or (parent is None and not groups):
        return None
    remotes = [_remote(api, context) for context in list((groups or {}).values())[:MAX_LINKS]]
    links = [api.Link(remote) for remote in remotes if remote is not None]
    attributes = _attributes(step, run) | {"streamadv.batch": k}
    made = _start(api, step, _in_context(api, parent), attributes, links, since)
    made.end(now())
    return made.traceparent if made.context else None


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


def _start(
    api: Any,
    step: Step,
    context: Any,
    attributes: Mapping[str, str | int],
    links: Iterable[Any],
    since: int | None = None,
) -> Span:
    kind, name = getattr(api.SpanKind, step.kind), f"{step.name} {step.stream}"
    try:
        tracer = _tracer_of(api.get_tracer_provider())
        return Span(tracer.start_span(name, context, kind, attributes, links, start_time=since))
    except Exception as error:
        _provider_failed(error)
        return NO_SPAN


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


def _attributes(step: Step, run: str, group_id: str = "", rollouts: int = 0) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": step.name,
        "messaging.operation.type": step.type,
        "messaging.destination.name": step.stream,
        "streamadv.run": run,
    }
    if group_id:
        attributes["messaging.message.conversation_id"] = group_id
    if rollouts:
        attributes["messaging.batch.message_count"] = rollouts
    return attributes


def _remote(api: Any, context: bytes | None) -> Any | None:
    """The span context of these bytes; None for what is none."""
    if context is None or len(context) != CONTEXT_BYTES:
        return None
    trace_id, span_id = int.from_bytes(context[:16], "big"), int.from_bytes(context[16:24], "big")
    made = api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=api.TraceFlags(context[24]))
    return made if made.is_valid else None


def _in_context(api: Any, parent: Any | None) -> Any:
    """A context with this parent, or without any."""
    from opentelemetry.context import Context

    return Context() if parent is None else api.set_span_in_context(api.NonRecordingSpan(parent), Context())


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
