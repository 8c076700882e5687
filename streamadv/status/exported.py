"""The facts of a run as metrics, read from the server at each scrape by the processes that export it.

All begin with `streamadv_run_`. Several exporters show the same numbers: take the greatest, not the sum.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import metrics
from ..errors import StreamadvError
from ..messages import log_fields
from ..metrics.deadline import Asked
from ..metrics.instruments import OUTCOMES
from ..run import find_run
from ..store.connection import Connection
from ..store.reasons import REASONS
from ..store.retry import SERVER_ERRORS
from .activity import OLDER_THAN_S
from .causes import reasons_of
from .model import QUEUED, Status, Stream, TrainerState
from .read import read_status

logger = logging.getLogger(__name__)

PREFIX: Final = "streamadv_run_"
#: Seconds that a scrape waits for the server. A Prometheus gives up after 10 by default.
READ_S: Final = 3.0
#: Data sources whose evaluation is shown, the first in the alphabet.
MAX_EVALUATIONS: Final = 32

#: How a group ends by the ledger.
ENDINGS: Final = (*(outcome for outcome in OUTCOMES if outcome != "other"), "dead", "malformed")
#: Why trajectories are dropped beside the outcomes of their groups.
DROPPED: Final = (
    *("surplus", "late", "baseline", "failed", "aborted", "unscorable", "wrong_role"),
    *(outcome for outcome in OUTCOMES if outcome not in (*metrics.KEPT, "other")),
)
#: One sample: name without prefix, values of its labels, value.
Sample = tuple[str, list[str], float]

#: Of each metric its text and its labels. `_total` at the end makes it a counter.
FACTS: Final[dict[str, tuple[str, ...]]] = {
    "readable": (
        "1 if the status of the run could be read within 3 s; while it is 0 nothing else of the run is there.",
    ),
    "read_seconds": ("How long the server took to tell all this.",),
    "balanced": ("1 if every pushed trajectory is accounted for.",),
    "blocked": (
        '1 while this is why nothing moves in the run; "Troubleshooting" lists reasons and remedies.',
        "reason",
    ),
    # The ledger.
    "pushed_trajectories_total": ("Trajectories pushed.",),
    "trained_trajectories_total": ("Trajectories in the trainer's checkpoints.",),
    "duplicate_trajectories_total": ("Trajectories pushed again and refused.",),
    "dropped_trajectories_total": ("Trajectories dropped, by reason.", "reason"),
    "malformed_total": ("Items removed because no process of the run had written them.",),
    "dead_trajectories": ("Trajectories in dead letters, by reason; requeueing lowers it.", "reason"),
    "trajectories": (
        "Trajectories that are under way, by where they are: `scoring`, `rollouts`, `open` and `grouped` are queued, "
        "`in_flight` is in a named batch.",
        "place",
    ),
    # Groups.
    "ended_groups_total": ("Groups ended, by the run's own count, which no process can lose.", "outcome"),
    "groups": (
        "Groups by place: `open`; `abandoned`, of these, by a lost producer; `waiting` for a batch; `logged`, that and "
        "in a batch.",
        "place",
    ),
    "open_groups_missing": (
        "Of the open groups that are due first, at most 256, those that lack `none`, `one`, `some` or `all` of their "
        "rollouts.",
        "rollouts",
    ),
    "open_groups_older_than": (
        "Of the same groups, those that are open for longer than so many seconds.",
        "seconds",
    ),
    "oldest_open_group_seconds": ("Since the oldest of them was opened, 0 without one.",),
    "missing_rollouts": ("Rollouts that they lack.",),
    "missing_scores": ("Rewards that they lack.",),
    "short_groups_ratio": (
        "Share of the groups that were dropped because rollouts failed or were not pushed.",
    ),
    "short_trajectories_ratio": ("Share of the usable trajectories that was dropped with such groups.",),
    # Streams, and who takes part.
    "stream_entries": ("Entries in a stream.", "stream"),
    "stream_pending_entries": ("Entries read and not acknowledged.", "stream"),
    "stream_lag_entries": ("Entries not read yet.", "stream"),
    "stream_oldest_seconds": ("Age of the oldest entry in a stream, 0 for an empty one.", "stream"),
    "workers": ("Processes that take entries of a stream; dead: silent for 30 s.", "stream", "state"),
    "producers": ("Producers by state; lost: not finished and no longer heard of.", "state"),
    "trainer": ("1 for the state in which rank 0 of the trainer is.", "state"),
    "trainer_ranks": ("Ranks of the trainer: `expected`, and `alive`.", "state"),
    "trainer_epoch": ("The fencing epoch: it rises when a trainer takes the run.",),
    # Versions and batches.
    "version": ("Version of the policy; absent before the first trainer.",),
    "committed_version": ("Version of the newest checkpoint that was committed.",),
    "batches": ("Batches `named` and not trained on, and `trained` and not committed.", "state"),
    "quiet_seconds": ("Since something entered a stream; absent before.",),
    "waiting_staleness_mean_versions": (
        "Mean staleness, at the version of now, of what is named or waits at the head of the log.",
    ),
    "waiting_staleness_max_versions": ("The greatest such staleness.",),
    # Admission and memory.
    "groups_ahead": ("Groups begun and not trained on.",),
    "groups_ahead_limit": ("How many of them max_staleness allows; absent without pacing.",),
    "full_shards": ("Shards without room for another group.",),
    "paced_shards": ("Shards with their share of the groups that may be ahead of the trainer.",),
    "payload_bytes": (
        "Bytes of payloads: `live`, `reserved` for rollouts of open groups, and kept for `dead` letters.",
        "kind",
    ),
    "max_bytes": ("What live and reserved bytes may be together.",),
    "server_used_memory_bytes": ("Memory that the server uses.",),
    "server_maxmemory_bytes": ("The server's limit, above which it refuses pushes; absent without one.",),
    "server_total_memory_bytes": ("Memory of the server's machine.",),
    "garbage_payloads": ("Payloads that wait for deletion.",),
    "results_entries": ("Entries in the results logs.",),
    # Evaluation.
    "eval_version": (
        "Newest policy version of which evaluation groups have a reward; at most 32 sources.",
        "data_source",
    ),
    "eval_reward_mean": ("Mean reward of that version over its trajectories.", "data_source"),
    "eval_reward_std_error": ("Standard error of that mean, between groups.", "data_source"),
    "eval_reward_best": ("Mean over the groups of that version of the best reward in each.", "data_source"),
    "eval_trajectories": ("Trajectories with a reward of that version.", "data_source"),
    "eval_failed_trajectories": (
        "Rollouts of that version without a reward: failed, cancelled, unscorable or never pushed.",
        "data_source",
    ),
}


class RunFacts(Collector):
    """What `streamadv status` shows of a run, as metrics. A scrape waits READ_S for it at most."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._status = Asked(lambda: _read(connection, run), READ_S)
        self._failing = False

    def collect(self) -> Iterator[Metric]:
        found = families()
        try:
            status, seconds = self._status.answer()
        except (*SERVER_ERRORS, OSError, StreamadvError) as error:
            self._warn(error)
            found["readable"].add_metric([], 0)
            yield found["readable"]
            return
        self._failing = False
        for name, labels, value in [("readable", [], 1.0), ("read_seconds", [], seconds), *samples(status)]:
            found[name].add_metric(labels, value)
        yield from (family for family in found.values() if family.samples)

    def _warn(self, error: Exception) -> None:
        """Once for each outage: scrapes go on through it."""
        level = logging.DEBUG if self._failing else logging.WARNING
        self._failing = True
        text = "metrics: the run's status cannot be read: %s"
        logger.log(level, text, error, extra=log_fields("status_unreadable"))


def export_run(url: str, run: str) -> RunFacts:
    """Export the facts of a run with the metrics of this process, until they are removed from `metrics.REGISTRY`.

    The run may begin later. The connection is one of its own, whose calls give up when a scrape does.
    """
    facts = RunFacts(Connection(url, reply_timeout=READ_S), run)
    metrics.REGISTRY.add(facts)
    return facts


def families() -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
    """A family without samples for each of FACTS."""
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, (text, *labels) in FACTS.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        found[name] = kind(PREFIX + name.removesuffix("_total"), text, labels=labels)
    return found


def samples(status: Status) -> Iterator[Sample]:
    """Everything of a status that has a value."""
    yield "balanced", [], float(status.balanced)
    holding = {reason.name for reason in reasons_of(status)}
    for name in REASONS:
        yield "blocked", [name], float(name in holding)
    yield from _ledger(status)
    yield from _groups(status)
    for name, stream in status.streams.items():
        yield from _stream(name, stream)
    states = Counter(producer.state for producer in status.producers)
    for state in ("open", "finished", "lost"):
        yield "producers", [state], states[state]
    yield from _trainer(status)
    yield from _admission(status)
    yield from _evaluations(status)


def _read(connection: Connection, run: str) -> tuple[Status, float]:
    """The status, and how long reading took. The run is found anew each time: its settings may have changed."""
    began = time.monotonic()
    status = read_status(find_run(connection, run))
    return status, time.monotonic() - began


def _ledger(status: Status) -> Iterator[Sample]:
    ledger = status.ledger
    yield "pushed_trajectories_total", [], ledger.pushed
    yield "trained_trajectories_total", [], ledger.trained
    yield "duplicate_trajectories_total", [], status.duplicates
    yield "malformed_total", [], status.malformed
    for reason, count in (dict.fromkeys(DROPPED, 0) | ledger.dropped).items():
        yield "dropped_trajectories_total", [reason], count
    for reason, count in ledger.dead.items():
        yield "dead_trajectories", [reason], count
    for place in QUEUED:
        yield "trajectories", [place], getattr(status.places, place)
    yield "trajectories", ["in_flight"], ledger.in_flight


def _groups(status: Status) -> Iterator[Sample]:
    groups, lack = status.groups, status.groups.lack
    for outcome, count in (dict.fromkeys(ENDINGS, 0) | groups.outcomes).items():
        yield "ended_groups_total", [outcome], count
    places = {
        "open": groups.open,
        "abandoned": groups.abandoned,
        "waiting": status.groups_waiting,
        "logged": groups.logged,
    }
    for place, count in places.items():
        yield "groups", [place], count
    for rollouts, count in lack.groups_missing.items():
        yield "open_groups_missing", [rollouts], count
    for seconds, count in zip(OLDER_THAN_S, lack.groups_older, strict=True):
        yield "open_groups_older_than", [f"{seconds}"], count
    yield "oldest_open_group_seconds", [], lack.oldest_s or 0.0
    yield "missing_rollouts", [], lack.rollouts
    yield "missing_scores", [], lack.scores
    short = groups.short
    yield "short_groups_ratio", [], short.groups / max(1, short.ended)
    yield "short_trajectories_ratio", [], short.trajectories / max(1, short.usable)


def _stream(name: str, stream: Stream) -> Iterator[Sample]:
    yield "stream_entries", [name], stream.length
    yield "stream_pending_entries", [name], stream.pending
    yield "stream_lag_entries", [name], stream.lag
    yield "stream_oldest_seconds", [name], stream.oldest_age_s or 0.0
    yield "workers", [name, "alive"], stream.alive
    yield "workers", [name, "dead"], len(stream.workers) - stream.alive


def _trainer(status: Status) -> Iterator[Sample]:
    trainer = status.trainer
    for state in get_args(TrainerState):
        yield "trainer", [state], float(trainer.state == state)
    yield "trainer_ranks", ["expected"], trainer.world_size or 0
    yield "trainer_ranks", ["alive"], trainer.ranks_alive
    yield "trainer_epoch", [], trainer.epoch
    if trainer.version is not None:
        yield "version", [], trainer.version
    yield "committed_version", [], trainer.committed
    yield "batches", ["named"], max(0, trainer.untrained)
    yield "batches", ["trained"], max(0, trainer.uncommitted)
    if status.quiet_s is not None:
        yield "quiet_seconds", [], status.quiet_s
    if status.staleness.mean is not None and status.staleness.max is not None:
        yield "waiting_staleness_mean_versions", [], status.staleness.mean
        yield "waiting_staleness_max_versions", [], status.staleness.max


def _admission(status: Status) -> Iterator[Sample]:
    admission, server = status.admission, status.server
    yield "groups_ahead", [], admission.groups_ahead
    if admission.groups_limit is not None:
        yield "groups_ahead_limit", [], admission.groups_limit
    yield "full_shards", [], len(admission.full)
    yield "paced_shards", [], len(admission.paced)
    for kind in ("live", "reserved", "dead"):
        yield "payload_bytes", [kind], getattr(status.bytes, kind)
    yield "max_bytes", [], admission.max_bytes
    if server.used_memory is not None:
        yield "server_used_memory_bytes", [], server.used_memory
    if server.maxmemory:
        yield "server_maxmemory_bytes", [], server.maxmemory
    if server.total_system_memory is not None:
        yield "server_total_memory_bytes", [], server.total_system_memory
    yield "garbage_payloads", [], status.garbage
    yield "results_entries", [], status.results


def _evaluations(status: Status) -> Iterator[Sample]:
    for evaluation in status.evaluations[:MAX_EVALUATIONS]:
        source = [evaluation.data_source]
        for name in ("mean", "std_error", "best"):
            value = getattr(evaluation, name)
            if value is not None:
                yield f"eval_reward_{name}", source, value
        yield "eval_trajectories", source, evaluation.trajectories
        yield "eval_failed_trajectories", source, evaluation.failed
        if evaluation.version is not None:
            yield "eval_version", source, evaluation.version
