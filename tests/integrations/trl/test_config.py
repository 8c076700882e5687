"""Every setting of GRPOConfig holds, is refused, or is named in a warning: none loses its effect in silence."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import GRPOConfig

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.integrations.transformers import (
    EVALUATE_ALONE,
    OF_ACCELERATOR,
    OF_LOADER,
    queue_for,
    warn_without_effect,
)
from streamadv.integrations.transformers import WITHOUT_EFFECT as OF_EVERY_TRAINER
from streamadv.integrations.trl import QueueGRPOTrainer
from streamadv.integrations.trl.config import ELSEWHERE, OF_EVALUATE, WITHOUT_EFFECT, check_config
from tests.support import join, working

from .models import config, policy, tokenizer
from .test_queue import push, trainer

#: TRL's own settings that mean here what they mean there.
OF_LOSSES = (
    *("beta", "cast_lm_head_to_fp32", "delta", "disable_dropout", "epsilon", "epsilon_high"),
    *("importance_sampling_level", "max_completion_length", "model_init_kwargs", "off_policy_mask_threshold"),
    *("ref_model_mixup_alpha", "ref_model_sync_steps", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("sync_ref_model", "temperature", "trust_remote_code", "use_bias_correction_kl", "vespo_k_neg"),
    *("vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
    # of `use_adaptive_entropy`, which is refused
    *("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target"),
)
#: Refused by a check of their own (test_exact.py).
CHECKED = (
    *(
        "auto_find_batch_size",
        "deepspeed",
        "entropy_coef",
        "generation_batch_size",
        "gradient_accumulation_steps",
    ),
    *(
        "loss_type",
        "max_steps",
        "num_iterations",
        "parallelism_config",
        "reward_weights",
        "router_aux_loss_coef",
    ),
    *(
        "save_on_each_node",
        "steps_per_generation",
        "top_entropy_quantile",
        "use_adaptive_entropy",
        "use_vllm",
    ),
)
#: transformers' settings that a training on a queue reads, outside of the configuration.
READ = (
    *("accelerator_config", "activation_checkpointing", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("bf16_full_eval", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters"),
    *("ddp_static_graph", "debug", "disable_tqdm", "enable_jit_checkpoint", "fp16_full_eval", "fsdp"),
    *("full_determinism", "gradient_checkpointing", "include_num_input_tokens_seen", "learning_rate"),
    *("load_best_model_at_end", "logging_first_step", "logging_nan_inf_filter", "logging_steps"),
    *("logging_strategy", "lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm", "neftune_noise_alpha"),
    *("optim", "optim_args", "output_dir", "push_to_hub", "report_to", "save_only_model", "save_steps"),
    *("save_strategy", "save_total_limit", "seed", "skip_memory_metrics", "torch_compile_backend"),
    *("torch_compile_mode", "torch_empty_cache_steps", "use_cache", "use_liger_kernel", "weight_decay"),
)
#: Those that the configuration itself reads, or makes something of.
READ_BY_THE_CONFIG = (
    *(
        "activation_checkpointing_kwargs",
        "bf16",
        "ddp_backend",
        "ddp_timeout",
        "do_eval",
        "fp16",
        "fsdp_config",
    ),
    *("gradient_checkpointing_kwargs", "log_level", "log_level_replica", "log_on_each_node"),
    *("tf32", "torch_compile", "use_cpu", "warmup_steps"),
)
#: Those that are read where another setting, a resume, a tracker or an evaluation asks for them.
READ_ON_A_CONDITION = {
    "adapters of an optimizer": ("optim_target_modules",),
    "evaluate": (
        *(
            "batch_eval_metrics",
            "eval_accumulation_steps",
            "eval_delay",
            "eval_do_concat_batches",
            "eval_on_start",
        ),
        *(
            "eval_steps",
            "eval_strategy",
            "eval_use_gather_object",
            "greater_is_better",
            "include_for_metrics",
        ),
        *("metric_for_best_model", "per_device_eval_batch_size", "prediction_loss_only"),
    ),
    "push_to_hub": (
        *("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token"),
    ),
    "resume": ("restore_callback_states_from_checkpoint",),
    "trackers": ("project", "run_name", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
    "use_liger_kernel": ("liger_kernel_config",),
    "the user's own script, no Trainer": ("do_predict", "do_train", "local_rank", "resume_from_checkpoint"),
    "the queue, whose checkpoints need no skipping": ("ignore_data_skip",),
}
#: Functions that read every setting, to print it or to store it.
PRINTS = {"to_dict", "to_sanitized_dict", "asdict", "_asdict_inner", "__repr__", "__str__"}
TABLES = (
    *(OF_LOSSES, CHECKED, READ, READ_BY_THE_CONFIG, *READ_ON_A_CONDITION.values()),
    *(tuple(ELSEWHERE), OF_EVALUATE, WITHOUT_EFFECT, OF_LOADER, OF_EVERY_TRAINER, ("pad_to_multiple_of",)),
)
OTHERS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "dataloader_multiprocessing_context": "spawn",
    "multi_objective_aggregation": "normalize_then_sum",
    "pad_to_multiple_of": 8,
    "scale_rewards": "none",
}


def changed(name: str, folder: Path) -> GRPOConfig:
    """A configuration with another value of one setting."""
    (field,) = (field for field in fields(GRPOConfig) if field.name == name)
    default = None if field.default is MISSING else field.default
    made = config(folder)
    if name in OTHERS:
        value = OTHERS[name]
    elif isinstance(default, bool):
        value = not default
    elif isinstance(default, int | float):
        value = default + 1
    else:
        value = 2 if default is None else f"{default}2"
    setattr(made, name, value)  # as TRL has it after its own checks
    return made


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of the package; TRL and transformers have their own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("streamadv")]


def test_every_setting_is_in_one_table() -> None:
    """A setting that a new TRL or transformers brings stands in none, until somebody has looked at what it does."""
    names = Counter(name for table in TABLES for name in table)
    assert names.keys() == {field.name for field in fields(GRPOConfig)}
    assert max(names.values()) == 1
    of_accelerator = {field.name for field in fields(AcceleratorConfig)}
    assert of_accelerator == {*OF_ACCELERATOR, "gradient_accumulation_kwargs", "use_configured_state"}


@pytest.mark.server
def test_a_training_reads_the_settings_that_hold(
    redis_url: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the queue has taken over would be read nowhere: no such setting may stand among those that hold."""
    names, found = {name for table in TABLES for name in table}, set()

    def reading(self: GRPOConfig, name: str) -> Any:
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        is_reader = not module.endswith(("training_args", "grpo_config", "base_config"))
        if (
            name in names
            and is_reader
            and not module.startswith("streamadv.")
            and caller.f_code.co_name not in PRINTS
        ):
            found.add(name)
        return object.__getattribute__(self, name)

    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 6)
        with working(join(redis_url, run)):
            monkeypatch.setattr(GRPOConfig, "__getattribute__", reading)
            made = trainer(redis_url, run, tmp_path, max_steps=2)
            made.train()
            made.queue.close()
    assert set(READ) - found == set()
    assert found & {*OF_LOADER, *READ_BY_THE_CONFIG} == set()


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_is_set_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=f"^{name} is .*leave it out"):
        check_config(changed(name, tmp_path), evaluates=True)


@pytest.mark.parametrize("name", OF_EVALUATE)
def test_sampling_is_refused_without_an_evaluation(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = changed(name, tmp_path)
    with pytest.raises(SettingError, match=f"^{name} is .*no effect without an eval_dataset"):
        check_config(args, evaluates=False)
    check_config(args, evaluates=True)
    assert said(caplog) == [f"settings of GRPOConfig hold for evaluate() alone, producers generate: {name}"]


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, "pad_to_multiple_of"])
def test_what_does_no_harm_is_named_in_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_config(changed(name, tmp_path), evaluates=False)
    assert said(caplog) == [f"settings of GRPOConfig have no effect: {name}"]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", [*OF_EVERY_TRAINER, *OF_LOADER])
def test_what_the_queue_decides_for_every_trainer_is_named_in_a_warning(
    name: str, evaluates: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = changed(name, tmp_path)
    args.use_cpu = name != "dataloader_pin_memory"  # with it, transformers pins none
    warn_without_effect(args, evaluates=evaluates)
    what = EVALUATE_ALONE if evaluates and name in OF_LOADER else "have no effect"
    assert said(caplog) == [f"settings of GRPOConfig {what}: {name}"]


@pytest.mark.parametrize("name", OF_ACCELERATOR)
def test_a_setting_of_the_data_loader_within_another_is_named_too(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = {"even_batches": False, "use_seedable_sampler": False}.get(name, True)
    made = QueueGRPOTrainer(
        policy(),
        args := config(tmp_path, accelerator_config={name: value}),
        queue_for(args, "redis://localhost:1", run="none"),
        processing_class=tokenizer(),
    )
    made.queue.close()
    assert said(caplog) == [f"settings of GRPOConfig have no effect: accelerator_config.{name}"]


def test_defaults_and_the_pages_settings_bring_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_config(config(tmp_path), evaluates=False)
        warn_without_effect(config(tmp_path), evaluates=False)
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("saves", "options", "message"),
    [
        ("no", {}, r"save_strategy is \S*no\S*: without checkpoints nothing is committed"),
        ("steps", {"commit": "each_batch"}, "commit is 'each_batch': a checkpoint commits what was trained"),
        ("steps", {"mark": "auto"}, "mark is given: the trainer marks a batch after its step; leave it out"),
    ],
)
def test_what_the_trainer_marks_and_commits_is_its_own(
    saves: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=message):
        queue_for(config(tmp_path, save_strategy=saves), "redis://localhost:1", run="none", **options)


def test_without_checkpoints_each_batch_is_committed(tmp_path: Path) -> None:
    queue_for(
        config(tmp_path, save_strategy="no"), "redis://localhost:1", run="none", commit="each_batch"
    ).close()
