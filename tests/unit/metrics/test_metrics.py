"""Metrics as Prometheus sees them: every test reports something and reads `/metrics`."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis.exceptions
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from streamadv import __version__, metrics
from streamadv.errors import ServerUnreachableError, SettingError
from streamadv.metrics import instruments
from streamadv.metrics.exposition import ArrayHistogram
from streamadv.run import open_run
from streamadv.status import read_status
from streamadv.store.connection import Connection

Delta = Callable[..., float]

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
STATUS: dict[str, Any] = {
    "ledger": {
        "pushed": 20,
        "trained": 9,
        "dropped": {"late": 2, "failed": 1},
        "dead": {"missing_column": 1},
        "queued": 4,
        "in_flight": 3,
    },
    "balanced": True,
    "groups": {"open": 2, "short": {"groups": 3, "ended": 12, "trajectories": 20, "usable": 100}},
    "bytes": {"live": 1000, "reserved": 500},
    "streams": {
        "rollouts": {"length": 5, "pending": 2, "lag": 3, "oldest_age_s": 1.5},
        "work": {"length": 0, "pending": 0, "lag": 0, "oldest_age_s": None},
    },
    "trainer": {"version": 7},
    "evaluations": [
        {
            "data_source": "math",
            "version": 6,
            "trajectories": 64,
            "failed": 1,
            "mean": 0.5,
            "std_error": 0.0625,
            "best": 0.75,
        }
    ],
    "producers": [{"state": "open"}, {"state": "open"}, {"state": "lost"}],
}


def value(name: str, **labels: str) -> float | None:
    """The sample as it is exposed now; None if there is none."""
    for family in text_string_to_metric_families(generate_latest(metrics.REGISTRY).decode()):
        for sample in family.samples:
            if sample.name == f"streamadv_{name}" and sample.labels == labels:
                return sample.value
    return None


@pytest.fixture
def delta() -> Delta:
    """The increase of a sample since the first time it was asked for."""
    first: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def increase(name: str, **labels: str) -> float:
        now = value(name, **labels) or 0.0
        return now - first.setdefault((name, frozenset(labels.items())), now)

    return increase


@pytest.fixture(autouse=True)
def _no_data_sources_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_sources", set())


@pytest.fixture
def ledger() -> Iterator[None]:
    yield
    metrics.register_ledger(None)


@pytest.fixture(scope="module")
def port() -> int:
    return metrics.serve(0, run="a-run")


def fetch(port: int, path: str = "/metrics", accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as reply:
        text: str = reply.read().decode()
    return text


def compute_unit(**changes: Any) -> None:
    unit: dict[str, Any] = {
        "rewards": [],
        "advantages": [],
        "response_tokens": [],
        "turns": [],
        "truncated": [],
        "group_reward_std": [],
        "group_completion_s": [],
        "metrics": {},
    }
    metrics.work_item_computed(**unit | changes)


def report_everything() -> None:
    """Call every function so that every metric has a sample."""
    for event in ("delivered", "acked", "reclaimed", "duplicate"):
        metrics.entries("grouper", event, 2)
    with metrics.timed("grouper", "take"):
        pass
    metrics.retried("grouper", "connection")
    metrics.group_recreated("grouper")
    metrics.group_ended("complete", "math")
    metrics.producer_pushed(["pushed"])
    metrics.backpressure(0.5)
    metrics.unscorable("scorer", "value")
    compute_unit(
        rewards=[1.0],
        advantages=[0.5],
        metrics=dict.fromkeys(instruments.TRAINING_GAUGES, 0.1),
        is_weights=[1.0],
    )
    metrics.batch_delivered(3, [1], [0], [1], 10, 1, 0.5, [2.0])


# Names


def test_every_metric_declared_can_be_reported(ledger: None) -> None:
    report_everything()
    metrics.register_ledger(lambda: STATUS)
    collectors: list[Any] = list(metrics.REGISTRY._collector_to_names)
    declared = {family.name for collector in collectors for family in collector.describe()}
    families = text_string_to_metric_families(generate_latest(metrics.REGISTRY).decode())
    assert declared <= {family.name for family in families if family.samples}


def test_names_follow_the_conventions(ledger: None) -> None:
    report_everything()
    metrics.register_ledger(lambda: STATUS)
    for family in text_string_to_metric_families(generate_latest(metrics.REGISTRY).decode()):
        name = family.name.removesuffix("_created")
        assert name.startswith("streamadv_")
        assert family.documentation.endswith(".")
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples)
        else:
            assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info")) or name.endswith(
                "build_info"
            )
        for word in ("_ms", "_milliseconds", "_percent", "_mb", "_gib", "_minutes"):
            assert not name.endswith(word)


def test_both_exposition_formats_are_valid(port: int, ledger: None) -> None:
    report_everything()
    metrics.register_ledger(lambda: STATUS)
    plain = {family.name for family in text_string_to_metric_families(fetch(port))}
    assert "streamadv_reward" in plain
    families = parse_openmetrics(fetch(port, accept=OPENMETRICS))  # type: ignore[no-untyped-call]
    assert {family.name for family in families} == plain


# Stages


def test_a_step_is_timed_also_when_it_raises(delta: Delta) -> None:
    delta("stage_duration_seconds_count", stage="grouper", step="x")
    with pytest.raises(KeyError), metrics.timed("grouper", "x"):
        raise KeyError
    with metrics.timed("grouper", "x"):
        pass
    assert delta("stage_duration_seconds_count", stage="grouper", step="x") == 2


@pytest.mark.parametrize("event", ["delivered", "acked", "reclaimed", "duplicate"])
def test_entries_count_by_event_and_stage(event: metrics.Event, delta: Delta) -> None:
    names = [f"{name}_total" for name in instruments.EVENTS]
    for name in names:
        delta(name, stage="grouper")
    metrics.entries("grouper", event, 5)
    assert {name: delta(name, stage="grouper") for name in names} == {
        name: 5 if name == f"{event}_total" else 0 for name in names
    }


def test_only_finished_work_is_a_success() -> None:
    metrics.entries("idle", "delivered", 5)
    metrics.entries("idle", "acked", 0)
    assert value("last_success_timestamp_seconds", stage="idle") is None
    metrics.entries("idle", "acked")
    assert (value("last_success_timestamp_seconds", stage="idle") or 0) > 1.7e9


def test_connection_errors_and_missing_groups_count(delta: Delta) -> None:
    delta("connection_errors_total", stage="advantage", reason="moved")
    delta("nogroup_recreations_total", stage="advantage")
    metrics.retried("advantage", "moved")
    metrics.group_recreated("advantage")
    assert delta("connection_errors_total", stage="advantage", reason="moved") == 1
    assert delta("nogroup_recreations_total", stage="advantage") == 1


# Producers


def test_pushes_count_by_code(delta: Delta) -> None:
    for outcome in instruments.PUSH_CODES:
        delta("pushed_total", outcome=outcome)
    metrics.producer_pushed(["pushed", "late", "pushed", "what"])
    assert [delta("pushed_total", outcome=outcome) for outcome in instruments.PUSH_CODES] == [2, 0, 0, 1, 1]


def test_backpressure_adds_up(delta: Delta) -> None:
    delta("backpressure_seconds_total")
    metrics.backpressure(0.25)
    metrics.backpressure(0.5)
    metrics.unscorable("scorer", "value")
    assert delta("backpressure_seconds_total") == pytest.approx(0.75)


# Groups


def test_unknown_outcomes_are_other(delta: Delta) -> None:
    delta("groups_total", outcome="other")
    metrics.group_ended("surprise")
    assert delta("groups_total", outcome="other") == 1
    assert value("groups_total", outcome="surprise") is None


def test_a_source_that_keeps_nothing_shows_zero() -> None:
    metrics.group_ended("zero_variance", "hard")
    assert value("groups_produced_total", data_source="hard") == 1
    assert value("groups_kept_total", data_source="hard") == 0


def test_a_group_dropped_at_naming_was_counted_before(delta: Delta) -> None:
    for name in ("groups_produced_total", "groups_kept_total"):
        delta(name, data_source="code")
    delta("groups_total", outcome="stale")
    metrics.group_ended("partial", "code")
    metrics.group_ended("stale", "code")
    assert delta("groups_total", outcome="stale") == 1
    assert delta("groups_produced_total", data_source="code") == 1
    assert delta("groups_kept_total", data_source="code") == 1


def test_the_number_of_data_sources_is_bounded() -> None:
    for i in range(instruments.MAX_DATA_SOURCES + 5):
        metrics.group_ended("complete", f"bounded-{i}")
    assert value("groups_produced_total", data_source=f"bounded-{instruments.MAX_DATA_SOURCES - 1}") == 1
    assert value("groups_produced_total", data_source=f"bounded-{instruments.MAX_DATA_SOURCES}") is None
    assert (value("groups_produced_total", data_source="other") or 0) >= 5


# Chunks and batches


def test_mean_reward_can_be_had_from_the_counters(delta: Delta) -> None:
    def deltas() -> tuple[float, float, float]:
        return (
            delta("reward_positive_total"),
            delta("reward_negative_total"),
            delta("reward_bucket", le="+Inf"),
        )

    deltas()
    compute_unit(rewards=np.array([1.0, -0.5, 0.0, 2.0]))
    positive, negative, count = deltas()
    assert (positive - negative) / count == pytest.approx(2.5 / 4)


def test_values_fall_into_the_bucket_that_ends_with_them(delta: Delta) -> None:
    bounds = ("-0.5", "-0.25", "0.0", "0.25")
    for le in bounds:
        delta("advantage_bucket", le=le)
    compute_unit(advantages=np.array([[0.0, 0.125], [-0.25, 0.0]], dtype=np.float32))
    assert [delta("advantage_bucket", le=le) for le in bounds] == [0, 1, 3, 4]


def test_signed_histograms_have_no_sum() -> None:
    compute_unit(rewards=[-1.0])
    assert value("reward_sum") is None
    assert value("reward_count") is None


def test_non_finite_values_are_counted_and_left_out(delta: Delta) -> None:
    delta("nonfinite_total", quantity="reward")
    delta("nonfinite_total", quantity="advantage")
    delta("reward_bucket", le="+Inf")
    compute_unit(rewards=[1.0, float("nan")], advantages=np.array([np.inf, -np.inf, 0.0]))
    assert delta("nonfinite_total", quantity="reward") == 1
    assert delta("nonfinite_total", quantity="advantage") == 2
    assert delta("reward_bucket", le="+Inf") == 1


def test_a_unit_reports_lengths_turns_and_truncation(delta: Delta) -> None:
    expected = {
        "response_tokens_sum": 128,
        "turns_sum": 7,
        "truncated_total": 1,
        "group_reward_std_sum": 0.5,
        "group_completion_seconds_sum": 12,
    }
    for name in expected:
        delta(name)
    compute_unit(
        response_tokens=np.array([100, 28]),
        turns=[3, 4],
        truncated=[True, False],
        group_reward_std=[0.5, None],
        group_completion_s=[12.0],
    )
    assert {name: delta(name) for name in expected} == pytest.approx(expected)


def test_chain_metrics_show_under_their_stage() -> None:
    compute_unit(metrics={"critic/kl": 0.25, "critic/reward_clip_frac": 0.125, "critic/unheard_of": 1.0})
    metrics.training_metrics({"critic/kl": 0.5, "rollout_corr/k3_kl": 0.01})
    assert value("kl_penalty", stage="advantage") == 0.25
    assert value("kl_penalty", stage="trainer") == 0.5
    assert value("reward_clipped_ratio", stage="advantage", level="sequence") == 0.125
    assert value("kl_k3", stage="trainer") == 0.01


@pytest.mark.parametrize(("weights", "ess"), [([2.0, 2.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([0.0], 0.0)])
def test_effective_sample_size(weights: list[float], ess: float) -> None:
    compute_unit(is_weights=weights)
    assert value("is_ess_ratio", stage="advantage") == pytest.approx(ess)


def test_a_batch_reports_staleness_and_throughput(delta: Delta) -> None:
    expected = {
        "policy_lag_versions_count": 3,
        "policy_lag_versions_sum": 3,
        "policy_lag_in_flight_versions_sum": 1,
        "policy_lag_in_queue_versions_sum": 2,
        "delivered_batches_total": 1,
        "delivered_tokens_total": 1000,
        "delivered_trajectories_total": 4,
        "trainer_wait_seconds_total": 0.5,
        "e2e_seconds_sum": 3.0,
    }
    for name in expected:
        delta(name)
    metrics.batch_delivered(
        9, [0, 1, None, 2], [0, 0, None, 1], [0, 1, None, 1], 1000, 4, 0.5, [1.0, 2.0, None]
    )
    assert {name: delta(name) for name in expected} == pytest.approx(expected)
    assert value("batch_version") == 9


numbers = st.floats(-1e6, 1e6) | st.sampled_from([-1.0, 0.0, 0.5, 1.0])


@given(st.lists(st.lists(numbers, max_size=20), max_size=4))
def test_an_array_histogram_counts_like_a_loop(chunks: list[list[float]]) -> None:
    bounds = (-1, 0, 0.5, 1)
    histogram = ArrayHistogram("h", "A histogram.", bounds)
    for chunk in chunks:
        histogram.observe(np.array(chunk))
    everything = [number for chunk in chunks for number in chunk]
    (family,) = histogram.collect()
    found = {sample.labels["le"]: sample.value for sample in family.samples}
    expected = {f"{bound:.1f}": sum(number <= bound for number in everything) for bound in bounds}
    assert found == expected | {"+Inf": len(everything)}


# The ledger


def test_the_ledger_is_read_once_a_scrape(ledger: None) -> None:
    reads = []

    def read_status() -> dict[str, Any]:
        reads.append(1)
        return STATUS

    metrics.register_ledger(read_status)
    assert not reads
    generate_latest(metrics.REGISTRY)
    assert len(reads) == 1


def test_the_ledger_shows_what_status_says(ledger: None) -> None:
    metrics.register_ledger(lambda: STATUS)
    assert value("up") == 1
    places = {"pushed": 20, "trained": 9, "dropped": 3, "dead": 1, "queued": 4, "in_flight": 3}
    assert {place: value("ledger_trajectories", place=place) for place in places} == places
    assert value("dropped_trajectories", reason="late") == 2
    assert value("dead_trajectories", reason="missing_column") == 1
    assert value("ledger_balanced") == 1
    assert value("stream_length_entries", stream="rollouts") == 5
    assert value("stream_pending_entries", stream="rollouts") == 2
    assert value("stream_lag_entries", stream="rollouts") == 3
    assert value("oldest_pending_age_seconds", stream="rollouts") == 1.5
    assert value("oldest_pending_age_seconds", stream="work") == 0
    assert value("groups_open") == 2
    assert value("live_bytes") == 1000
    assert value("reserved_bytes") == 500
    assert value("short_groups_ratio") == 0.25
    assert value("short_trajectories_ratio") == 0.2
    assert value("producers", state="open") == 2
    assert value("producers", state="finished") == 0
    assert value("model_version") == 7


def test_the_status_of_a_real_run_is_understood(fake: Connection, run: str, ledger: None) -> None:
    opened = open_run(fake, run, None)
    metrics.register_ledger(lambda: read_status(opened).to_json())
    assert value("up") == 1
    assert value("ledger_trajectories", place="pushed") == 0
    assert value("stream_length_entries", stream="rollouts") == 0
    assert value("ledger_balanced") == 1


def test_a_run_without_trainer_has_no_version(ledger: None) -> None:
    metrics.register_ledger(lambda: STATUS | {"trainer": {"version": None}, "balanced": False})
    assert value("model_version") is None
    assert value("ledger_balanced") == 0


def test_an_outage_is_logged_once(ledger: None, caplog: pytest.LogCaptureFixture) -> None:
    gone = OSError("gone")
    answers: list[dict[str, Any] | OSError] = [STATUS, gone, gone, STATUS, gone]

    def next_answer() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    metrics.register_ledger(next_answer)
    with caplog.at_level("WARNING"):
        ups = [value("up") for _ in range(5)]
    assert ups == [1, 0, 0, 1, 0]
    assert caplog.text.count("gone") == 2


@pytest.mark.parametrize(
    "error", [redis.exceptions.ConnectionError("gone"), ServerUnreachableError("gone"), OSError()]
)
def test_without_a_server_the_other_metrics_stay(error: Exception, ledger: None) -> None:
    def read_status() -> dict[str, Any]:
        raise error

    metrics.register_ledger(read_status)
    assert value("up") == 0
    assert value("ledger_balanced") is None
    assert value("build_info", version=__version__) == 1


def test_no_ledger_in_other_processes() -> None:
    assert value("up") is None


# The endpoint


def test_the_run_is_a_label_of_every_series(port: int) -> None:
    report_everything()
    samples = [s for family in text_string_to_metric_families(fetch(port)) for s in family.samples]
    assert samples
    assert {sample.labels.get("run") for sample in samples} == {"a-run"}


def test_only_metrics_is_served(port: int) -> None:
    for path in ("/", "//["):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(port, path)
    assert "streamadv_build_info" in fetch(port, "/metrics?x=1")


def test_single_series_can_be_asked_for(port: int) -> None:
    def get(query: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?{query}", timeout=10) as reply:
            return str(reply.read().decode())

    text = get("name[]=streamadv_delivered_batches_total&name[]=x")
    assert "streamadv_delivered_batches_total{" in text
    assert "streamadv_delivered_trajectories" not in text
    for query in ("name[]=x", "name[]=%00%ff", "name[]", "name[]=" + "a" * 5000, "other=1"):
        get(query)


def test_a_taken_port_is_an_error_that_names_it(port: int) -> None:
    with pytest.raises(SettingError, match=f"^metrics_port {port}: .*0 for a free one$"):
        metrics.serve(port)


def test_the_port_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        port = metrics.serve(0)
    assert f"metrics on port {port}, path /metrics" in caplog.text


@pytest.mark.processes
def test_torch_is_not_imported() -> None:
    code = "import sys, streamadv.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
