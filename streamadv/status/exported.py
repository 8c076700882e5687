"""The status of a run as metrics, read from the server at each scrape by the processes that export it.

All names begin with `streamadv_run_`. Several exporters show the same numbers: take the maximum, not the sum.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Any, Final, NamedTuple, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import metrics
from ..errors import StreamadvError
from ..messages import log_fields
from ..metrics.endpoints import Asked
from ..run import find_run
from ..run.run import DROPPED
from ..store.connection import Connection
from ..store.reasons import REASONS
from ..store.retry import SERVER_ERRORS
from .causes import reasons_of, unsaved
from .model import Status, TrainerState
from .read import OLDER_THAN_S, read_status

logger = logging.getLogger(__name__)

PREFIX: Final = "streamadv_run_"
#: Seconds that a scrape waits for the server. A Prometheus gives up after 10 by default.
READ_S: Final = 3.0
#: Data sources whose evaluation or prompts are shown, the first in the alphabet.
MAX_EVALUATIONS: Final = 32

#: One sample: name without prefix, values of its labels, value.
Sample = tuple[str, list[str], float]


class Fact(NamedTuple):
    """One metric."""

    text: str
    #: A path in `Status`, or what reads it: a number, numbers by the values of the labels, or None for no sample.
    of: str | Callable[[Status], Any]
    labels: tuple[str, ...] = ()


def _of_streams(field: str) -> Callable[[Status], Any]:
    return lambda status: {name: getattr(stream, field) for name, stream in status.streams.items()}


def _workers(status: Status) -> dict[tuple[str, str], int]:
    alive = {(name, "alive"): stream.alive for name, stream in status.streams.items()}
    return alive | {(name, "dead"): len(s.workers) - s.alive for name, s in status.streams.items()}


def _of_evaluations(field: str) -> Callable[[Status], Any]:
    return lambda status: {e.data_source: getattr(e, field) for e in status.evaluations[:MAX_EVALUATIONS]}


def _prompts(status: Status) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    for each in status.prompts[:MAX_EVALUATIONS]:
        states = {name: getattr(each, name) for name in ("trained", "skipped", "in_play", "left")}
        states |= {name: sum(getattr(each, name).values()) for name in ("filtered", "given_up")}
        found |= {(each.name, each.source, state): count for state, count in states.items()}
    return found


def _prompts_by_reason(field: str) -> Callable[[Status], Any]:
    return lambda status: {
        (each.name, each.source, why): count
        for each in status.prompts[:MAX_EVALUATIONS]
        for why, count in getattr(each, field).items()
    }


def _blocked(status: Status) -> dict[str, bool]:
    holding = {reason.name for reason in (*reasons_of(status), unsaved(status)) if reason}
    return {name: name in holding for name in REASONS}


#: Facts by metric name without prefix. A name that ends with `_total` is a counter.
FACTS: Final[dict[str, Fact]] = {
    "readable": Fact(
        "1 if the status of the run could be read within 3 s; while it is 0 nothing else of the run is there.",
        lambda s: 1,
    ),
    "read_seconds": Fact("How long the server took to tell all this.", lambda s: None),
    "balanced": Fact("1 if every pushed trajectory is accounted for.", "balanced"),
    "blocked": Fact(
        '1 while this is why nothing moves in the run; "Troubleshooting" lists reasons and remedies.',
        _blocked,
        ("reason",),
    ),
    # The ledger.
    "pushed_trajectories_total": Fact("Trajectories pushed.", "ledger.pushed"),
    "trained_trajectories_total": Fact("Trajectories in the trainer's checkpoints.", "ledger.trained"),
    "duplicate_trajectories_total": Fact("Trajectories pushed again and refused.", "duplicates"),
    "dropped_trajectories_total": Fact(
        "Trajectories dropped, by reason.",
        lambda s: dict.fromkeys(DROPPED, 0) | s.ledger.dropped,
        ("reason",),
    ),
    "malformed_total": Fact("Items removed because no process of the run had written them.", "malformed"),
    "dead_trajectories": Fact(
        "Trajectories in dead letters, by reason; requeueing lowers it.", "ledger.dead", ("reason",)
    ),
    "trajectories": Fact(
        "Trajectories that are under way, by where they are: `scoring`, `rollouts`, `open` and `grouped` are queued, "
        "`in_flight` is in a named batch.",
        lambda s: {**asdict(s.places), "in_flight": s.ledger.in_flight},
        ("place",),
    ),
    # Groups.
    "groups": Fact(
        "Groups by place: `open`; `abandoned`, of these, by a lost producer; `waiting` for a batch; `logged`, that and "
        "in a batch.",
        lambda s: (
            {place: getattr(s.groups, place) for place in ("open", "abandoned", "logged")}
            | {"waiting": s.groups_waiting}
        ),
        ("place",),
    ),
    "open_groups_missing": Fact(
        "Of the open groups that are due first, at most 256, those that lack `none`, `one`, `some` or `all` of their "
        "rollouts.",
        "groups.lack.groups_missing",
        ("rollouts",),
    ),
    "open_groups_older_than": Fact(
        "Of the same groups, those that are open for longer than so many seconds.",
        lambda s: dict(zip(map(str, OLDER_THAN_S), s.groups.lack.groups_older, strict=True)),
        ("seconds",),
    ),
    "oldest_open_group_seconds": Fact(
        "Since the oldest of them was opened, 0 without one.", lambda s: s.groups.lack.oldest_s or 0
    ),
    "missing_rollouts": Fact("Rollouts that they lack.", "groups.lack.rollouts"),
    "missing_scores": Fact("Rewards that they lack.", "groups.lack.scores"),
    # Streams, and who takes part.
    "stream_entries": Fact("Entries in a stream.", _of_streams("length"), ("stream",)),
    "stream_lag_entries": Fact("Entries not read yet.", _of_streams("lag"), ("stream",)),
    "stream_oldest_seconds": Fact(
        "Age of the oldest entry in a stream, 0 for an empty one.",
        lambda s: {name: stream.oldest_age_s or 0 for name, stream in s.streams.items()},
        ("stream",),
    ),
    "workers": Fact(
        "Processes that take entries of a stream; dead: silent for 30 s.", _workers, ("stream", "state")
    ),
    "producers": Fact(
        "Producers by state; lost: not finished and no longer heard of; serves: a gateway that begins no groups.",
        lambda s: {
            state: sum(p.state == state for p in s.producers)
            for state in ("open", "serves", "finished", "lost")
        },
        ("state",),
    ),
    "trainer": Fact(
        "1 for the state in which rank 0 of the trainer is.",
        lambda s: {state: s.trainer.state == state for state in get_args(TrainerState)},
        ("state",),
    ),
    "trainer_ranks": Fact(
        "Ranks of the trainer: `expected`, and `alive`.",
        lambda s: {"expected": s.trainer.world_size or 0, "alive": s.trainer.ranks_alive},
        ("state",),
    ),
    "trainer_epoch": Fact("The fencing epoch: it rises when a trainer takes the run.", "trainer.epoch"),
    # Versions and batches.
    "version": Fact("Version of the policy; absent before the first trainer.", "trainer.version"),
    "committed_version": Fact("Version of the newest checkpoint that was committed.", "trainer.committed"),
    "batches": Fact(
        "Batches `named` and not trained on, and `trained` and not committed.",
        lambda s: {"named": max(0, s.trainer.untrained), "trained": max(0, s.trainer.uncommitted)},
        ("state",),
    ),
    "waiting_staleness_mean_versions": Fact(
        "Mean staleness, at the version of now, of what is named or waits at the head of the log.",
        "staleness.mean",
    ),
    "waiting_staleness_max_versions": Fact("The greatest such staleness.", "staleness.max"),
    # Admission and memory.
    "groups_ahead": Fact("Groups begun and not trained on.", "admission.groups_ahead"),
    "groups_ahead_limit": Fact(
        "How many of them max_staleness allows; absent without pacing.", "admission.groups_limit"
    ),
    "full_shards": Fact("Shards without room for another group.", lambda s: len(s.admission.full)),
    "paced_shards": Fact(
        "Shards with their share of the groups that may be ahead of the trainer.",
        lambda s: len(s.admission.paced),
    ),
    "payload_bytes": Fact(
        "Bytes of payloads: `live`, `reserved` for rollouts of open groups, of `dead` letters, and of `kept` groups.",
        lambda s: asdict(s.bytes),
        ("kind",),
    ),
    "max_bytes": Fact("What live and reserved bytes may be together.", "admission.max_bytes"),
    "server_used_memory_bytes": Fact("Memory that the server uses.", "server.used_memory"),
    "server_maxmemory_bytes": Fact(
        "The server's limit, above which it refuses pushes; absent without one.",
        lambda s: s.server.maxmemory or None,
    ),
    "server_total_memory_bytes": Fact("Memory of the server's machine.", "server.total_system_memory"),
    "garbage_payloads": Fact("Payloads that wait for deletion.", "garbage"),
    "results_entries": Fact("Entries in the results logs.", "results"),
    # Prompts.
    "prompts": Fact(
        "Prompts over all epochs by state: trained, filtered, given_up, in_play, left; at most 32 sources.",
        _prompts,
        ("prompts", "data_source", "state"),
    ),
    "prompt_failures": Fact(
        "Tries of prompts that ended otherwise and were played again, by how; at most 32 sources.",
        _prompts_by_reason("failures"),
        ("prompts", "data_source", "reason"),
    ),
    "prompts_given_up": Fact(
        "Prompts that were given up, by how their last try ended; at most 32 sources.",
        _prompts_by_reason("given_up"),
        ("prompts", "data_source", "reason"),
    ),
    "prompts_remaining_seconds": Fact(
        "Seconds until a set of prompts has ended, at the pace of its last groups; absent while that is not known.",
        lambda s: {each.name: each.seconds_left for each in s.prompts[:MAX_EVALUATIONS]},
        ("prompts",),
    ),
    # Evaluation.
    "eval_reward_mean": Fact(
        "Mean reward over the trajectories of the newest round, or policy version, of evaluation; at most 32 sources.",
        _of_evaluations("mean"),
        ("data_source",),
    ),
    "eval_reward_best": Fact(
        "Mean over its groups of the best reward in each.", _of_evaluations("best"), ("data_source",)
    ),
}


class RunFacts(Collector):
    """What `streamadv status` shows of a run, as metrics. A scrape waits READ_S for it at most."""

    def __init__(self, connection: Connection, run: str) -> None:
        def read() -> tuple[Status, float]:
            """The status, and how long reading took. The run is found anew: its settings may have changed."""
            began = time.monotonic()
            status = read_status(find_run(connection, run))
            return status, time.monotonic() - began

        self._status = Asked(read, READ_S)
        self._failing = False

    def collect(self) -> Iterator[Metric]:
        found = families()
        try:
            status, seconds = self._status.answer()
        except (*SERVER_ERRORS, OSError, StreamadvError) as error:
            level = logging.DEBUG if self._failing else logging.WARNING  # once for each outage
            self._failing = True
            text = "metrics: the run's status cannot be read: %s"
            logger.log(level, text, error, extra=log_fields("status_unreadable"))
            found["readable"].add_metric([], 0)
            yield found["readable"]
            return
        self._failing = False
        for name, labels, value in [("read_seconds", [], seconds), *samples(status)]:
            found[name].add_metric(labels, value)
        yield from (family for family in found.values() if family.samples)


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
    for name, fact in FACTS.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        found[name] = kind(PREFIX + name.removesuffix("_total"), fact.text, labels=fact.labels)
    return found


def samples(status: Status) -> Iterator[Sample]:
    """Everything of a status that has a value."""
    for name, fact in FACTS.items():
        found = fact.of(status) if callable(fact.of) else attrgetter(fact.of)(status)
        for labels, value in found.items() if isinstance(found, Mapping) else [((), found)]:
            if value is not None:
                yield name, [labels] if isinstance(labels, str) else [*labels], float(value)
