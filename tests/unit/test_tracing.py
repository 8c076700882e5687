"""Traces: a group's spans from its beginning to its commit are in one trace; without a provider nothing happens."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamadv import tracing
from streamadv.errors import NoBatchError, TrajectoryError
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer
from streamadv.producer.tickets import Ticket
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.member_table import read_tables
from tests.support import (
    Forward,
    batches_read,
    compute_all,
    consumer_of,
    delivered_batch,
    ended,
    group_all,
    join,
    next_batch,
    packets_of,
    payload_keys,
    problems,
    producing,
    push_groups,
    trajectory,
    unscored,
)

STEPS = ["begin", "push", "group", "name", "compute", "deliver", "train", "commit"]
ROW = {"input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}


class Recorded:
    """The spans that have ended."""

    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self.tracer = provider.get_tracer("test")
        self._exporter = exporter

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def of(self, group_id: str) -> list[ReadableSpan]:
        return [
            span for span in self.spans if _attribute(span, "messaging.message.conversation_id") == group_id
        ]

    def of_batches(self) -> list[ReadableSpan]:
        id_name = "messaging.message.conversation_id"
        return [span for span in self.spans if id_name not in (span.attributes or {})]


def _attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(name)


def steps_of(spans: Sequence[ReadableSpan]) -> list[str]:
    return [_attribute(span, "messaging.operation.name") for span in spans]


def traces_in(spans: Sequence[ReadableSpan]) -> set[int]:
    return {span.context.trace_id for span in spans}


def record(
    monkeypatch: pytest.MonkeyPatch,
    sampler: sampling.Sampler = sampling.DEFAULT_ON,
    processor: SpanProcessor | None = None,
) -> Recorded:
    """Set a provider for this test; a global one could not be taken back."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(processor or SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return Recorded(provider, exporter)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A process that records all traces."""
    return record(monkeypatch)


@pytest.fixture
def through(fake: Connection) -> Iterator[Any]:
    """Train on all that is there: a batch of two groups."""
    queue = TrainerQueue(fake, "r", batch_groups=2, commit="manual")

    def train() -> Any:
        batch = delivered_batch(queue, join(fake, "r"))
        queue.trained(batch)
        queue.commit(queue.state_dict())
        return batch

    yield train
    queue.close()


def push_two(producer: Producer, first: str = "g") -> None:
    for group_id in (first, f"{first}2"):
        producer.begin_group(2, group_id=group_id).push([{**ROW, "rollout_index": i} for i in range(2)])


def test_a_group_is_in_one_trace_from_its_beginning_to_its_commit(
    fake: Connection, recorded: Recorded, through: Any
) -> None:
    with producing(fake, "r") as producer:
        push_two(producer)
        through()
    spans = recorded.of("g")
    assert steps_of(spans) == STEPS
    assert len(traces_in(spans)) == 1
    begin, *others = spans
    assert begin.parent is None
    assert {span.parent.span_id for span in others if span.parent} == {begin.context.span_id}
    assert [_attribute(span, "streamadv.batch") for span in spans[3:]] == [0] * 5
    assert _attribute(spans[2], "streamadv.outcome") == "complete"
    assert traces_in(recorded.of("g2")) != traces_in(spans)
    assert all(span.end_time >= span.start_time > 0 for span in recorded.spans if span.end_time)
    assert problems(join(fake, "r")) == []


def test_a_batch_has_a_trace_with_links_to_those_of_its_groups(
    fake: Connection, recorded: Recorded, through: Any
) -> None:
    with producing(fake, "r") as producer:
        push_two(producer)
        through()
    spans = recorded.of_batches()
    assert steps_of(spans) == STEPS[3:]
    assert len(traces_in(spans)) == 1
    assert {link.context.trace_id for link in spans[0].links} == traces_in(
        [*recorded.of("g"), *recorded.of("g2")]
    )
    links = [link.context.trace_id for span in recorded.of("g")[3:] for link in span.links]
    assert set(links) == traces_in(spans)
    assert len(links) == 5


def test_a_batch_has_a_bounded_number_of_links(
    fake: Connection, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_LINKS", 3)
    with (
        producing(fake, "r") as producer,
        closing(TrainerQueue(fake, "r", batch_groups=5, commit="each_batch")) as queue,
    ):
        push_groups(producer, 5)
        assert next_batch(queue, join(fake, "r")) is not None
    assert len(recorded.of_batches()[0].links) == 3


def test_spans_are_named_after_the_conventions_of_messaging(
    fake: Connection, recorded: Recorded, through: Any
) -> None:
    with producing(fake, "r") as producer:
        push_two(producer)
        through()
    names = ["begin rollouts", "push rollouts", "group rollouts", "name groups", "compute work"]
    assert [span.name for span in recorded.of("g")][:5] == names
    push = recorded.of("g")[1]
    assert push.kind is trace.SpanKind.PRODUCER
    assert dict(push.attributes or {}) == {
        "messaging.system": "streamadv",
        "messaging.operation.name": "push",
        "messaging.operation.type": "send",
        "messaging.destination.name": "rollouts",
        "messaging.batch.message_count": 2,
        "messaging.message.conversation_id": "g",
        "streamadv.run": "r",
    }


def test_spans_of_a_producer_have_links_to_the_users(
    fake: Connection, recorded: Recorded, through: Any
) -> None:
    with producing(fake, "r") as producer:
        with recorded.tracer.start_as_current_span("episode") as episode:
            push_two(producer)
        through()
    begin, push, *others = recorded.of("g")
    assert traces_in([begin, push, *others]) == {begin.context.trace_id}
    assert [[link.context for link in span.links] for span in (begin, push)] == [
        [episode.get_span_context()]
    ] * 2
    assert episode.get_span_context().trace_id not in traces_in(recorded.of("g"))


def test_a_users_span_that_is_not_sampled_decides_about_no_group(
    fake: Connection, recorded: Recorded
) -> None:
    users = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))
    with producing(fake, "r") as producer, trace.use_span(users):
        push_two(producer)
    assert steps_of(recorded.of("g")) == STEPS[:2]


def test_a_push_inside_a_span_of_the_group_is_its_child(fake: Connection, recorded: Recorded) -> None:
    def play(rollout: Any) -> None:
        with recorded.tracer.start_as_current_span("turn"):
            rollout.push(**ROW)

    with producing(fake, "r") as producer, producer.group(1, group_id="g") as group:
        group.run(play)
    (turn,) = [span for span in recorded.spans if span.name == "turn"]
    _, push = recorded.of("g")
    assert push.parent is not None
    assert push.parent.span_id == turn.context.span_id
    assert list(push.links) == []


def test_what_the_user_plays_is_in_the_trace_of_its_group(fake: Connection, recorded: Recorded) -> None:
    def play(rollout: Any) -> None:
        with recorded.tracer.start_as_current_span("turn"):
            rollout.push(**ROW)

    with producing(fake, "r") as producer, producer.group(2, group_id="g") as group:
        group.run(play)
    turns = [span for span in recorded.spans if span.name == "turn"]
    assert len(turns) == 2
    assert traces_in([*turns, *recorded.of("g")]) == {recorded.of("g")[0].context.trace_id}
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_ticket_carries_the_trace_to_another_process(
    fake: Connection, recorded: Recorded, through: Any
) -> None:
    with producing(fake, "r") as one, producing(fake, "r") as other:
        tickets = [ticket.to_json() for ticket in one.begin_group(2, group_id="g").tickets]
        for text in tickets:
            other.rollout(Ticket.from_json(text)).push(**ROW)
        push_groups(one, 1)
        through()
    assert steps_of(recorded.of("g")) == ["begin", "push", "push", *STEPS[2:]]
    assert len(traces_in(recorded.of("g"))) == 1


def test_a_group_that_is_pushed_without_a_ticket_has_one_trace(
    fake: Connection, recorded: Recorded, through: Any
) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 2)
        through()
    assert steps_of(recorded.of("g0000")) == STEPS[1:]
    assert len(traces_in(recorded.of("g0000"))) == 1


def test_groups_begun_together_have_traces_of_their_own(fake: Connection, recorded: Recorded) -> None:
    with producing(fake, "r") as producer:
        ids = []
        groups = producer.groups(1, ahead=2)
        for _, group in zip(range(3), groups, strict=False):
            ids.append(group.group_id)
            group.push([{**ROW, "rollout_index": 0}])
        groups.close()  # type: ignore[attr-defined]
    assert [steps_of(recorded.of(group_id)) for group_id in ids] == [["begin", "push"]] * 3
    assert len(traces_in(recorded.spans)) == 3


class Chosen(sampling.Sampler):
    """Samples the traces of these ids, or all others."""

    def __init__(self, ids: set[int], others: bool = False) -> None:
        self.ids, self.others = ids, others

    def should_sample(
        self,
        parent_context: Any,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        links: Any = (),
    ) -> sampling.SamplingResult:
        is_chosen = (trace_id in self.ids) != self.others
        decision = sampling.Decision.RECORD_AND_SAMPLE if is_chosen else sampling.Decision.DROP
        return sampling.SamplingResult(decision, attributes)

    def get_description(self) -> str:
        return "Chosen"


@pytest.mark.parametrize("wrap", [sampling.ParentBased, lambda sampler: sampler])
def test_every_process_decides_alike_which_groups_it_records(
    wrap: Any, fake: Connection, monkeypatch: pytest.MonkeyPatch, through: Any
) -> None:
    with monkeypatch.context() as first, producing(fake, "r") as producer:
        begun = record(first)
        push_two(producer)
        (chosen,) = traces_in(begun.of("g"))
    recorded = record(monkeypatch, wrap(Chosen({chosen})))  # as another process
    with producing(fake, "r"):
        through()
    assert steps_of(recorded.of("g")) == STEPS[2:]
    assert recorded.of("g2") == []
    assert traces_in(recorded.spans) == {chosen}
    assert [link for span in recorded.spans for link in span.links] == []  # their batch is not sampled


def test_a_batch_has_links_to_those_of_its_groups_that_are_sampled(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, through: Any
) -> None:
    with producing(fake, "r") as producer:
        with monkeypatch.context() as first:
            begun = record(first)
            push_two(producer)
        recorded = record(monkeypatch, Chosen(traces_in(begun.of("g2")), others=True))
        through()
    name, *_ = recorded.of_batches()
    assert {link.context.trace_id for link in name.links} == traces_in(recorded.of("g"))
    assert len(name.links) == 1


def test_a_ratio_chooses_groups_with_all_their_spans(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, through: Any
) -> None:
    recorded = record(monkeypatch, sampling.ParentBasedTraceIdRatio(0.5))
    with (
        producing(fake, "r") as producer,
        closing(TrainerQueue(fake, "r", batch_groups=40, commit="each_batch")) as queue,
    ):
        for number in range(40):
            producer.begin_group(1, group_id=f"g{number}").push([{**ROW, "rollout_index": 0}])
        assert next_batch(queue, join(fake, "r")) is not None
    counts = [len(recorded.of(f"g{number}")) for number in range(40)]
    assert set(counts) == {
        0,
        len(STEPS) - 2,
    }  # of 40 groups some are chosen; the batch is not marked as trained
    assert 8 <= sum(map(bool, counts)) <= 32


def test_what_is_played_in_a_group_that_is_not_sampled_is_not_recorded(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = record(monkeypatch, sampling.ParentBased(Chosen(set())))

    def play(rollout: Any) -> None:
        assert trace.get_current_span().get_span_context().is_valid
        with recorded.tracer.start_as_current_span("turn"):
            rollout.push(**ROW)

    with producing(fake, "r") as producer, producer.group(1) as group:
        group.run(play)
    assert recorded.spans == ()


def test_a_scorer_is_in_the_trace(fake: Connection, recorded: Recorded) -> None:
    settings = RunSettings(scorers=["judge"])
    with producing(fake, "r", settings.model_dump(exclude_none=True)) as producer:
        producer.push([trajectory("g", index, reward=...) for index in range(2)])
        run, scorer = join(fake, "r"), Scorer(fake, "r", "judge")
        consumer = consumer_of(run, "judge")
        [entries] = batches_read(consumer)
        consumer.stop.clear()
        scorer.work(consumer, entries, lambda items: [1.0] * len(items))
        group_all(run)
    assert steps_of(recorded.of("g")) == ["push", "score", "group"]
    assert len(traces_in(recorded.of("g"))) == 1


def failures(spans: Sequence[ReadableSpan]) -> list[tuple[str, Any]]:
    return [
        (span.name, _attribute(span, "error.type"))
        for span in spans
        if span.status.status_code is trace.StatusCode.ERROR
    ]


def test_a_filtered_group_is_marked(fake: Connection, recorded: Recorded) -> None:
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        producer.push([trajectory("g", index, reward=1.0) for index in range(2)])
        group_all(join(fake, "r"))
    assert failures(recorded.of("g")) == [("group rollouts", "dropped: zero_variance")]


def test_an_expired_group_is_marked(fake: Connection, recorded: Recorded, forward: Forward) -> None:
    with producing(fake, "r", {"group_deadline_s": 5}) as producer:
        producer.push([trajectory("g", 0)])
        run = join(fake, "r")
        group_all(run)
        forward(10)
        group_all(run)
    assert failures(recorded.of("g")) == [("group rollouts", "dropped: expired")]
    assert steps_of(recorded.of("g")) == ["push", "group", "group"]


def test_a_group_that_a_late_score_completes_is_in_its_trace(fake: Connection, recorded: Recorded) -> None:
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        producer.push([unscored("g", 0), unscored("g", 1)])
        run = join(fake, "r")
        group_all(run)
        for index in range(2):
            producer.score("g", index, 1.0)
        group_all(run)
    assert failures(recorded.of("g")) == [("group rollouts", "dropped: zero_variance")]
    assert len(traces_in(recorded.of("g"))) == 1


def test_a_group_of_failed_rollouts_is_marked(fake: Connection, recorded: Recorded) -> None:
    with producing(fake, "r") as producer:
        producer.push([trajectory("g", 0), ended("g", 1, 2, "failed")])
        group_all(join(fake, "r"))
    assert failures(recorded.of("g")) == [("group rollouts", "dropped: incomplete")]


def test_a_stale_group_is_marked(fake: Connection, recorded: Recorded) -> None:
    with (
        producing(fake, "r") as producer,
        closing(
            TrainerQueue(fake, "r", batch_groups=1, max_staleness=None, drop_after=0, commit="each_batch")
        ) as queue,
    ):
        run = join(fake, "r")
        push_groups(producer, 1, prefix="a", model_version=0)
        batch = delivered_batch(queue, run)
        queue.trained(batch)
        push_groups(producer, 1, prefix="old", model_version=0)
        push_groups(producer, 1, prefix="new", model_version=1)
        assert next_batch(queue, run) is not None
    assert failures(recorded.of("old0000")) == [("name groups", "dropped: stale")]
    assert failures(recorded.of("new0000")) == []


def test_dead_letters_are_marked(fake: Connection, recorded: Recorded) -> None:
    """One that no worker can compute, and one whose payload the trainer cannot read."""
    chain = {"estimator": "grpo", "kl": {"coefficient": 0.1}}
    with (
        producing(fake, "r") as producer,
        closing(TrainerQueue(fake, "r", batch_groups=3, chain=chain, commit="each_batch")) as queue,
    ):
        run = join(fake, "r")
        for name in ("g", "gone", "lost"):
            producer.push([trajectory(name, index, ref_log_probs=[0.0] * 5) for index in range(2)])
        group_all(run)
        keys = {
            name: key for key in payload_keys(run) for name in ("g", "gone", "lost") if _is_of(run, key, name)
        }
        fake.scripts.hdel(keys["gone"], "ref_log_probs")
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
        compute_all(run)
        fake.scripts.hdel(keys["lost"], "input_ids")
        batch = queue.next_batch(timeout=0)
        assert batch is not None
        assert {reference.group_id for reference in batch.references} == {"g"}
    assert failures(recorded.of("gone")) == [("compute work", "dead: undecodable")]
    assert failures(recorded.of("lost")) == [("deliver results", "dead: undecodable")]
    assert failures(recorded.of("g")) == []


def _is_of(run: Any, key: bytes, name: str) -> bool:
    entries = run.connection.scripts.xrange(run.home.keys.groups)
    return any(key in fields[b"payloads"] and fields[b"group_id"] == name.encode() for _, fields in entries)


def test_a_push_that_fails_is_marked(fake: Connection, recorded: Recorded) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(1, group_id="g")
        producer.push([trajectory("g", 0, 1)])
        with pytest.raises(TrajectoryError, match="size"):
            producer.push([trajectory("g", 1, 2)])
        assert group.push([{**ROW, "rollout_index": 0}]).codes == ["duplicate"]
    assert failures(recorded.of("g")) == [("push rollouts", "TrajectoryError")]


# What is foreign or broken


def test_a_foreign_entry_ends_no_grouper(fake: Connection, recorded: Recorded) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        traced = bytes(8) + b"\x02" + bytes(60)
        fake.scripts.xadd(run.home.keys.rollouts, {"table": traced})
        fake.scripts.xadd(run.home.keys.rollouts, {"table": traced, "group_id": b"\xff"})
        producer.push([trajectory("g", index) for index in range(2)])
        group_all(run)
    assert steps_of(recorded.of("g")) == ["push", "group"]


def test_an_overwritten_group_ends_no_grouper(fake: Connection, recorded: Recorded, forward: Forward) -> None:
    with producing(fake, "r", {"group_deadline_s": 5}) as producer:
        run = join(fake, "r")
        for group_id in ("overwritten", "g"):
            producer.push([trajectory(group_id, 0)])
        group_all(run)
        fake.scripts.set(run.home.keys.group("overwritten"), "something else")
        forward(10)
        group_all(run)
    assert failures(recorded.of("g")) == [("group rollouts", "dropped: expired")]


class Failing(SpanProcessor):
    """A user's processor that raises in one of its methods."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self._fail)

    def _fail(self, *_: Any, **__: Any) -> None:
        raise ValueError("the disk is full")


@pytest.mark.parametrize("method", ["on_start", "on_end"])
def test_a_provider_that_fails_stops_nothing(
    method: str,
    fake: Connection,
    monkeypatch: pytest.MonkeyPatch,
    through: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tracing, "_failed_at", -tracing.LOG_INTERVAL_S)
    record(monkeypatch, processor=Failing(method))
    with producing(fake, "r") as producer:
        push_two(producer)
        batch = through()
    assert {reference.group_id for reference in batch.references} == {"g", "g2"}
    said = [message for message in caplog.messages if "tracer provider fails" in message]
    assert said == [
        "spans are lost, the tracer provider fails: look at OTEL_PYTHON_TRACER_PROVIDER, samplers and processors: "
        "ValueError: the disk is full"
    ]
    assert problems(join(fake, "r")) == []


def test_a_provider_that_cannot_be_loaded_stops_nothing(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, through: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_failed_at", -tracing.LOG_INTERVAL_S)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "no such one")
    with producing(fake, "r") as producer:
        push_two(producer)
        through()
    assert any(
        "tracer provider fails: look at OTEL_PYTHON_TRACER_PROVIDER" in text for text in caplog.messages
    )


# Where no traces are recorded


def test_nothing_of_opentelemetry_is_imported_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert not tracing.is_on()
    assert "opentelemetry.trace" not in sys.modules


def test_a_member_table_of_an_older_release_is_read() -> None:
    """It ends with 25 bytes of context, and its flags say so."""
    (packet,) = packets_of([trajectory("g", index) for index in range(2)], 1 << 20)
    size, count, flags, text_size = struct.unpack_from("<IIII", packet.table)
    head = struct.pack("<IIII", size + 25, count, flags | 2, text_size)
    older = head + packet.table[16:] + bytes(range(25))
    together = read_tables([older, packet.table])
    assert together.counts == [2, 2]
    assert together.columns[0] == together.columns[1]
    assert together.members.table["index"].tolist() == [0, 1, 0, 1]


def test_a_ticket_of_an_older_release_is_read(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        text = producer.begin_group(1, group_id="g").tickets[0].to_json()
        older = json.dumps(json.loads(text) | {"trace": "00-abc"})
        assert producer.rollout(Ticket.from_json(older)).push(**ROW) == "pushed"
