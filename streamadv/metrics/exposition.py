"""How metrics leave a process: array histograms, the ledger read at scrape time, and the `/metrics` server.

`instruments.py` declares what is measured.
"""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from redis.exceptions import RedisError

from ..errors import SettingError, StreamadvError
from ..messages import log_fields

logger = logging.getLogger(__name__)

#: Returns the JSON of the status; raises RedisError, OSError or StreamadvError when it cannot.
StatusReader = Callable[[], Mapping[str, Any]]


class ArrayHistogram(Collector):
    """A histogram fed with arrays: one search for a whole array (the client's own takes 1.4 µs a value).

    With a negative bound it has buckets only, no `_sum` and `_count` (the OpenMetrics rule: a sum that can
    fall is no counter); the count is `_bucket{le="+Inf"}`.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = np.array(bounds, dtype=np.float64)
        self._labels = [*(floatToGoString(bound) for bound in bounds), "+Inf"]  # type: ignore[no-untyped-call]
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, values: NDArray[np.float64]) -> None:
        """Count `values` [K], all finite."""
        counts = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        total = float(values.sum())
        with self._lock:
            self._counts += counts
            self._sum += total

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            cumulated, total = self._counts.cumsum().tolist(), self._sum
        buckets = list(zip(self._labels, cumulated, strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)


#: Data sources whose evaluation is shown, the first in the alphabet.
MAX_EVALUATIONS: Final = 32


class LedgerCollector(Collector):
    """Ledger, streams and memory of a run, read once a scrape while `read_status` is set.

    When it fails the scrape shows `streamadv_up 0` and everything else the process has. It should give up
    within a few seconds, before the scrape does.
    """

    def __init__(self) -> None:
        self.read_status: StatusReader | None = None
        self._failing = False

    def describe(self) -> Iterator[Metric]:
        yield from _ledger_families()

    def collect(self) -> Iterator[Metric]:
        read_status = self.read_status
        if read_status is None:
            return
        families = {family.name: family for family in _ledger_families()}
        up = families.pop("streamadv_up")
        try:
            status = read_status()
        except (RedisError, OSError, StreamadvError) as error:
            # Once for each outage: scrapes go on through it.
            level = logging.DEBUG if self._failing else logging.WARNING
            text = "metrics: the run's status cannot be read: %s"
            logger.log(level, text, error, extra=log_fields("status_unreadable"))
            self._failing = True
            up.add_metric([], 0)
            yield up
            return
        self._failing = False
        up.add_metric([], 1)
        yield up
        for name, labels, value in _ledger_samples(status):
            families[f"streamadv_{name}"].add_metric(labels, value)
        yield from families.values()


def _ledger_families() -> Iterable[GaugeMetricFamily]:
    for name, text, *labels in (
        ("up", "1 if the status of the run could be read for this scrape."),
        (
            "ledger_trajectories",
            "Trajectories by where they are: pushed = trained + dropped + dead + queued + in_flight.",
            "place",
        ),
        ("dropped_trajectories", "Trajectories dropped, by reason.", "reason"),
        ("dead_trajectories", "Trajectories in dead letters, by reason.", "reason"),
        ("ledger_balanced", "1 if every pushed trajectory is accounted for."),
        ("stream_length_entries", "Entries in a stream.", "stream"),
        ("stream_pending_entries", "Entries read and not acknowledged.", "stream"),
        ("stream_lag_entries", "Entries not read yet.", "stream"),
        ("oldest_pending_age_seconds", "Age of the oldest entry in a stream, 0 for an empty one.", "stream"),
        ("groups_open", "Groups begun and not ended."),
        (
            "short_groups_ratio",
            "Share of the groups that were dropped because rollouts failed or were not pushed.",
        ),
        ("short_trajectories_ratio", "Share of the usable trajectories that was dropped with such groups."),
        ("producers", "Producers by state; lost: not finished and no longer heard of.", "state"),
        (
            "eval_version",
            "Newest policy version of which evaluation groups have a reward; at most 32 sources.",
            "data_source",
        ),
        (
            "eval_reward_mean",
            "Mean reward of that version; `streamadv evals` has the versions before.",
            "data_source",
        ),
        ("eval_reward_std_error", "Standard error of that mean, between groups.", "data_source"),
        (
            "eval_reward_best",
            "Mean over the groups of that version of the best reward in each.",
            "data_source",
        ),
        ("eval_trajectories", "Trajectories with a reward of that version.", "data_source"),
        (
            "eval_failed_trajectories",
            "Rollouts of that version without a reward: failed, cancelled, unscorable or never pushed.",
            "data_source",
        ),
        ("live_bytes", "Bytes of the payloads stored."),
        ("reserved_bytes", "Bytes reserved for rollouts of open groups that are not pushed yet."),
        ("model_version", "Version of the policy; absent before the first trainer."),
    ):
        yield GaugeMetricFamily(f"streamadv_{name}", text, labels=labels)


def _ledger_samples(status: Mapping[str, Any]) -> Iterator[tuple[str, list[str], float]]:
    """(metric without prefix, label values, value) of everything in `status` that has a value."""
    ledger = status["ledger"]
    for place in ("pushed", "trained", "queued", "in_flight"):
        yield "ledger_trajectories", [place], ledger[place]
    for place in ("dropped", "dead"):
        yield "ledger_trajectories", [place], sum(ledger[place].values())
        for reason, count in ledger[place].items():
            yield f"{place}_trajectories", [reason], count
    yield "ledger_balanced", [], float(status["balanced"])
    for stream, state in status["streams"].items():
        yield "stream_length_entries", [stream], state["length"]
        yield "stream_pending_entries", [stream], state["pending"]
        yield "stream_lag_entries", [stream], state["lag"]
        yield "oldest_pending_age_seconds", [stream], state["oldest_age_s"] or 0.0
    yield "groups_open", [], status["groups"]["open"]
    short = status["groups"]["short"]
    yield "short_groups_ratio", [], short["groups"] / max(1, short["ended"])
    yield "short_trajectories_ratio", [], short["trajectories"] / max(1, short["usable"])
    yield "live_bytes", [], status["bytes"]["live"]
    yield "reserved_bytes", [], status["bytes"]["reserved"]
    for evaluation in status["evaluations"][:MAX_EVALUATIONS]:
        source = [evaluation["data_source"]]
        for name in ("mean", "std_error", "best"):
            if evaluation[name] is not None:
                yield f"eval_reward_{name}", source, evaluation[name]
        yield "eval_trajectories", source, evaluation["trajectories"]
        yield "eval_failed_trajectories", source, evaluation["failed"]
        if evaluation["version"] is not None:
            yield "eval_version", source, evaluation["version"]
    states = Counter(producer["state"] for producer in status["producers"])
    for state in ("open", "finished", "lost"):
        yield "producers", [state], states[state]
    if status["trainer"]["version"] is not None:
        yield "model_version", [], status["trainer"]["version"]


def serve_metrics(registry: Registry, port: int, run: str | None, host: str) -> int:
    """Serve `registry` at `/metrics` from a daemon thread; returns the port. See `metrics.serve`."""
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise SettingError(
                f"metrics_host {host!r}: {error.strerror}, give an address of this machine"
            ) from None
        raise SettingError(
            f"metrics_port {port}: {error.strerror}, give another one or 0 for a free one"
        ) from error
    server.view = _View(registry, {"run": run} if run else {})
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    bound: int = server.server_address[1]
    logger.info("metrics on port %d, path /metrics", bound, extra=log_fields("metrics_served"))
    return bound


class Registry(Protocol):
    """What prometheus-client's CollectorRegistry offers."""

    def collect(self) -> Iterable[Metric]: ...

    def restricted_registry(self, names: Iterable[str]) -> Any: ...


class _View(Collector):
    """A registry with further labels on every sample, and without the `_created` series nobody plots."""

    def __init__(self, registry: Registry, labels: dict[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            labelled = Metric(family.name, family.documentation, family.type)
            labelled.samples = [
                sample._replace(labels=self._labels | sample.labels)
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield labelled

    def restricted_registry(self, names: Iterable[str]) -> _View:
        """What `/metrics?name[]=...` asks for: only these series."""
        return _View(self._registry.restricted_registry(names), self._labels)


class _Server(socketserver.ThreadingTCPServer):
    """Not http.server's: that one asks the DNS for its own name when it starts."""

    allow_reuse_address = True
    daemon_threads = True
    view: _View


class _Handler(MetricsHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is served")
            return
        self.registry = self.server.view
        super().do_GET()
