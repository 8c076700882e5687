"""The board Flow: where is every trajectory, who waits for whom and why, how long does it take."""

from __future__ import annotations

from typing import Final

from .panels import Panel, lines
from .promql import RATE, Target, aggregate, greatest, quantile, quantiles, rate, run_rate, selector, total

WHERE: Final[list[Panel]] = [
    lines(
        "Trajectories",
        "ops",
        "Trajectories a second by the run's ledger: pushed, trained (committed with a checkpoint), dropped.",
        "In a steady state pushed is the sum of the others. pushed at 0: producers stand still. trained at 0 with "
        "pushed above: nothing is trained or committed; see Places.",
        Target(run_rate("run_pushed_trajectories_total"), "pushed"),
        Target(run_rate("run_trained_trajectories_total"), "trained"),
        Target(run_rate("run_dropped_trajectories_total"), "dropped"),
    ),
    lines(
        "Places",
        "short",
        "Where pushed trajectories are: with a scorer, in the rollouts stream, in an open group, in a group that "
        "waits for a batch, in a named batch that is not committed.",
        "The place that grows is before the stage that is too slow or gone. in_flight grows: the trainer does not "
        "commit.",
        Target(total("run_trajectories", by="place"), "{{place}}"),
        stack=True,
    ),
    lines(
        "Dropped",
        "ops",
        "Trajectories a second that ended without being trained on, by reason.",
        "stale: too old, lower max_staleness or raise drop_after. zero_variance, difficulty: filters. late, "
        "incomplete, expired: rollouts come too late. unscorable: the scorer fails.",
        Target(f"{run_rate('run_dropped_trajectories_total', by='reason')} > 0", "{{reason}}"),
        stack=True,
    ),
    lines(
        "Groups by outcome",
        "ops",
        "Groups a second that ended. stale, oversize, rolled_back and missing_column are counted when a batch is "
        "named: such a group was counted as complete or partial before.",
        "complete and partial should prevail. What to do about the others: docs/operate/troubleshooting.md.",
        Target(f"{rate('groups_total', by='outcome')} > 0", "{{outcome}}"),
        stack=True,
    ),
    lines(
        "Dead letters",
        "short",
        "Trajectories in dead letters or purged from them, by reason: their groups could not be read or computed.",
        "Rises: `streamadv dead list` shows them; after the repair `dead requeue`, else `dead purge`.",
        Target(total("run_dead_trajectories", by="reason"), "{{reason}}"),
        stack=True,
    ),
    lines(
        "Batches",
        "short",
        "Batches that are named and not trained on, and trained on and not committed.",
        "trained grows: commit more often, or memory fills. named at its limit and Trainer waits above 0: advantage "
        "workers are too slow or gone.",
        Target(total("run_batches", by="state"), "{{state}}"),
        stack=True,
    ),
]

WAITING: Final[list[Panel]] = [
    lines(
        "Why nothing moves, over time",
        "short",
        "Reasons why the run stands still, by its status: 1 while a reason holds.",
        "docs/reference/reasons.md has meaning and remedy of each. pacing alone: producers are as far ahead as "
        "they should be. No line: everything moves, or the run cannot be read.",
        Target(f"max by (reason) ({selector('run_blocked')} == 1)", "{{reason}}"),
        stack=True,
    ),
    lines(
        "Processes that wait, by reason",
        "short",
        "Processes that wait for more than a second, by stage and by what they say themselves. Works without the "
        "server.",
        "server_away, server_hangs: the server. maxmemory, max_bytes: memory; commit. groups_coming, computing, "
        "pacing are ordinary.",
        Target(f"count by (stage, reason) ({selector('blocked')} == 1)", "{{stage}}: {{reason}}"),
        stack=True,
    ),
    lines(
        "Who waits",
        "short",
        "Processes that wait, on average: producers for admission, the trainer for a batch, workers for entries.",
        "In every run one side waits. trainer at 1: rollouts are too slow, filtered away or lost. Producers near "
        "their number: the trainer is the slow side, as it should be, or memory is full.",
        Target(rate("wait_seconds_total", by="stage"), "{{stage}}"),
    ),
    lines(
        "Longest wait now",
        "s",
        "How long the longest wait of each stage lasts at this moment.",
        "trainer above a minute or two: see the reasons beside. Waiting workers are idle, which is no fault.",
        Target(greatest("waiting_seconds", 'stage=~"trainer|producer"', by="stage"), "{{stage}}"),
    ),
    lines(
        "Ahead of the trainer",
        "short",
        "Groups begun and not trained on, and how many pacing allows.",
        "At the limit producers wait for the trainer, as they should. Far below it with a waiting trainer: "
        "producers are too slow.",
        Target(greatest("run_groups_ahead"), "ahead"),
        Target(greatest("run_groups_ahead_limit"), "limit"),
    ),
    lines(
        "Bytes",
        "bytes",
        "Payload bytes: stored, promised to rollouts of open groups; and max_bytes, which both together may reach.",
        "Near the limit: producers wait for commits. live grows with in_flight: commit more often; with grouped: "
        "the trainer is too slow; else raise max_bytes.",
        Target(total("run_payload_bytes", 'kind="live"'), "live"),
        Target(total("run_payload_bytes", 'kind="reserved"'), "reserved"),
        Target(total("run_max_bytes"), "max_bytes"),
    ),
]

GROUPS: Final[list[Panel]] = [
    lines(
        "What open groups lack",
        "short",
        "Open groups (the 256 due first) by how many of their rollouts are missing.",
        "`one` grows and stays: one rollout of each group never comes: see the rollout processes' logs; push, "
        "fail() or cancel() it. `all`: tickets nobody plays.",
        Target(total("run_open_groups_missing", by="rollouts"), "{{rollouts}}"),
        stack=True,
    ),
    lines(
        "Age of open groups",
        "short",
        "Open groups (the 256 due first) that are open for longer than so many seconds.",
        "Above the usual completion time: stragglers. They end, and are lost, at group_deadline_s.",
        Target(total("run_open_groups_older_than", by="seconds"), "> {{seconds}} s"),
    ),
    lines(
        "Open and waiting groups",
        "short",
        "open: begun and not ended. abandoned: of these, with a lost producer. waiting: ended, in no batch yet.",
        "open flat and waiting at 0: groups do not end. abandoned: a producer has died; its groups wait for their "
        "deadline.",
        Target(total("run_groups", 'place=~"open|abandoned|waiting"', by="place"), "{{place}}"),
    ),
    lines(
        "Missing rollouts and rewards",
        "short",
        "Rollouts and rewards that open groups (the 256 due first) lack.",
        "scores stay up: a scorer is slow or gone, or nobody calls producer.score().",
        Target(total("run_missing_rollouts"), "rollouts"),
        Target(total("run_missing_scores"), "scores"),
    ),
]

LATENCY: Final[list[Panel]] = [
    lines(
        "Completion time",
        "s",
        "From the opening of a group to its end: the slowest of its rollouts.",
        "p90 far above p50: stragglers; bound the turns, or use redundancy.",
        *quantiles("group_completion_seconds", 0.5, 0.9),
    ),
    lines(
        "Group to trainer",
        "s",
        "From the end of a group to its delivery to the training loop.",
        "Grows: the trainer is the slow side, which costs staleness; or workers are. See Age of the oldest entry.",
        *quantiles("e2e_seconds", 0.5, 0.95),
    ),
    lines(
        "Age of the oldest entry",
        "s",
        "How long the oldest entry of each stream has waited.",
        "Above two leases (30 s for advantage workers, 10 s for the grouper) nobody works on it: start the stage, or "
        "see its log.",
        Target(greatest("run_stream_oldest_seconds", by="stream"), "{{stream}}"),
    ),
    lines(
        "Queue depth",
        "short",
        "Entries in each stream: all, and those no process has read.",
        "Grows without end: that stage is too slow, start more of it.",
        Target(total("run_stream_entries", by="stream"), "{{stream}}"),
        Target(total("run_stream_lag_entries", by="stream"), "{{stream}}, not read"),
    ),
    lines(
        "Time of a step, p95",
        "s",
        "95th percentile of the time each step of a stage takes for what it reads at once.",
        "Growing: larger entries, a slower server or a busy machine.",
        Target(quantile(0.95, "stage_duration_seconds", by="le, stage, step"), "{{stage}} {{step}}"),
    ),
    lines(
        "Time spent in each step",
        "percentunit",
        "Share of the time that one process of the stage spends in a step, mean over processes.",
        "A stage whose steps add up to 100 % is the bottleneck: start more of it.",
        Target(
            aggregate("avg", f"rate({selector('stage_duration_seconds_sum')}{RATE})", "stage, step"),
            "{{stage}} {{step}}",
        ),
        stack=True,
    ),
]

ROWS: Final = [
    ("Where every trajectory is", WHERE),
    ("Who waits for whom, and why", WAITING),
    ("Open groups", GROUPS),
    ("How long it takes", LATENCY),
]
