"""verl's settings of the algorithm and the sampler, as the queue has them: chain, longest row, what has no effect."""

from __future__ import annotations

from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from ...algorithms.chain.presets import PRESETS
from ...messages import brief
from .. import refuse

#: Estimators that read whole rewards of rows: a rejected token changes nobody's advantage.
OF_WHOLE_ROWS: Final = ("gpg", "grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized")
#: What decides about stale rollouts in verl, with its defaults.
OFF_POLICY: Final = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"}


def chain_of(algorithm: DictConfig, where: str) -> str | dict[str, Any]:
    """The chain with the numbers of `algorithm.adv_estimator` and its settings. Raises SettingError without one.

    where: the options of the queue, for messages.
    """
    name = getattr(algorithm.adv_estimator, "value", str(algorithm.adv_estimator))
    by_std = algorithm.get("norm_adv_by_std_in_grpo", True)
    if name == "grpo" and not by_std:
        return "verl/dr_grpo"
    preset = f"verl/{name}"
    refuse(
        preset not in PRESETS,
        f"algorithm.adv_estimator is {brief(name)}: the queue has no preset of its name; give {where}.chain, or "
        f"{where}.advantages=verl",
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


def check_chain(given: Any, algorithm: DictConfig, where: str) -> None:
    """Raise SettingError for a preset `verl/<name>` that is not `algorithm.adv_estimator`."""
    name = given.get("preset") if isinstance(given, dict) else given
    if not isinstance(name, str) or not name.startswith("verl/") or name not in PRESETS:
        return
    expected = chain_of(algorithm, where)
    preset = expected if isinstance(expected, str) else expected["preset"]
    refuse(
        name != preset,
        f"{where}.chain is {brief(name)}, algorithm.adv_estimator and norm_adv_by_std_in_grpo say {preset}: leave the "
        "chain out, or make them the same",
    )


def check_correction(algorithm: DictConfig, where: str) -> None:
    """Raise SettingError where verl's correction changes what `algorithm.adv_estimator` computes advantages from.

    verl corrects before the estimator; here the queue's chain has computed advantages by then.
    """
    correction = algorithm.get("rollout_correction") or {}
    name = getattr(algorithm.adv_estimator, "value", str(algorithm.adv_estimator))
    if correction.get("bypass_mode") or name in OF_WHOLE_ROWS or f"verl/{name}" not in PRESETS:
        return
    setting = "rollout_rs" if correction.get("rollout_rs") else ""
    if name.endswith("optimal_token_baseline") and correction.get("rollout_is"):
        setting = "rollout_is"
    refuse(
        setting,
        f"algorithm.rollout_correction.{setting} is {brief(correction.get(setting))}: {name} depends on it, and the "
        f"queue's chain computes advantages first; set {where}.advantages=verl, or leave it out",
    )


def check_off_policy(sampler: DictConfig, where: str) -> None:
    """Raise SettingError for verl's bounds on staleness, if they are set: they have no effect."""
    for name, default in OFF_POLICY.items():
        value = sampler.get(name, default)
        refuse(
            value != default,
            f"trainer.v1.sampler.{name} is {brief(value)} and has no effect: groups that are too old are dropped by "
            f"{where}.drop_after, counted in batches, and producers wait by max_staleness; leave it out",
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
