"""Metrics as Prometheus sees them: every test reports something and reads `/metrics`."""

from __future__ import annotations

import contextlib
import errno
import gzip
import math
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from streamadv import metrics
from streamadv.errors import SettingError
from streamadv.metrics import endpoints, instruments
from streamadv.metrics.collectors import ArrayHistogram
from streamadv.metrics.endpoints import Asked
from streamadv.status import exported
from tests.support import Forward

from .exposed import STAGES, of_processes, report_everything

Delta = Callable[..., float]

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


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


@pytest.fixture(autouse=True, scope="module")
def _all_stages() -> None:
    for stage, kind in STAGES.items():
        metrics.begin_stage(stage, kind)


@pytest.fixture(scope="module")
def port() -> int:
    return metrics.serve(0, run="a-run")


def fetch(port: int, path: str = "/metrics", accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as reply:
        text: str = reply.read().decode()
    return text


def compute_item(**changes: Any) -> None:
    item: dict[str, Any] = {
        "advantages": [],
        "response_tokens": [],
        "turns": [],
        "truncated": [],
        "group_completion_s": [],
    }
    metrics.work_item_computed(**item | changes)


# Names


def test_every_metric_declared_can_be_reported() -> None:
    report_everything()
    own = [
        item for item in vars(instruments).values() if isinstance(item, MetricWrapperBase | ArrayHistogram)
    ]
    declared = {family.name for collector in own for family in collector.collect()}
    families = text_string_to_metric_families(generate_latest(metrics.REGISTRY).decode())
    assert declared <= {family.name for family in families if family.samples}


def test_names_follow_the_conventions() -> None:
    for family in [*of_processes(), *exported.families().values()]:
        name = family.name
        assert name.startswith(("streamadv_", "process_", "python_"))
        if not name.startswith("streamadv_") or name.endswith("_created"):
            continue  # the client's own
        assert family.documentation.endswith(".")
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples)
        else:
            assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info")) or name.endswith(
                "build_info"
            )
        for word in ("_ms", "_milliseconds", "_percent", "_mb", "_gib", "_minutes"):
            assert not name.endswith(word)


def test_both_exposition_formats_are_valid(port: int) -> None:
    report_everything()
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


# Waits


def test_a_wait_counts_while_it_lasts(delta: Delta, forward: Forward) -> None:
    delta("wait_seconds_total", stage="trainer")
    with metrics.wait("trainer"):
        forward(57.0)
        assert delta("wait_seconds_total", stage="trainer") == pytest.approx(57, abs=1)
        assert value("waiting_seconds", stage="trainer") == pytest.approx(57, abs=1)
        with metrics.wait("trainer"):
            forward(1.0)
        assert delta("wait_seconds_total", stage="trainer") == pytest.approx(59, abs=1)
    assert value("waiting_seconds", stage="trainer") == 0
    forward(10.0)
    assert delta("wait_seconds_total", stage="trainer") == pytest.approx(59, abs=1)


def test_a_wait_that_raises_is_over(delta: Delta) -> None:
    with pytest.raises(KeyError), metrics.wait("producer"):
        raise KeyError
    assert value("waiting_seconds", stage="producer") == 0


# Groups


def test_the_mean_reward_of_all_groups_and_of_kept_ones(delta: Delta) -> None:
    def mean(*kept: str) -> float:
        count, total = 0.0, 0.0
        for which in kept:
            labels = {"data_source": "maths", "kept": which}
            total += delta("rewards_sum_total", **labels, sign="positive")
            total -= delta("rewards_sum_total", **labels, sign="negative")
            count += delta("rewards_total", **labels)
        return total / count if count else math.nan

    mean("yes", "no")
    delta("reward_bucket", le="+Inf")
    metrics.groups_ended([metrics.EndedGroup("complete", "maths", [1.0, -0.5])])
    metrics.groups_ended([metrics.EndedGroup("zero_variance", "maths", [1.0, 1.0])])
    assert mean("yes") == pytest.approx(0.25)
    assert mean("yes", "no") == pytest.approx(0.625)
    assert delta("reward_bucket", le="+Inf") == 4


def test_rewards_of_evaluation_groups_and_of_groups_dropped_at_naming_do_not_count_again(
    delta: Delta,
) -> None:
    delta("reward_bucket", le="+Inf")
    metrics.groups_ended([metrics.EndedGroup("eval", "maths", [1.0])])
    metrics.groups_ended([metrics.EndedGroup("stale", "maths", [1.0])])
    assert delta("reward_bucket", le="+Inf") == 0


def test_a_group_without_a_signal_shows_though_it_is_filtered(delta: Delta) -> None:
    delta("group_reward_std_bucket", le="0.0")
    delta("group_reward_std_sum")
    metrics.groups_ended([metrics.EndedGroup("zero_variance", None, [0.0, 0.0])])
    metrics.groups_ended([metrics.EndedGroup("complete", None, [0.0, 1.0])])
    assert delta("group_reward_std_bucket", le="0.0") == 1
    assert delta("group_reward_std_sum") == pytest.approx(0.5**0.5)


def test_unknown_outcomes_are_other(delta: Delta) -> None:
    delta("groups_total", outcome="other")
    metrics.groups_ended([metrics.EndedGroup("surprise")])
    assert delta("groups_total", outcome="other") == 1
    assert value("groups_total", outcome="surprise") is None


def test_a_source_that_keeps_nothing_shows_zero() -> None:
    metrics.groups_ended([metrics.EndedGroup("zero_variance", "keeps_nothing")])
    assert value("groups_produced_total", data_source="keeps_nothing") == 1
    assert value("groups_kept_total", data_source="keeps_nothing") == 0


def test_a_group_dropped_at_naming_was_counted_before(delta: Delta) -> None:
    for name in ("groups_produced_total", "groups_kept_total"):
        delta(name, data_source="code")
    delta("groups_total", outcome="stale")
    metrics.groups_ended([metrics.EndedGroup("partial", "code")])
    metrics.groups_ended([metrics.EndedGroup("stale", "code")])
    assert delta("groups_total", outcome="stale") == 1
    assert delta("groups_produced_total", data_source="code") == 1
    assert delta("groups_kept_total", data_source="code") == 1


def test_the_number_of_data_sources_is_bounded() -> None:
    for i in range(instruments.MAX_DATA_SOURCES + 5):
        metrics.groups_ended([metrics.EndedGroup("complete", f"bounded-{i}")])
    assert value("groups_produced_total", data_source=f"bounded-{instruments.MAX_DATA_SOURCES - 1}") == 1
    assert value("groups_produced_total", data_source=f"bounded-{instruments.MAX_DATA_SOURCES}") is None
    assert (value("groups_produced_total", data_source="other") or 0) >= 5


# Chunks and batches


def test_values_fall_into_the_bucket_that_ends_with_them(delta: Delta) -> None:
    bounds = ("-0.5", "-0.25", "0.0", "0.25")
    for le in bounds:
        delta("advantage_bucket", le=le)
    compute_item(advantages=np.array([[0.0, 0.125], [-0.25, 0.0]], dtype=np.float32))
    assert [delta("advantage_bucket", le=le) for le in bounds] == [0, 1, 3, 4]


def test_a_sample_counts_for_all_that_it_stands_for(delta: Delta) -> None:
    delta("is_weight_bucket", le="+Inf")
    delta("is_weight_sum")
    compute_item(is_weights=metrics.Sample([0.5, 1.0], weight=10))
    assert delta("is_weight_bucket", le="+Inf") == 20
    assert delta("is_weight_sum") == 15.0


def test_signed_histograms_have_no_sum() -> None:
    metrics.groups_ended([metrics.EndedGroup("complete", None, [-1.0])])
    assert value("reward_sum") is None
    assert value("reward_count") is None


def test_non_finite_values_are_counted_and_left_out(delta: Delta) -> None:
    delta("nonfinite_total", quantity="advantage")
    delta("advantage_bucket", le="+Inf")
    compute_item(advantages=np.array([np.inf, -np.inf, 0.0]))
    assert delta("nonfinite_total", quantity="advantage") == 2
    assert delta("advantage_bucket", le="+Inf") == 1


def test_a_unit_reports_lengths_turns_and_truncation(delta: Delta) -> None:
    expected = {
        "response_tokens_sum": 128,
        "turns_sum": 7,
        "truncated_total": 1,
        "group_completion_seconds_sum": 12,
    }
    for name in expected:
        delta(name)
    compute_item(
        response_tokens=np.array([100, 28]), turns=[3, 4], truncated=[True, False], group_completion_s=[12.0]
    )
    assert {name: delta(name) for name in expected} == pytest.approx(expected)


def test_means_add_up_by_their_weights(delta: Delta) -> None:
    def kl() -> float:
        parts = [delta("kl_sum_total", estimate="k1", sign=sign) for sign in instruments.SIGNS]
        weight = delta("kl_weight_total", estimate="k1")
        return (parts[0] - parts[1]) / weight if weight else math.nan

    kl()
    metrics.training_metrics({"rollout_corr/kl": 0.5, "critic/unheard_of": 1.0}, {"rollout_corr/kl": 300.0})
    metrics.training_metrics({"rollout_corr/kl": -0.25}, 100.0)
    assert kl() == pytest.approx((0.5 * 300 - 0.25 * 100) / 400)


def test_shares_add_up_by_what_was_looked_at(delta: Delta) -> None:
    names = ("clipped_total", "clip_candidates_total")
    for name in names:
        delta(name, what="reward")
    metrics.training_metrics({"critic/reward_clip_frac": 0.125}, 16.0)
    metrics.training_metrics({"critic/reward_clip_frac": 0.0}, 48.0)
    assert [delta(name, what="reward") for name in names] == pytest.approx([2, 64])


@pytest.mark.parametrize(("mean", "std", "ess"), [(1.0, 0.0, 1.0), (0.25, 0.1875**0.5, 0.25)])
def test_effective_sample_size(mean: float, std: float, ess: float, delta: Delta) -> None:
    names = ("is_weights_sum_total", "is_weights_total", "is_weights_squares_total")
    for name in names:
        delta(name)
    metrics.training_metrics({metrics.IS_MEAN: mean, metrics.IS_STD: std}, 40.0)
    total, count, squares = map(delta, names)
    assert total**2 / (count * squares) == pytest.approx(ess)


def test_numbers_that_are_none_change_nothing(delta: Delta) -> None:
    delta("kl_weight_total", estimate="k3")
    metrics.training_metrics({"rollout_corr/k3_kl": math.nan})
    metrics.training_metrics({"rollout_corr/k3_kl": 1.0}, 0.0)
    assert delta("kl_weight_total", estimate="k3") == 0


def test_a_batch_reports_staleness_and_throughput(delta: Delta) -> None:
    expected = {
        "policy_lag_versions_count": 3,
        "policy_lag_versions_sum": 3,
        "policy_lag_in_flight_versions_sum": 1,
        "policy_lag_in_queue_versions_sum": 2,
        "delivered_tokens_total": 1000,
        "e2e_seconds_sum": 3.0,
    }
    for name in expected:
        delta(name)
    metrics.batch_delivered(9, [0, 1, None, 2], [0, 0, None, 1], [0, 1, None, 1], 1000, [1.0, 2.0, None])
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


# The endpoint


def test_the_run_is_a_label_of_every_series(port: int) -> None:
    report_everything()
    samples = [s for family in text_string_to_metric_families(fetch(port)) for s in family.samples]
    assert samples
    assert {sample.labels.get("run") for sample in samples} == {"a-run"}


def test_only_metrics_and_probes_are_served(port: int) -> None:
    for path in ("/", "//["):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(port, path)
    assert "streamadv_build_info" in fetch(port, "/metrics?x=1")


def test_single_series_can_be_asked_for(port: int) -> None:
    report_everything()
    text = fetch(port, "/metrics?name[]=streamadv_delivered_tokens_total&name[]=x")
    assert "streamadv_delivered_tokens_total{" in text
    assert "streamadv_delivered_total" not in text
    for query in ("name[]=x", "name[]=%00%ff", "name[]", "name[]=" + "a" * 5000, "other=1"):
        fetch(port, f"/metrics?{query}")


def test_head_has_the_headers_of_get(port: int) -> None:
    for path in ("/metrics", "/livez", "/readyz"):
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="HEAD"), timeout=10
        ) as reply:
            assert reply.status == 200
            assert int(reply.headers["Content-Length"]) > 0
            assert reply.read() == b""


def test_metrics_are_compressed_for_who_asks(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert reply.headers["Content-Encoding"] == "gzip"
        assert "streamadv_build_info" in gzip.decompress(reply.read()).decode()


def test_a_process_is_alive_and_not_ready_while_it_cannot_work() -> None:
    problem: str | None = "has not joined"
    port = metrics.serve(0, not_ready=lambda: problem)
    assert fetch(port, "/livez") == "alive\n"
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(port, "/readyz")
    assert refused.value.code == 503
    assert refused.value.read() == b"has not joined\n"
    problem = None
    assert fetch(port, "/readyz") == "ready\n"


def test_a_probe_that_raises_is_not_ready() -> None:
    def gone() -> str | None:
        raise ConnectionError("nothing answers")

    port = metrics.serve(0, not_ready=gone)
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(port, "/readyz")
    assert refused.value.read() == b"nothing answers\n"


def test_a_question_that_hangs_has_no_answer_and_is_asked_once() -> None:
    go_on, asked = threading.Event(), threading.Semaphore(0)

    def question() -> str:
        asked.release()
        go_on.wait()
        return "answer"

    hanging = Asked(question, 0.01)
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"^no answer within 0\.01 s$"):
            hanging.answer()
    assert asked.acquire(timeout=30)
    assert not asked.acquire(blocking=False), "it is asked once"
    go_on.set()
    assert Asked(question, 60.0).answer() == "answer"


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def test_idle_connections_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "REQUEST_S", 0.2)
    monkeypatch.setattr(endpoints, "MAX_CONNECTIONS", 4)
    port = metrics.serve(0)
    idle = [connected(port) for _ in range(10)]
    for connection in idle:  # those beyond the bound are closed at once, the others when their time is over
        assert connection.recv(1) == b""
        connection.close()


@pytest.mark.parametrize("begun", [b"", b"GET /met", b"GET /metrics HTTP/1.0\r\nAccept: "])
def test_idle_connections_that_keep_coming_keep_no_probe_and_no_scrape_out(begun: bytes) -> None:
    port = metrics.serve(0)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            for _ in range(2 * endpoints.MAX_CONNECTIONS):
                connection = stack.enter_context(connected(port))
                with contextlib.suppress(OSError):  # closed already
                    connection.sendall(begun)
            assert fetch(port, "/livez") == "alive\n"
            assert fetch(port, "/readyz") == "ready\n"
        assert "streamadv_" in fetch(port)


def test_requests_that_take_long_are_not_cut_off_and_keep_no_probe_out() -> None:
    asked, go_on = threading.Semaphore(0), threading.Event()

    class Slow(Collector):
        def collect(self) -> Iterator[Metric]:
            asked.release()
            go_on.wait(20)
            yield Metric("slow", "", "gauge")

    port = endpoints.serve_metrics(Slow(), 0, None, "127.0.0.1", lambda: None)
    with ThreadPoolExecutor(endpoints.MAX_REQUESTS) as pool, contextlib.ExitStack() as stack:
        scrapes = [pool.submit(fetch, port) for _ in range(endpoints.MAX_REQUESTS)]
        for _ in scrapes:
            assert asked.acquire(timeout=20)
        for _ in range(2 * endpoints.MAX_CONNECTIONS):
            stack.enter_context(connected(port))
        assert fetch(port, "/livez") == "alive\n"
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(port)
        assert refused.value.code == 503
        assert refused.value.read() == b"8 requests are being answered: ask again\n"
        go_on.set()
        assert all("# TYPE slow gauge" in scrape.result(20) for scrape in scrapes)
    assert "# TYPE slow gauge" in fetch(port)


def test_a_connection_that_cannot_be_accepted_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a free file descriptor it stays in the queue, and the loop would find it there at once."""
    happened = list[str]()
    accept, sleep = socketserver.TCPServer.get_request, time.sleep

    def get_request(self: Any) -> Any:
        if len(happened) < 6:
            happened.append("refused")
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    def noted(seconds: float) -> None:
        if threading.current_thread().name == "metrics":
            happened.append("pause")
            seconds = 0
        sleep(seconds)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", get_request)
    monkeypatch.setattr(time, "sleep", noted)
    port = metrics.serve(0)
    assert fetch(port, "/livez") == "alive\n"
    assert happened == 3 * ["refused", "pause"]


def test_a_client_that_goes_away_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    handle_error = endpoints._Server.handle_error

    def note(self: Any, request: Any, client_address: Any) -> None:
        handle_error(self, request, client_address)
        ended.set()

    def reply(*_: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(endpoints._Server, "handle_error", note)
    monkeypatch.setattr(endpoints._Handler, "_reply", reply)
    port = metrics.serve(0)
    with caplog.at_level("INFO"), socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert ended.wait(20)
    assert "Traceback" not in capfd.readouterr().err
    assert "Broken pipe" not in caplog.text


def test_a_taken_port_is_an_error_that_names_it(port: int) -> None:
    with pytest.raises(SettingError, match=f"^metrics_port {port}: .*0 for a free one$"):
        metrics.serve(port)


def test_the_port_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        port = metrics.serve(0)
    assert f"metrics on port {port}, path /metrics" in caplog.text


# What a process exports


def exposed_by(code: str) -> str:
    """`/metrics` of another process after `code`."""
    code = f"from prometheus_client import generate_latest\nfrom streamadv import metrics\n{code}\n"
    code += "print(generate_latest(metrics.REGISTRY).decode())"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.processes
def test_a_process_exports_the_instruments_of_its_stages_with_counters_at_0() -> None:
    text = exposed_by("metrics.begin_stage('producer', 'producer')")
    names = {family.name for family in text_string_to_metric_families(text) if family.samples}
    assert names >= {
        "streamadv_connection_errors",
        "streamadv_wait_seconds",
        "process_cpu_seconds",
        "python_info",
    }
    others = ("batch", "reward", "policy", "groups", "acked", "kl", "is_weight", "run_")
    assert not [name for name in names if name.startswith(tuple(f"streamadv_{other}" for other in others))]
    lines = [line for line in text.splitlines() if line.startswith("streamadv_") and "_created" not in line]
    assert 'streamadv_connection_errors_total{reason="timeout",stage="producer"} 0.0' in lines
    assert len(lines) < 40


@pytest.mark.processes
def test_no_version_is_trained_before_the_first_batch() -> None:
    text = exposed_by("metrics.begin_stage('trainer', 'trainer')")
    assert "streamadv_batch_version" not in text
    assert 'streamadv_groups_total{outcome="stale"} 0.0' in text
    assert 'streamadv_build_info{stage="trainer",version=' in text


@pytest.mark.processes
def test_torch_is_not_imported() -> None:
    code = "import sys, streamadv.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
