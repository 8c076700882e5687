"""The board Training: does the policy learn, from which data, and how old is it."""

from __future__ import annotations

from typing import Final

from .panels import Panel, lines, spread
from .promql import Target, greatest, mean, quantiles, rate, ratio

#: Outcomes of groups that a batch may take, and of those that are dropped when a batch is named: counted twice.
KEPT: Final = 'outcome=~"complete|partial"'
AT_NAMING: Final = 'outcome=~"missing_column|stale|oversize|rolled_back"'
#: Outcomes of training groups before a batch is named.
ENDED: Final = 'outcome!~"missing_column|stale|oversize|rolled_back|eval"'


def signed(metric: str, weight: str, *matchers: str, by: str = "") -> str:
    """Mean of a quantity that has two counters, one for each sign, and one of its weight."""
    plus, minus = (rate(metric, *matchers, f'sign="{sign}"', by=by) for sign in ("positive", "negative"))
    return ratio(f"({plus} - {minus})", rate(weight, *matchers, by=by))


def reward(*matchers: str, by: str = "") -> str:
    return signed("rewards_sum_total", "rewards_total", *matchers, by=by)


def kl(estimate: str) -> str:
    return signed("kl_sum_total", "kl_weight_total", f'estimate="{estimate}"')


def clipped(what: str, by: str = "") -> str:
    return ratio(rate("clipped_total", what, by=by), rate("clip_candidates_total", what, by=by))


REWARDS: Final[list[Panel]] = [
    lines(
        "Reward, mean",
        "short",
        "Mean reward of the trajectories of all training groups that ended, and of those kept for a batch.",
        "all falls: the policy gets worse, or tasks or scorers have changed. kept alone says little: a filter that "
        "drops solved groups holds it down.",
        Target(reward(), "all"),
        Target(reward('kept="yes"'), "kept"),
        low=None,
    ),
    lines(
        "Reward by source",
        "short",
        "Mean reward of all training groups that ended, by data source.",
        "One source falls while others rise: they are at odds, or its scorer is broken. A source whose line ends: "
        "nobody plays it.",
        Target(reward(by="data_source"), "{{data_source}}"),
        low=None,
    ),
    spread(
        "Reward, distribution",
        "short",
        "Trajectories a second of all training groups that ended, by bucket of their reward.",
        "All in one bucket: nothing to learn from, the tasks are too easy or too hard.",
        Target(rate("reward_bucket", by="le"), "{{le}}"),
    ),
    lines(
        "Groups kept",
        "percentunit",
        "Share of the training groups that ended that go on to a batch and are not dropped when it is named; by "
        "source, before naming.",
        "Near 0 the trainer starves while every queue looks healthy: Groups by outcome on the board Flow says why. "
        "zero_variance, difficulty: choose other tasks or widen the filter.",
        Target(
            ratio(
                f"clamp_min({rate('groups_total', KEPT)} - {rate('groups_total', AT_NAMING)}, 0)",
                rate("groups_total", ENDED),
            ),
            "all",
        ),
        Target(
            ratio(
                rate("groups_kept_total", by="data_source"), rate("groups_produced_total", by="data_source")
            ),
            "{{data_source}}",
        ),
        high=1,
    ),
    lines(
        "Groups without a signal",
        "percentunit",
        "Share of all training groups with two or more rewards whose rewards are equal.",
        "Rises to 1: the policy solves all or none of its tasks; Reward, mean says which. Choose others.",
        Target(
            ratio(rate("group_reward_std_bucket", 'le="0.0"'), rate("group_reward_std_count")), "no spread"
        ),
        high=1,
    ),
    lines(
        "Evaluation",
        "short",
        "Of the newest version that was evaluated, by data source: mean reward, and mean over groups of the best.",
        "Falls while Reward, mean rises: the policy fits the training tasks alone. Flat: no evaluation ends.",
        Target(greatest("run_eval_reward_mean", by="data_source"), "{{data_source}} mean"),
        Target(greatest("run_eval_reward_best", by="data_source"), "{{data_source}} best"),
        low=None,
    ),
]

UPDATE: Final[list[Panel]] = [
    lines(
        "KL to the reference",
        "short",
        "Mean KL penalty of the trained tokens by the chain's own estimate, and its coefficient.",
        "Rises without end: the policy leaves the reference: raise the coefficient, or lower the learning rate. "
        "Empty without KL in the chain.",
        Target(kl("penalty"), "KL"),
        Target(greatest("kl_coefficient"), "coefficient"),
        low=None,
    ),
    spread(
        "Advantages",
        "short",
        "Advantages a second, by bucket.",
        "They lie around 0. Mass that moves outwards: outliers in the rewards; whiten or clip.",
        Target(rate("advantage_bucket", by="le"), "{{le}}"),
    ),
    lines(
        "Clipped",
        "percentunit",
        "Share of what the chain clips: rewards, rewards of tokens, advantages, importance weights.",
        "Above a few per cent the bound cuts off signal: look at the distribution, then move the bound. Empty "
        "without a clip.",
        Target(clipped('what=~".+"', by="what"), "{{what}}"),
        high=1,
    ),
    lines(
        "Tokens trained on",
        "short",
        "Trainable tokens delivered to the trainer, a second.",
        "Falls: read Why nothing moves above, then the board Flow.",
        Target(rate("delivered_tokens_total"), "tokens a second"),
    ),
    lines(
        "Response length",
        "short",
        "Trainable tokens of a trajectory.",
        "Length that rises with a flat reward: the policy rambles. Truncated above some per cent: raise the "
        "limit, or penalise length.",
        Target(mean("response_tokens"), "mean"),
        *quantiles("response_tokens", 0.5, 0.95),
    ),
    lines(
        "Truncated",
        "percentunit",
        "Share of the trajectories computed that were cut off at a limit.",
        "Above some per cent the reward measures the limit: raise it, or shorten the responses.",
        Target(ratio(rate("truncated_total"), rate("response_tokens_count")), "truncated"),
        high=1,
    ),
    lines(
        "Turns",
        "short",
        "Turns of a trajectory.",
        "Near the limit of the environment: agents do not finish.",
        Target(mean("turns"), "mean"),
        *quantiles("turns", 0.95),
    ),
    lines(
        "Non-finite values",
        "ops",
        "NaN or infinity among advantages or importance weights, a second.",
        "Must stay 0: the model's log-probabilities or a reward are broken; the trainer's log names the group.",
        Target(rate("nonfinite_total", by="quantity"), "{{quantity}}"),
    ),
    lines(
        "Version",
        "short",
        "Policy version published, being trained, and covered by a committed checkpoint.",
        "Flat: the trainer waits or has died. Committed far behind: nothing is committed, and memory fills.",
        Target(greatest("run_version"), "published"),
        Target(greatest("batch_version"), "being trained"),
        Target(greatest("run_committed_version"), "committed"),
    ),
]

STALENESS: Final[list[Panel]] = [
    lines(
        "Staleness",
        "short",
        "Policy versions between the oldest trainable token of a trajectory and the version it trains: of what was "
        "delivered, and of what is named or waits now.",
        "waiting above delivered: what comes next is older, and may be dropped: lower max_staleness, or more "
        "workers and a faster trainer.",
        Target(mean("policy_lag_versions"), "delivered, mean"),
        *[
            Target(target.expr, f"delivered, {target.legend}")
            for target in quantiles("policy_lag_versions", 0.95)
        ],
        Target(greatest("run_waiting_staleness_mean_versions"), "waiting, mean"),
        Target(greatest("run_waiting_staleness_max_versions"), "waiting, oldest"),
    ),
    lines(
        "Where staleness comes from",
        "short",
        "Mean staleness of what was delivered: from while it was played, and from waiting for its batch.",
        "Waiting: lower max_staleness or prefetch. Playing: long rollouts, or the version changes often.",
        Target(mean("policy_lag_in_flight_versions"), "while played"),
        Target(mean("policy_lag_in_queue_versions"), "while waiting"),
        stack=True,
    ),
    lines(
        "KL from rollout to trained policy",
        "short",
        "How far the policy has moved from the one that played the data: k1 and k3 estimates.",
        "High on fresh data: the engine's log-probabilities are not those of the trained model (precision, "
        "template, temperature, weights not loaded). Grows with staleness: lower max_staleness.",
        Target(kl("k1"), "k1"),
        Target(kl("k3"), "k3"),
        low=None,
    ),
    lines(
        "Effective sample size",
        "percentunit",
        "sum(w)^2 / (n * sum(w^2)) of the importance weights.",
        "100 %: all samples count alike. Below 30 % few samples decide the update: the data is too old, or the "
        "engine's log-probabilities are off.",
        Target(
            ratio(
                f"{rate('is_weights_sum_total')} ^ 2",
                f"({rate('is_weights_total')} * {rate('is_weights_squares_total')})",
            ),
            "ESS",
        ),
        high=1,
    ),
    lines(
        "Importance weight, mean",
        "short",
        "Mean of the importance weights after truncation, of delivered batches.",
        "Far from 1: as Effective sample size.",
        Target(ratio(rate("is_weights_sum_total"), rate("is_weights_total")), "mean"),
    ),
    spread(
        "Importance weights",
        "short",
        "Importance weights of trained tokens after truncation, a second, by bucket: from workers or, after a late "
        "column, from the trainer.",
        "Mass at the truncation bound: lower max_staleness, or check the engine's log-probabilities.",
        Target(rate("is_weight_bucket", by="le"), "{{le}}"),
    ),
]

ROWS: Final = [("Rewards", REWARDS), ("What is trained on", UPDATE), ("Staleness and correction", STALENESS)]
