"""Settings: `trainer.v1.sampler.sampler_kwargs` of verl's configuration, and what of the rest cannot hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf
from verl.trainer.distillation import is_distillation_enabled
from verl.trainer.ppo.utils import need_critic

from ...errors import SettingError
from ...messages import brief
from ...settings import redis_url, run_name
from ...trainer import TrainerQueue
from .. import refuse
from .algorithm import (
    WHERE,
    chain_of,
    check_chain,
    check_columns,
    check_correction,
    check_fed,
    check_off_policy,
    longest_row,
)

#: Arguments of `TrainerQueue` that may be given.
QUEUE_OPTIONS: Final = (
    *("batch_groups", "chain", "commit", "drop_after", "durability_window", "keep_rolled_back"),
    *("max_filtered_batches", "max_staleness", "min_groups", "min_kept_ratio", "prefetch"),
)


@dataclass(frozen=True)
class Options:
    """`trainer.v1.sampler.sampler_kwargs`.

    url: of the server; default STREAMADV_REDIS_URL. run: name of the run; default STREAMADV_RUN.
    advantages: "streamadv", those of the queue's chain, or "verl", by `algorithm.adv_estimator`.
    generate: verl's agent loops play the prompts of its data set; false where other producers do.
    window: prompts that verl keeps in play or waiting for the trainer.
    updates_per_sync: batches that are trained on between two weight syncs (`parameter_sync_step`).
    queue: arguments of `TrainerQueue`.
    """

    url: str
    run: str
    advantages: str
    generate: bool
    window: int
    updates_per_sync: int
    queue: Mapping[str, Any]


def options_of(config: DictConfig, mode: str) -> Options:
    """The options, with defaults from verl's own settings. mode: of verl's trainer. Raises SettingError."""
    kwargs = OmegaConf.to_container(config.trainer.v1.sampler.get("sampler_kwargs") or {}, resolve=True)
    given: dict[str, Any] = dict(kwargs)
    updates = int(config.trainer.v1[mode].get("parameter_sync_step", 1))
    prompts = int(config.data.train_batch_size)
    warmup = float(config.trainer.v1[mode].get("num_warmup_batches", 0))
    batches_ahead = updates * (1 + math.ceil(warmup))
    queue: dict[str, Any] = {name: given.pop(name) for name in QUEUE_OPTIONS if name in given}
    options = Options(
        url=redis_url(given.pop("url", None)),
        run=run_name(given.pop("run", None)),
        advantages=given.pop("advantages", "streamadv"),
        generate=given.pop("generate", True),
        window=prompts + math.floor(warmup * prompts),
        updates_per_sync=updates,
        queue={
            "batch_groups": prompts // updates,
            "max_staleness": batches_ahead,
            "prefetch": updates,
            "commit": "manual",
            "tokens_per_micro_batch": longest_row(config),
            **queue,
        },
    )
    known = sorted((*QUEUE_OPTIONS, "url", "run", "advantages", "generate"))
    refuse(given, f"{WHERE}: {brief(', '.join(given))} is unknown, use {', '.join(known)}")
    refuse(not options.url, f"{WHERE}.url is missing: give the server's URL, or set STREAMADV_REDIS_URL")
    refuse(
        options.advantages not in ("streamadv", "verl"),
        f"{WHERE}.advantages is {brief(options.advantages)}, needs streamadv or verl",
    )
    refuse(
        not isinstance(options.generate, bool),
        f"{WHERE}.generate is {brief(options.generate)}, needs true or false",
    )
    refuse(
        prompts % updates,
        f"data.train_batch_size is {prompts}, needs a multiple of parameter_sync_step ({updates})",
    )
    check(config, mode, options)
    if options.advantages == "verl" or "chain" not in queue:
        check_fed(config.algorithm, options.advantages)
    if options.advantages == "streamadv":
        check_chain(queue.get("chain"), config.algorithm)
        if "chain" not in queue:
            check_correction(config.algorithm)
            options = replace(options, queue={**options.queue, "chain": chain_of(config.algorithm)})
    try:  # what the queue would refuse when the sampler makes it
        if "chain" in options.queue:
            check_columns(options.queue["chain"])
        TrainerQueue(options.url, options.run, mark="explicit", **options.queue).close()
    except SettingError as error:
        raise SettingError(f"{WHERE}: {error}") from None
    refuse(
        options.queue["prefetch"] < updates - 1,
        f"{WHERE}.prefetch is {options.queue['prefetch']}, needs at least parameter_sync_step - 1: so many "
        "batches are read before the first of them is marked",
    )
    return options


def check(config: DictConfig, mode: str, options: Options) -> None:
    """Raise SettingError for settings of verl that cannot hold for a queue."""
    ours = options.advantages == "streamadv"
    reward_model = config.reward.reward_model
    filters = config.algorithm.get("filter_groups") or {}
    checkpoint = config.actor_rollout_ref.actor.get("checkpoint") or {}
    hybrid = config.trainer.v1[mode].get("hybrid_rollout") or {}
    skip = (config.get("skip") or {}).get("rollout_tq") or {}
    check_off_policy(config.trainer.v1.sampler)
    refuse(
        ours and options.generate and config.algorithm.adv_estimator == "remax",
        f"algorithm.adv_estimator is remax: verl's agent loops play no baseline rollouts; set {WHERE}.generate=false "
        "with producers that push them, or another estimator",
    )
    refuse(
        options.queue["commit"] == "manual" and config.trainer.save_freq <= 0,
        f"trainer.save_freq is {config.trainer.save_freq}: without checkpoints nothing is committed; set it, "
        f"or {WHERE}.commit=each_batch",
    )
    refuse(
        checkpoint.get("async_save"),
        "actor.checkpoint.async_save is set: when such a checkpoint is whole is not known here; leave it out",
    )
    refuse(
        ours and need_critic(config),
        f"algorithm.adv_estimator is {config.algorithm.adv_estimator}, with a critic: its values are known to "
        f"verl alone; set {WHERE}.advantages=verl, or an estimator without critic",
    )
    refuse(
        ours and config.algorithm.use_kl_in_reward,
        f"algorithm.use_kl_in_reward is set: it changes verl's advantages; set {WHERE}.advantages=verl, or kl "
        "in the chain",
    )
    refuse(
        filters.get("enable"),
        "algorithm.filter_groups is enabled: groups are filtered before a batch is named, by "
        "zero_variance_filter of the run (`streamadv runs create`); leave it out",
    )
    refuse(
        reward_model.enable and not reward_model.enable_resource_pool,
        "reward.reward_model shares the trainer's devices: it would score after sampling; set "
        "enable_resource_pool, or use a scorer of the run",
    )
    refuse(
        is_distillation_enabled(config.get("distillation")),
        "distillation is enabled: log-probs of a teacher are not carried; leave it out",
    )
    refuse(
        hybrid.get("enable_switch"),
        "hybrid_rollout.enable_switch is set: it counts rows in TransferQueue, which come at sampling only; "
        "leave it out",
    )
    refuse(skip.get("enable"), "skip.rollout_tq is enabled: rollouts are in the run; leave it out")
