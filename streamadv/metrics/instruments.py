"""The instruments, each made once, in sets that stages export; and the values that their labels may take.

Their texts are the reference, docs/reference/metrics.md. Labels take values from small fixed sets, never an id. A
counter with labels starts at 0 when its stage begins, so its first increase shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Final, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from ..doors import renewed_at_fork
from ..version import __version__
from .collectors import ArrayHistogram, Blocked, Registry, Waits, child

#: What a stage exports: a producer, the three kinds of workers, rank 0 of the trainer, another rank, an exporter.
Kind = Literal[
    "producer", "grouper", "scorer", "advantage", "trainer", "rank", "exporter", "gateway", "archive"
]

#: How a group can end; any other name is counted as "other".
OUTCOMES: Final = (
    "complete", "partial", "incomplete", "expired", "cancelled", "zero_variance", "difficulty",
    "no_train_members", "eval", "missing_column", "stale", "oversize", "rolled_back", "repeated",
    "other",
)  # fmt: skip
#: Outcomes of groups that go on to a batch.
KEPT: Final = ("complete", "partial")
#: How a group of role eval ends.
EVALUATED: Final = "eval"
#: Outcomes at the naming of a batch: the group was counted as kept before.
AT_NAMING: Final = ("missing_column", "stale", "oversize", "rolled_back", "repeated")
#: Why a stage has to try again: see `store.retry.reason_of`.
RETRY_REASONS: Final = (
    "connection", "timeout", "loading", "readonly", "masterdown", "clusterdown", "tryagain", "moved", "ask",
    "noreplicas", "misconf", "busy", "streamend",
)  # fmt: skip
#: Data sources with a label of their own; those that come later are counted as "other".
MAX_DATA_SOURCES: Final = 32
SIGNS: Final = ("positive", "negative")
#: Means of KL estimates, and shares of what was clipped, under verl's and ROLL's names.
KL_ESTIMATES: Final = {"critic/kl": "penalty", "rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}
CLIP_SHARES: Final = {
    "critic/reward_clip_frac": "reward",
    "critic/token_reward_clip_frac": "token_reward",
    "critic/advantage_clip_frac": "advantage",
    "rollout_corr/rollout_is_ratio_fraction_high": "is_weight",
}

# Upper bounds of the buckets.
STEP_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LONG_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
MAGNITUDES: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10)
SYMMETRIC: Final = (*(-bound for bound in reversed(MAGNITUDES)), 0, *MAGNITUDES)
TOKENS: Final = tuple(2**n for n in range(4, 18))  # 16 to 131072
TURNS: Final = (1, 2, 3, 5, 8, 12, 20, 30, 50, 100)
# Between whole versions, so that quantiles interpolate around a version and not below it.
VERSIONS: Final = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 8.5, 10.5, 12.5, 16.5, 24.5, 32.5, 64.5)
WEIGHTS: Final = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)

#: The value of a label `stage`: the stage that begins.
THE_STAGE: Final = ("",)
PREFIX: Final = "streamadv_"


class Set(CollectorRegistry):
    """Instruments that stages export together. All their names begin with PREFIX."""

    def __init__(self) -> None:
        super().__init__()
        self.born: list[tuple[Counter, tuple[Iterable[str], ...]]] = []
        """Counters that are born at 0, and all the values of their labels."""

    def counter(self, name: str, documentation: str, *labels: str, **born: Iterable[str]) -> Counter:
        """The client adds `_total` to the name. born: labels with all their values, of a counter that is born at 0."""
        counter = Counter(f"{PREFIX}{name}", documentation, (*labels, *born), registry=self)
        if born:
            self.born.append((counter, tuple(born.values())))
        return counter

    def histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> ArrayHistogram:
        histogram = ArrayHistogram(f"{PREFIX}{name}", documentation, bounds)
        self.register(histogram)
        return histogram


# The sets.
PROCESS: Final = Set()
STAGES: Final = Set()
WORKERS: Final = Set()
GROUPS_ENDED: Final = Set()
ALL_GROUPS: Final = Set()
WORK_ITEMS: Final = Set()
CORRECTIONS: Final = Set()
BATCHES: Final = Set()
PLAYS: Final = Set()
GATEWAYS: Final = Set()

#: What the process shows: its own figures, and the sets of its stages.
REGISTRY: Final = Registry()
REGISTRY.add(PROCESS, STAGES)

# Every process.
ProcessCollector(registry=PROCESS)
PlatformCollector(registry=PROCESS)
GCCollector(registry=PROCESS)
BUILD_INFO: Final = Gauge(
    "streamadv_build_info", "Always 1, for each stage of the process.", ("version", "stage"), registry=PROCESS
)

# Every stage.
_stages: Final[dict[str, None]] = {}  # that this process runs, in the order of their beginning
_stages_lock: Final = renewed_at_fork(threading.Lock())
WAITS: Final = Waits(_stages)
STAGES.register(WAITS)
BLOCKED: Final = Blocked(_stages)
STAGES.register(BLOCKED)
CONNECTION_ERRORS: Final = STAGES.counter(
    "connection_errors",
    "Errors of the server or the network, after which the call is tried again: connection, timeout, "
    "loading, readonly, masterdown, clusterdown, tryagain, moved, ask, noreplicas, misconf, busy, "
    "streamend.",
    stage=THE_STAGE,
    reason=RETRY_REASONS,
)
LAST_SUCCESS: Final = Gauge(
    "streamadv_last_success_timestamp_seconds",
    "When the stage last finished something; absent before.",
    ("stage",),
    registry=STAGES,
)

# Workers: processes that take entries of a stream.
STAGE_DURATION: Final = Histogram(
    "streamadv_stage_duration_seconds",
    "Time of one step of a stage, without blocking reads.",
    ("stage", "step"),
    buckets=STEP_SECONDS,
    registry=WORKERS,
)
#: What becomes of an entry.
EVENTS: Final = {
    event: WORKERS.counter(event, text, stage=THE_STAGE)
    for event, text in {
        "delivered": "Stream entries read.",
        "acked": "Stream entries finished.",
        "reclaimed": "Stream entries taken over from a consumer that fell silent.",
        "duplicate": "Stream entries that another consumer had finished first; the result is thrown away, which is "
        "harmless.",
    }.items()
}
NOGROUP: Final = WORKERS.counter(
    "nogroup_recreations",
    "Consumer groups created, at the start of a run or after the server lost them.",
    stage=THE_STAGE,
)

# Groups that ended: the grouper and, when it names a batch, the trainer.
GROUPS: Final = GROUPS_ENDED.counter(
    "groups",
    "Groups ended. `complete` and `partial` go on to a batch. `stale`, `oversize`, `rolled_back`, "
    "`missing_column` are counted later, when rank 0 names a batch: the group was counted as complete "
    "or partial before.",
    outcome=OUTCOMES,
)

# All groups, as the grouper sees them before filters take their part away.
GROUPS_PRODUCED: Final = ALL_GROUPS.counter("groups_produced", "Groups ended, by data source.", "data_source")
GROUPS_KEPT: Final = ALL_GROUPS.counter(
    "groups_kept", "Of the groups ended, those complete or partial: they go on to a batch.", "data_source"
)
GROUP_REWARD_STD: Final = ALL_GROUPS.histogram(
    "group_reward_std",
    "Standard deviation of the rewards of each training group with two or more of them, before filters; bucket "
    '`le="0.0"` counts groups without a signal.',
    (0, *MAGNITUDES),
)
REWARD: Final = ALL_GROUPS.histogram(
    "reward",
    "Reward of each trajectory of the training groups that ended, before filters (in a run with `filter_by`, the "
    "number that filters judge); signed, so without a sum.",
    SYMMETRIC,
)
REWARDS: Final = ALL_GROUPS.counter(
    "rewards",
    "Rewards of training groups that ended. kept: whether the group goes on to a batch; both together are all groups.",
    "data_source",
    "kept",
)
# A sum of signed numbers is no counter.
REWARDS_SUM: Final = ALL_GROUPS.counter(
    "rewards_sum",
    "Sum of these rewards above 0 (sign `positive`), and of those below it without their sign (`negative`). The mean "
    "is (positive - negative) / streamadv_rewards_total.",
    "data_source",
    "kept",
    "sign",
)

# Work items, as advantage workers compute them.
GROUP_COMPLETION: Final = WORK_ITEMS.histogram(
    "group_completion_seconds", "From the opening of a group that is trained on to its end.", LONG_SECONDS
)
ADVANTAGE: Final = WORK_ITEMS.histogram(
    "advantage",
    "Advantage, one value for each row, step or token (of many tokens by a sample), as the estimator gives it; signed, "
    "so without a sum.",
    SYMMETRIC,
)
RESPONSE_TOKENS: Final = WORK_ITEMS.histogram("response_tokens", "Trainable tokens of a trajectory.", TOKENS)
TURNS_TAKEN: Final = WORK_ITEMS.histogram("turns", "Turns of a trajectory.", TURNS)
TRUNCATED: Final = WORK_ITEMS.counter("truncated", "Trajectories cut off at a limit.")

# Where the off-policy correction is computed: by advantage workers, or by each rank of the trainer after a late column.
NONFINITE: Final = CORRECTIONS.counter(
    "nonfinite",
    "NaN or infinite `advantage`, `is_weight`; the histograms exclude them.",
    quantity=("advantage", "is_weight"),
)
IS_WEIGHT: Final = CORRECTIONS.histogram(
    "is_weight",
    "Importance weights of trained tokens after truncation (of many tokens by a sample): from advantage workers or, "
    "after a late column, from each rank of the trainer for its share.",
    WEIGHTS,
)

# Batches, as rank 0 of the trainer gets them.
BATCH_VERSION: Final = Gauge(
    "streamadv_batch_version",
    "Version of the last batch delivered; absent before the first one.",
    registry=None,
)
POLICY_LAG: Final = BATCHES.histogram(
    "policy_lag_versions",
    "Staleness of a trajectory when it is trained on; trajectories without a version do not count.",
    VERSIONS,
)
POLICY_LAG_IN_FLIGHT: Final = BATCHES.histogram(
    "policy_lag_in_flight_versions", "Part of the staleness from while it was played.", VERSIONS
)
POLICY_LAG_IN_QUEUE: Final = BATCHES.histogram(
    "policy_lag_in_queue_versions", "Part of the staleness from waiting for its batch.", VERSIONS
)
DELIVERED_TOKENS: Final = BATCHES.counter("delivered_tokens", "Trainable tokens delivered to the trainer.")
E2E: Final = BATCHES.histogram("e2e_seconds", "From the end of a group to its delivery.", LONG_SECONDS)
KL_SUM: Final = BATCHES.counter(
    "kl_sum",
    "Sum over tokens of an estimate of a KL divergence, by sign: `penalty` is the chain's own to the reference policy "
    "(`critic/kl`), `k1` and `k3` are of the rollout policy to the trained one (`rollout_corr/kl`, "
    "`rollout_corr/k3_kl`). The mean is (positive - negative) / streamadv_kl_weight_total.",
    estimate=KL_ESTIMATES.values(),
    sign=SIGNS,
)
KL_WEIGHT: Final = BATCHES.counter("kl_weight", "Tokens in that sum.", estimate=KL_ESTIMATES.values())
CLIPPED: Final = BATCHES.counter(
    "clipped",
    "Numbers that were clipped: `reward` (`critic/reward_clip_frac`), `token_reward` "
    "(`critic/token_reward_clip_frac`), `advantage` (`critic/advantage_clip_frac`), `is_weight` (above the bound: "
    "`rollout_corr/rollout_is_ratio_fraction_high`).",
    what=CLIP_SHARES.values(),
)
CLIP_CANDIDATES: Final = BATCHES.counter(
    "clip_candidates", "Numbers that a bound was applied to.", what=CLIP_SHARES.values()
)
IS_WEIGHTS_SUM: Final = BATCHES.counter(
    "is_weights_sum",
    "Sum of the importance weights of the batches delivered, also of those computed after a late column.",
)
IS_WEIGHTS_SQUARES: Final = BATCHES.counter(
    "is_weights_squares",
    "Sum of their squares. The effective sample size, as a share, is sum^2 / (count * squares).",
)
IS_WEIGHTS: Final = BATCHES.counter("is_weights", "Weights in these sums.")
KL_COEFFICIENT: Final = Gauge(
    "streamadv_kl_coefficient",
    "Coefficient of the KL penalty of the last batch: `critic/kl_coef`; absent without a penalty.",
    registry=None,
)

# Producers.
REPLAYED: Final = PLAYS.counter(
    "rollouts_replayed",
    "Rollouts that failed and were played again in their slots: `group.run(play, retries=n)`.",
)
REPLAYED_SECONDS: Final = PLAYS.counter(
    "rollouts_replayed_seconds", "Seconds that the plays took which failed and were repeated."
)

# Gateways.
#: What agents speak.
GATEWAY_DIALECTS: Final = ("chat", "completions", "messages", "responses")
GATEWAY_CODES: Final = (
    "ok", "bad_request", "sampling_fixed", "bad_key", "other_rollout", "not_yours", "history_lost", "rollout_over",
    "body_too_large", "rollout_too_large", "too_many_turns", "too_many_rollouts", "lost_tokens", "engine",
    "engine_unavailable", "not_admitted", "stopping", "store_unavailable", "other",
)  # fmt: skip
#: Why a prompt did not continue a row: other messages than before; the same ones, written otherwise by the template; an
#: answer that had reached its length.
GATEWAY_CAUSES: Final = ("history", "template", "length")
GATEWAY_OPEN: Final = Gauge(
    "streamadv_gateway_rollouts_open", "Rollouts that agents play through this gateway.", registry=GATEWAYS
)
GATEWAY_REQUESTS: Final = GATEWAYS.counter(
    "gateway_requests",
    "Requests for a turn, by what the agent speaks, and `ok` or the code of the refusal.",
    dialect=GATEWAY_DIALECTS,
    code=GATEWAY_CODES,
)
GATEWAY_TURNS: Final = GATEWAYS.counter("gateway_turns", "Turns kept, each before its answer left.")
GATEWAY_ROWS: Final = GATEWAYS.counter("gateway_rows", "Rows of the rollouts pushed: one each at best.")
GATEWAY_BREAKS: Final = GATEWAYS.counter(
    "gateway_breaks",
    "Rows begun because a prompt did not continue the tokens so far: other messages than before (`history`), the same "
    "ones written otherwise (`template`), or an answer before that had reached its length (`length`).",
    cause=GATEWAY_CAUSES,
)

_SETS: Final[Mapping[Kind, Sequence[Set]]] = {
    "producer": (PLAYS,),
    "grouper": (WORKERS, GROUPS_ENDED, ALL_GROUPS),
    "scorer": (WORKERS,),
    "advantage": (WORKERS, WORK_ITEMS, CORRECTIONS),
    "trainer": (GROUPS_ENDED, BATCHES, CORRECTIONS),
    "rank": (CORRECTIONS,),
    "exporter": (),
    "gateway": (GATEWAYS,),
    "archive": (),
}


def begin_stage(stage: str, kind: Kind) -> None:
    """Export what such a stage reports from now on. A stage that has begun stays as it is."""
    with _stages_lock:
        if stage in _stages:
            return
        _stages[stage] = None
        child(BUILD_INFO, __version__, stage).set(1)
        for counter, labels in (born for each in (STAGES, *_SETS[kind]) for born in each.born):
            for values in product(*((stage,) if label is THE_STAGE else label for label in labels)):
                child(counter, *values)
        REGISTRY.add(*_SETS[kind])
