"""Builds dashboards/streamadv.json: `python deploy/grafana/build_dashboard.py`.

Panels stand in the order of the board. streamadv/metrics/instruments.py says what each metric means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from panels import (
    RATE,
    Json,
    average,
    dashboard,
    greatest,
    mean,
    panel,
    quantile,
    quantiles,
    rate,
    ratio,
    selector,
    stat,
    total,
    variable,
)

OUTPUT: Final = Path(__file__).parent / "dashboards" / "streamadv.json"

STAGE: Final = 'stage=~"$stage"'


def run_rate(metric: str) -> str:
    """Increase per second of a counter of the run, which several processes may export."""
    return f"sum (max by (run) (sum by (run, instance) (rate({selector(f'run_{metric}')}{RATE}))))"


def mean_reward(*matchers: str) -> str:
    """Mean of the rewards of groups that ended."""
    parts = [rate("rewards_sum_total", f'sign="{sign}"', *matchers) for sign in ("positive", "negative")]
    return ratio(f"({parts[0]} - {parts[1]})", rate("rewards_total", *matchers))


def mean_kl(estimate: str) -> str:
    """Mean over tokens of a KL estimate."""
    matcher = f'estimate="{estimate}"'
    parts = [rate("kl_sum_total", f'sign="{sign}"', matcher) for sign in ("positive", "negative")]
    return ratio(f"({parts[0]} - {parts[1]})", rate("kl_weight_total", matcher))


FLOW: Final = [
    panel(
        "Trajectories",
        "ops",
        "Trajectories a second, from the run's ledger: pushed by producers, trained (committed with a "
        "checkpoint), dropped for a reason. In a steady state pushed is the sum of the others.",
        *((run_rate(f"{place}_trajectories_total"), place) for place in ("pushed", "trained", "dropped")),
    ),
    panel(
        "Queue depth",
        "short",
        "Entries in each stream. rollouts: trajectories the grouper has not taken; work: units of work the advantage "
        "workers have not finished; scoring: with a scorer. Growing without end: that stage is too slow.",
        (total("run_stream_entries", by="stream"), "{{stream}}"),
    ),
    panel(
        "Lag and pending",
        "short",
        "Lag: entries no consumer has read. Pending: read and not acknowledged. Pending that stays while "
        "nothing is acknowledged: a worker is stuck or has died less than a lease ago.",
        (total("run_stream_lag_entries", by="stream"), "{{stream}} lag"),
        (total("run_stream_pending_entries", by="stream"), "{{stream}} pending"),
    ),
    panel(
        "Age of the oldest entry",
        "s",
        "How long the oldest entry of each stream has waited. Above two leases (30 s for advantage workers, "
        "10 s for the grouper) nobody works on it.",
        (greatest("run_stream_oldest_seconds", by="stream"), "{{stream}}"),
    ),
    panel(
        "Time of a step, p95",
        "s",
        "95th percentile of the time each step of a stage takes for one batch of entries.",
        (quantile(0.95, "stage_duration_seconds", STAGE, by="le, stage, step"), "{{stage}} {{step}}"),
    ),
    panel(
        "Time spent in each step",
        "percentunit",
        "Share of the time that one process of the stage spends in a step, mean over processes. A stage whose "
        "steps add up to 100 % is the bottleneck: start more of it.",
        (
            f"avg by (stage, step) (rate({selector('stage_duration_seconds_sum', STAGE)}{RATE}))",
            "{{stage}} {{step}}",
        ),
        stack=True,
    ),
    panel(
        "Stream entries",
        "ops",
        "Entries a second, by stage: delivered and acked should agree. Reclaimed: taken over from a consumer "
        "that died. Duplicate: finished twice, the second result thrown away (harmless).",
        *(
            (rate(f"{event}_total", STAGE, by="stage"), f"{{{{stage}}}} {event}")
            for event in ("delivered", "acked", "reclaimed", "duplicate")
        ),
    ),
    panel(
        "Connection trouble",
        "ops",
        "Failed connections, and consumer groups found missing and made (at the start of a run, or because the "
        "server lost data). Both repair themselves; neither should go on.",
        (rate("connection_errors_total", STAGE, by="stage"), "{{stage}} connection errors"),
        (rate("nogroup_recreations_total", STAGE, by="stage"), "{{stage}} group made again"),
    ),
    panel(
        "Who waits",
        "short",
        "Processes that wait, on average: producers for admission (the run is max_staleness ahead, or out of "
        "bytes), the trainer for a batch. In every run one side waits; the trainer at 1 means that rollouts are "
        "too slow or filtered away.",
        (rate("wait_seconds_total", 'stage="producer"'), "producers, for admission"),
        (rate("wait_seconds_total", 'stage="trainer"'), "trainer, for a batch"),
    ),
    panel(
        "Tokens delivered",
        "short",
        "Trainable tokens delivered to the trainer, a second.",
        (rate("delivered_tokens_total"), "tokens a second"),
    ),
    panel(
        "Group to trainer",
        "s",
        "From the end of a group to its delivery to the training loop.",
        *quantiles("e2e_seconds", 0.5, 0.95),
    ),
    panel(
        "Seconds since a stage last finished something",
        "s",
        "By stage, the most recent of its processes. Rising for ever: the stage stands still or is gone.",
        (
            f"time() - {greatest('last_success_timestamp_seconds', STAGE, by='stage')}",
            "{{stage}}",
        ),
    ),
]

GROUPS: Final = [
    panel(
        "Groups by outcome",
        "ops",
        "Groups ended, a second. complete and partial go on to a batch. stale, oversize and rolled_back are "
        "dropped later, when the batch is named, and were counted as complete before.",
        (rate("groups_total", by="outcome") + " > 0", "{{outcome}}"),
        stack=True,
    ),
    panel(
        "Groups kept",
        "percentunit",
        "Share of the groups that ended that go on to a batch: all, and by data source. Near 0 the trainer "
        "starves while every queue looks healthy: the filters reject what the policy produces.",
        (
            ratio(
                rate("groups_total", 'outcome=~"complete|partial"'),
                rate("groups_total", 'outcome!~"missing_column|stale|oversize|rolled_back"'),
            ),
            "all",
        ),
        (
            ratio(
                rate("groups_kept_total", by="data_source"), rate("groups_produced_total", by="data_source")
            ),
            "{{data_source}}",
        ),
        high=1,
    ),
    panel(
        "Groups without a signal",
        "percentunit",
        "Share of the groups that ended whose rewards are all equal: their advantages are 0, or a filter drops "
        "them (outcome zero_variance).",
        (
            ratio(rate("group_reward_std_bucket", 'le="0.0"'), rate("group_reward_std_count")),
            "zero reward spread",
        ),
        high=1,
    ),
    panel(
        "Reward spread in a group",
        "short",
        "Standard deviation of the rewards of one group.",
        (mean("group_reward_std"), "mean"),
        *quantiles("group_reward_std", 0.5, 0.9),
    ),
    panel(
        "Completion time",
        "s",
        "From the opening of a group to its end: the slowest of its rollouts.",
        *quantiles("group_completion_seconds", 0.5, 0.9),
    ),
    panel(
        "Open groups",
        "short",
        "Groups begun and not ended. Admission holds them at (max_staleness + 1) x groups per version.",
        (total("run_groups", 'place="open"'), "open"),
    ),
]


ADVANTAGES: Final = [
    panel(
        "Reward, mean",
        "short",
        "Mean reward of the trajectories of all groups that ended, and of those that go on to a batch.",
        (mean_reward(), "all"),
        (mean_reward('kept="yes"'), "kept"),
        low=None,
    ),
    panel(
        "Reward, quantiles",
        "short",
        "Quantiles of the reward of a trajectory, as exact as the buckets are.",
        *quantiles("reward", 0.1, 0.5, 0.9),
        low=None,
    ),
    panel(
        "Evaluation",
        "short",
        "Mean reward of the newest version that was evaluated, by data source, and the mean over groups of the best "
        "reward in each. Which version it is stands in streamadv_run_eval_version.",
        (greatest("run_eval_reward_mean", by="data_source"), "{{data_source}} mean"),
        (greatest("run_eval_reward_best", by="data_source"), "{{data_source}} best"),
        low=None,
    ),
    panel(
        "Advantage",
        "short",
        "Quantiles of the advantages. They should lie around 0; tails that drift apart mean outliers.",
        *quantiles("advantage", 0.05, 0.25, 0.5, 0.75, 0.95),
        low=None,
    ),
    panel(
        "Response length",
        "short",
        "Trainable tokens of a trajectory.",
        (mean("response_tokens"), "mean"),
        *quantiles("response_tokens", 0.5, 0.95),
    ),
    panel(
        "Turns",
        "short",
        "Turns of a trajectory.",
        (mean("turns"), "mean"),
        *quantiles("turns", 0.95),
    ),
    panel(
        "Truncated",
        "percentunit",
        "Share of the trajectories that were cut off at a limit.",
        (ratio(rate("truncated_total"), rate("response_tokens_count")), "truncated"),
        high=1,
    ),
    panel(
        "Clipped",
        "percentunit",
        "Share of rewards (sequence or token level) and of trainable tokens' advantages that were clipped.",
        (ratio(rate("clipped_total", by="what"), rate("clip_candidates_total", by="what")), "{{what}}"),
        high=1,
    ),
    panel(
        "KL to the reference",
        "short",
        "KL penalty as the chain estimates it, and its coefficient (moves when the controller is adaptive). "
        "0 for a chain without KL.",
        (mean_kl("penalty"), "KL"),
        (average("kl_coefficient"), "coefficient"),
        low=None,
    ),
    panel(
        "Non-finite values",
        "ops",
        "NaN or infinity among advantages or importance weights. Must stay 0.",
        (rate("nonfinite_total", by="quantity"), "{{quantity}}"),
    ),
]

STALENESS: Final = [
    panel(
        "Staleness",
        "short",
        "Policy versions between the oldest trainable token of a trajectory and the version it trains.",
        (mean("policy_lag_versions"), "mean"),
        *quantiles("policy_lag_versions", 0.5, 0.95),
    ),
    panel(
        "Where staleness comes from",
        "short",
        "Mean staleness: from while the trajectory was played, and from waiting for its batch. Waiting: lower "
        "max_staleness or prefetch. Playing: long rollouts, or the version changes often.",
        (mean("policy_lag_in_flight_versions"), "in flight"),
        (mean("policy_lag_in_queue_versions"), "in the queue"),
        stack=True,
    ),
    panel(
        "KL from rollout to trained policy",
        "short",
        "How far the policy has moved from the one that played the data: k1 and k3 estimates, last batch.",
        (mean_kl("k1"), "k1"),
        (mean_kl("k3"), "k3"),
        low=None,
    ),
    panel(
        "Effective sample size",
        "percentunit",
        "mean(w)^2 / mean(w^2) of the importance weights. 100 %: all samples count alike; below 30 % few "
        "samples decide the update.",
        (
            ratio(
                f"({rate('is_weights_sum_total')} ^ 2)",
                f"({rate('is_weights_total')} * {rate('is_weights_squares_total')})",
            ),
            "ESS",
        ),
        high=1,
    ),
    panel(
        "Importance weight",
        "short",
        "Importance weights after truncation. The mean should stay near 1.",
        (mean("is_weight"), "mean"),
        *quantiles("is_weight", 0.05, 0.95),
    ),
    panel(
        "Version",
        "short",
        "Version of the policy in the run, and the one that the last batch delivered trains.",
        (greatest("run_version"), "published"),
        (greatest("batch_version"), "being trained"),
    ),
]

LEDGER: Final = [
    stat(
        "Status can be read",
        "short",
        "Whether a process that exports the facts of the run (a grouper, `streamadv exporter`) reads them in time.",
        (greatest("run_readable"), "up"),
        good_is_one=True,
    ),
    stat(
        "Ledger balanced",
        "short",
        "pushed = trained + dropped + dead + queued + in flight, and the counters agree with the structures. "
        "If not, `streamadv status --check` says where.",
        (f"min ({selector('run_balanced')})", "balanced"),
        good_is_one=True,
    ),
    stat(
        "Trained",
        "short",
        "Trajectories trained on and committed.",
        (total("run_trained_trajectories_total"), "trained"),
    ),
    panel(
        "Trajectories in the pipeline",
        "short",
        "scoring, rollouts, open and grouped are queued: with a scorer, in the rollouts stream, in an open "
        "group, waiting for a batch. in_flight: in "
        "a named batch that is not committed.",
        (total("run_trajectories", by="place"), "{{place}}"),
        stack=True,
    ),
    panel(
        "Dropped and dead",
        "short",
        "Trajectories that were not trained on, by reason, since the run began.",
        (total("run_dropped_trajectories_total", by="reason"), "dropped, {{reason}}"),
        (total("run_dead_trajectories", by="reason"), "dead, {{reason}}"),
    ),
    panel(
        "Producers",
        "short",
        "open: alive. finished: they said so. lost: silent for 30 s without having finished.",
        (total("run_producers", by="state"), "{{state}}"),
        stack=True,
    ),
    panel(
        "Payload bytes",
        "bytes",
        "live: stored. reserved: promised to members of open groups that have not come yet. Admission keeps "
        "the sum below max_bytes.",
        (total("run_payload_bytes", 'kind="live"'), "live"),
        (total("run_payload_bytes", 'kind="reserved"'), "reserved"),
        stack=True,
    ),
]

ROWS: Final = [
    ("Flow", FLOW),
    ("Groups", GROUPS),
    ("Rewards and advantages", ADVANTAGES),
    ("Staleness and off-policy correction", STALENESS),
    ("Ledger", LEDGER),
]


def build() -> Json:
    """The dashboard."""
    return dashboard(
        ROWS,
        [
            variable("run", "Run", "streamadv_build_info"),
            variable("stage", "Stage", 'streamadv_stage_duration_seconds_count{run=~"$run"}'),
        ],
    )


def render() -> str:
    """The file's text."""
    return json.dumps(build(), indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(render())
