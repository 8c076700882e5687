"""The instruments of a process, each made once, and the values that their labels may take.

Their texts are the reference, docs/reference/metrics.md. Labels take values from small fixed sets, never an id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..version import __version__
from .exposition import ArrayHistogram, LedgerCollector

#: How a group can end; any other name is counted as "other".
OUTCOMES: Final = (
    "complete", "partial", "incomplete", "expired", "cancelled", "zero_variance", "difficulty",
    "no_train_members", "eval", "missing_column", "stale", "oversize", "rolled_back", "other",
)  # fmt: skip
#: Outcomes of groups that go on to a batch.
KEPT: Final = ("complete", "partial")
#: How a group of role eval ends.
EVALUATED: Final = "eval"
#: What befalls a group later, when a batch is named: it was counted as kept before.
AT_NAMING: Final = ("missing_column", "stale", "oversize", "rolled_back")
#: Why a stage has to try again: see `store.retry.reason_of`.
RETRY_REASONS: Final = (
    "connection", "timeout", "loading", "readonly", "masterdown", "clusterdown", "tryagain", "moved", "ask",
    "noreplicas", "misconf", "busy", "streamend",
)  # fmt: skip
#: Why a scorer gave a trajectory up: see `grouping.scores.ScoreError`.
UNSCORABLE_KINDS: Final = ("exception", "value", "hang", "crash")
PUSH_CODES: Final = ("pushed", "duplicate", "surplus", "late", "other")
#: Data sources with a label of their own; those that come later are counted as "other".
MAX_DATA_SOURCES: Final = 32

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

REGISTRY: Final = CollectorRegistry()


def _counter(name: str, documentation: str, *labels: str) -> Counter:
    """The client adds `_total` to the name."""
    return Counter(name, documentation, labels, registry=REGISTRY)


def _gauge(name: str, documentation: str, *labels: str) -> Gauge:
    return Gauge(name, documentation, labels, registry=REGISTRY)


def _histogram(name: str, documentation: str, bounds: Sequence[float]) -> ArrayHistogram:
    histogram = ArrayHistogram(name, documentation, bounds)
    REGISTRY.register(histogram)
    return histogram


# Every stage.
STAGE_DURATION: Final = Histogram(
    "streamadv_stage_duration_seconds",
    "Time of one step of a stage, without blocking reads.",
    ("stage", "step"),
    buckets=STEP_SECONDS,
    registry=REGISTRY,
)
DELIVERED: Final = _counter("streamadv_delivered", "Stream entries read.", "stage")
ACKED: Final = _counter("streamadv_acked", "Stream entries finished.", "stage")
RECLAIMED: Final = _counter(
    "streamadv_reclaimed", "Stream entries taken over from a consumer that fell silent.", "stage"
)
DUPLICATE: Final = _counter(
    "streamadv_duplicate",
    "Stream entries that another consumer had finished first; the result is thrown away, which is harmless.",
    "stage",
)
CONNECTION_ERRORS: Final = _counter(
    "streamadv_connection_errors",
    "Errors of the server or the network, after which the call is tried again: connection, timeout, "
    "loading, readonly, masterdown, clusterdown, tryagain, moved, ask, noreplicas, misconf, busy, "
    "streamend.",
    "stage",
    "reason",
)
NOGROUP: Final = _counter(
    "streamadv_nogroup_recreations",
    "Consumer groups created, at the start of a run or after the server lost them.",
    "stage",
)
LAST_SUCCESS: Final = _gauge(
    "streamadv_last_success_timestamp_seconds", "When the stage last finished something.", "stage"
)
BLOCKED: Final = _gauge(
    "streamadv_blocked",
    '1 while this process waits for this reason, for more than a second; "Troubleshooting" lists '
    "reasons and remedies.",
    "reason",
)
BUILD_INFO: Final = _gauge("streamadv_build_info", "Always 1; the version is a label.", "version")

# Producers.
PUSHED: Final = _counter(
    "streamadv_pushed", "Records pushed: `pushed`, `duplicate`, `surplus`, `late`, `other`.", "outcome"
)
BACKPRESSURE: Final = _counter(
    "streamadv_backpressure_seconds",
    "Time waited for admission; its rate is the number of producers waiting.",
)

# Groups.
GROUPS: Final = _counter(
    "streamadv_groups",
    "Groups ended. `complete` and `partial` go on to a batch. `stale`, `oversize`, `rolled_back`, "
    "`missing_column` are counted later, when rank 0 names a batch: the group was counted as complete "
    "or partial before.",
    "outcome",
)
GROUPS_PRODUCED: Final = _counter("streamadv_groups_produced", "Groups ended, by data source.", "data_source")
GROUPS_KEPT: Final = _counter(
    "streamadv_groups_kept",
    "Of the groups ended, those complete or partial: they go on to a batch.",
    "data_source",
)
GROUP_COMPLETION: Final = _histogram(
    "streamadv_group_completion_seconds", "From the opening of a group to its end.", LONG_SECONDS
)
GROUP_REWARD_STD: Final = _histogram(
    "streamadv_group_reward_std",
    'Standard deviation of a group\'s rewards; bucket `le="0.0"` counts groups without a signal.',
    (0, *MAGNITUDES),
)

# Rewards and advantages.
REWARD: Final = _histogram("streamadv_reward", "Reward of a trajectory; signed, so without a sum.", SYMMETRIC)
# Two counters give the mean, (positive - negative) / bucket +Inf: a sum of signed numbers is no counter.
REWARD_POSITIVE: Final = _counter("streamadv_reward_positive", "Sum of rewards above 0.")
REWARD_NEGATIVE: Final = _counter(
    "streamadv_reward_negative", "Sum of rewards below 0, without sign. Mean: (positive - negative) / count."
)
ADVANTAGE: Final = _histogram(
    "streamadv_advantage",
    "Advantage, one value for each row, step or token, as the estimator gives it; signed, so without a sum.",
    SYMMETRIC,
)
RESPONSE_TOKENS: Final = _histogram("streamadv_response_tokens", "Trainable tokens of a trajectory.", TOKENS)
TURNS_TAKEN: Final = _histogram("streamadv_turns", "Turns of a trajectory.", TURNS)
UNSCORABLE: Final = _counter(
    "streamadv_unscorable",
    "Trajectories that a scorer could not score: `exception`, `value` (no finite score), `hang`, `crash`.",
    "stage",
    "kind",
)
TRUNCATED: Final = _counter("streamadv_truncated", "Trajectories cut off at a limit.")
NONFINITE: Final = _counter(
    "streamadv_nonfinite",
    "NaN or infinite `reward`, `advantage`, `is_weight`; the histograms exclude them.",
    "quantity",
)
REWARD_CLIPPED: Final = _gauge(
    "streamadv_reward_clipped_ratio",
    "Share of the rewards that was clipped: `critic/reward_clip_frac` (level `sequence`), "
    "`critic/token_reward_clip_frac` (`token`).",
    "stage",
    "level",
)
ADVANTAGE_CLIPPED: Final = _gauge(
    "streamadv_advantage_clipped_ratio",
    "Share of trainable tokens with a clipped advantage: `critic/advantage_clip_frac`.",
    "stage",
)
KL_COEFFICIENT: Final = _gauge(
    "streamadv_kl_coefficient", "Coefficient of the KL penalty: `critic/kl_coef`.", "stage"
)
KL_PENALTY: Final = _gauge(
    "streamadv_kl_penalty",
    "KL to the reference policy by the chain's own estimate: `critic/kl`.",
    "stage",
)

# Staleness and off-policy correction.
POLICY_LAG: Final = _histogram(
    "streamadv_policy_lag_versions",
    "Staleness of a trajectory when it is trained on; trajectories without a version do not count.",
    VERSIONS,
)
POLICY_LAG_IN_FLIGHT: Final = _histogram(
    "streamadv_policy_lag_in_flight_versions", "Part of the staleness from while it was played.", VERSIONS
)
POLICY_LAG_IN_QUEUE: Final = _histogram(
    "streamadv_policy_lag_in_queue_versions", "Part of the staleness from waiting for its batch.", VERSIONS
)
KL_K1: Final = _gauge(
    "streamadv_kl_k1", "KL(rollout policy, trained policy), k1 estimate: `rollout_corr/kl`.", "stage"
)
KL_K3: Final = _gauge(
    "streamadv_kl_k3", "KL(rollout policy, trained policy), k3 estimate: `rollout_corr/k3_kl`.", "stage"
)
IS_WEIGHT: Final = _histogram("streamadv_is_weight", "Importance weights after truncation.", WEIGHTS)
IS_ESS: Final = _gauge(
    "streamadv_is_ess_ratio",
    "Effective sample size of the importance weights, mean(w)^2 / mean(w^2): "
    "`rollout_corr/rollout_is_eff_sample_size`.",
    "stage",
)
IS_CLIPPED: Final = _gauge(
    "streamadv_is_clipped_ratio",
    "Share of weights above the bound: `rollout_corr/rollout_is_ratio_fraction_high`.",
    "stage",
)

# The trainer queue.
NO_PROGRESS: Final = _gauge(
    "streamadv_no_progress_seconds",
    "Seconds that the trainer has waited for its next batch; the watchdog uses this figure.",
)
BATCH_VERSION: Final = _gauge("streamadv_batch_version", "Version of the last batch delivered.")
DELIVERED_BATCHES: Final = _counter(
    "streamadv_delivered_batches",
    "Batches delivered; a batch that is delivered again after a restart counts again.",
)
DELIVERED_TRAJECTORIES: Final = _counter(
    "streamadv_delivered_trajectories", "Trajectories delivered to the trainer."
)
DELIVERED_TOKENS: Final = _counter("streamadv_delivered_tokens", "Trainable tokens delivered to the trainer.")
TRAINER_WAIT: Final = _counter("streamadv_trainer_wait_seconds", "Time the trainer waited for batches.")
E2E: Final = _histogram("streamadv_e2e_seconds", "From the end of a group to its delivery.", LONG_SECONDS)

LEDGER: Final = LedgerCollector()
REGISTRY.register(LEDGER)


EVENTS: Final[Mapping[str, Counter]] = {
    "delivered": DELIVERED,
    "acked": ACKED,
    "reclaimed": RECLAIMED,
    "duplicate": DUPLICATE,
}
#: Where numbers under verl's and ROLL's names go, with labels beside the stage; others have no metric here.
TRAINING_GAUGES: Final[Mapping[str, tuple[Gauge, tuple[str, ...]]]] = {
    "critic/kl": (KL_PENALTY, ()),
    "critic/kl_coef": (KL_COEFFICIENT, ()),
    "critic/reward_clip_frac": (REWARD_CLIPPED, ("sequence",)),
    "critic/token_reward_clip_frac": (REWARD_CLIPPED, ("token",)),
    "critic/advantage_clip_frac": (ADVANTAGE_CLIPPED, ()),
    "rollout_corr/kl": (KL_K1, ()),
    "rollout_corr/k3_kl": (KL_K3, ()),
    "rollout_corr/rollout_is_eff_sample_size": (IS_ESS, ()),
    "rollout_corr/rollout_is_ratio_fraction_high": (IS_CLIPPED, ()),
}


@cache
def child(instrument: Any, *labels: str) -> Any:
    """`instrument.labels(...)`, looked up once."""
    return instrument.labels(*labels)


child(BUILD_INFO, __version__).set(1)
# Series that exist from the start show their first increase.
for _outcome in OUTCOMES:
    child(GROUPS, _outcome)
for _code in PUSH_CODES:
    child(PUSHED, _code)
for _quantity in ("reward", "advantage", "is_weight"):
    child(NONFINITE, _quantity)
