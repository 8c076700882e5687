"""verl's settings of the algorithm and the sampler, as the queue has them: chain, longest row, what has no effect."""

from __future__ import annotations

from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from ...algorithms import build_chain
from ...algorithms.chain.presets import PRESETS
from ...errors import SettingError
from ...messages import brief
from ...trainer.late_columns import LATE_COLUMNS
from .. import refuse

#: The options of the queue in verl's configuration.
WHERE: Final = "trainer.v1.sampler.sampler_kwargs"
#: Estimators that read whole rewards of rows: a rejected token changes nobody's advantage.
OF_WHOLE_ROWS: Final = ("gpg", "grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized")
#: Estimators that verl's asynchronous trainers do not feed, so that they end in the first step: what is missing.
UNFED: Final = {
    "gdpo": "named rewards",
    "optimal_token_baseline": "sum_pi_squared",
    "remax": "rewards of baselines",
    "tir_optimal_token_baseline": "sum_pi_squared",
}
#: What decides about stale rollouts in verl, with its defaults.
OFF_POLICY: Final = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"}


def chain_of(algorithm: DictConfig) -> str | dict[str, Any]:
    """The chain with the numbers of `algorithm.adv_estimator` and its settings. Raises SettingError without one."""
    name = getattr(algorithm.adv_estimator, "value", str(algorithm.adv_estimator))
    by_std = algorithm.get("norm_adv_by_std_in_grpo", True)
    if name == "grpo" and not by_std:
        return "verl/dr_grpo"
    preset = f"verl/{name}"
    refuse(
        preset not in PRESETS,
        f"algorithm.adv_estimator is {brief(name)}: the queue has no preset of its name; give {WHERE}.chain, or "
        f"{WHERE}.advantages=verl",
    )
    options: dict[str, Any] = {}
    if name == "grpo_passk" and not by_std:
        options["norm_by_std"] = False
    if name == "reinforce_plus_plus" and algorithm.gamma != 1.0:
        options["gamma"] = float(algorithm.gamma)
    if name == "gdpo" and algorithm.get("gdpo_reward_keys"):
        keys = list(algorithm.gdpo_reward_keys)
        weights = list(algorithm.get("gdpo_reward_weights") or [1.0] * len(keys))
        refuse(
            len(weights) != len(keys),
            f"algorithm.gdpo_reward_weights are {len(weights)}, gdpo_reward_keys {len(keys)}: give a weight for each",
        )
        options["weights"] = dict(zip(keys, map(float, weights), strict=True))
    return {"preset": preset, **options} if options else preset


def check_chain(given: Any, algorithm: DictConfig) -> None:
    """Raise SettingError for a preset `verl/<name>` that is not `algorithm.adv_estimator`."""
    name = given.get("preset") if isinstance(given, dict) else given
    if not isinstance(name, str) or not name.startswith("verl/") or name not in PRESETS:
        return
    expected = chain_of(algorithm)
    preset = expected if isinstance(expected, str) else expected["preset"]
    refuse(
        name != preset,
        f"{WHERE}.chain is {brief(name)}, algorithm.adv_estimator and norm_adv_by_std_in_grpo say {preset}: leave the "
        "chain out, or make them the same",
    )


def check_fed(algorithm: DictConfig, advantages: str) -> None:
    """Raise SettingError for an estimator that nobody gives what it reads. advantages: "verl", or "streamadv"."""
    name = getattr(algorithm.adv_estimator, "value", str(algorithm.adv_estimator))
    refuse(
        UNFED.get(name) == "sum_pi_squared",
        f"algorithm.adv_estimator is {name}: it needs sum_pi_squared, which the queue's chain gets too late, and which "
        "verl's asynchronous trainers give to no estimator; use another one",
    )
    refuse(
        advantages == "verl" and name in UNFED,
        f"algorithm.adv_estimator is {name}: verl's asynchronous trainers give no estimator {UNFED.get(name)}; leave "
        f"{WHERE}.advantages out",
    )


def check_columns(chain: Any) -> None:
    """Raise SettingError for a chain that needs what verl computes after it."""
    made: set[str] = set()
    for step in build_chain(chain).steps:
        for name in sorted(LATE_COLUMNS & (set(step.needs) - made)):
            raise SettingError(
                f"chain step {step.name} needs column {name}, which verl computes after the chain: use a chain without "
                f"it, such as verl/grpo, with algorithm.rollout_correction; or {WHERE}.advantages=verl without a chain"
            )
        made |= set(step.makes)


def check_correction(algorithm: DictConfig) -> None:
    """Raise SettingError where verl's rejection changes what `algorithm.adv_estimator` computes advantages from.

    verl rejects before the estimator; here the queue's chain has computed advantages by then.
    """
    correction = algorithm.get("rollout_correction") or {}
    name = getattr(algorithm.adv_estimator, "value", str(algorithm.adv_estimator))
    if correction.get("bypass_mode") or name in OF_WHOLE_ROWS or f"verl/{name}" not in PRESETS:
        return
    rejects = correction.get("rollout_rs")
    remedy = "leave it out" if name in UNFED else f"set {WHERE}.advantages=verl, or leave it out"
    refuse(
        rejects,
        f"algorithm.rollout_correction.rollout_rs is {brief(rejects)}: {name} depends on it, and the queue's chain "
        f"computes advantages first; {remedy}",
    )


def check_off_policy(sampler: DictConfig) -> None:
    """Raise SettingError for verl's bounds on staleness, if they are set: they have no effect."""
    for name, default in OFF_POLICY.items():
        value = sampler.get(name, default)
        refuse(
            value != default,
            f"trainer.v1.sampler.{name} is {brief(value)} and has no effect: groups that are too old are dropped by "
            f"{WHERE}.drop_after, counted in batches, and producers wait by max_staleness; leave it out",
        )


def longest_row(config: DictConfig) -> int | None:
    """Tokens of the longest row that verl can put into a micro-batch; None where it counts rows.

    verl ends the job at a longer one, and would at the same batch after each restart.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if not actor.get("use_dynamic_bsz"):
        return None
    parallel = {
        "megatron": "megatron.context_parallel_size",
        "fsdp": "ulysses_sequence_parallel_size",
        "fsdp2": "ulysses_sequence_parallel_size",
    }.get(actor.strategy)
    if parallel is None:
        return None
    ranks = int(OmegaConf.select(actor, parallel, default=1))
    limits = (actor.ppo_max_token_len_per_gpu, rollout.get("log_prob_max_token_len_per_gpu"))
    return min(int(limit) for limit in limits if limit is not None) * ranks


def log_probs_reader(config: DictConfig) -> str:
    """The setting by which verl reads `rollout_log_probs` of each row; empty without one."""
    if (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"):
        return "algorithm.rollout_correction.bypass_mode"
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return "actor_rollout_ref.rollout.calculate_log_probs"
    return ""
