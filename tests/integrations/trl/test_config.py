"""Every setting of GRPOConfig holds, is refused, or is named in a warning: none loses its effect in silence."""

from __future__ import annotations

import logging
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig

from streamadv.errors import SettingError
from streamadv.integrations.transformers import queue_for
from streamadv.integrations.trl.config import ELSEWHERE, OF_EVALUATE, WITHOUT_EFFECT, check_config

from .models import config

#: TRL's own settings that mean here what they mean there.
STAY = (
    *("beta", "cast_lm_head_to_fp32", "delta", "disable_dropout", "epsilon", "epsilon_high"),
    *("importance_sampling_level", "max_completion_length", "model_init_kwargs", "off_policy_mask_threshold"),
    *("ref_model_mixup_alpha", "ref_model_sync_steps", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("sync_ref_model", "temperature", "trust_remote_code", "use_bias_correction_kl", "vespo_k_neg"),
    *("vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
    "pad_to_multiple_of",  # of no effect on a loss, and TRL chooses it by the machine
    # of `use_adaptive_entropy`, which is refused
    *("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target"),
)
#: Refused by a check of their own (test_exact.py).
CHECKED = (
    *("entropy_coef", "generation_batch_size", "loss_type", "num_iterations", "reward_weights"),
    *(
        "router_aux_loss_coef",
        "steps_per_generation",
        "top_entropy_quantile",
        "use_adaptive_entropy",
        "use_vllm",
    ),
)
#: Of transformers' own settings: beginnings of the names of those that stay, or are refused by `check` (test_exact.py).
OF_TRANSFORMERS = re.compile(
    "output_dir|max_steps|learning_rate|lr_|warmup|optim|weight_decay|adam_|max_grad_norm|bf16|fp16|tf32|activation_|"
    "gradient_|torch_|use_cache|neftune|logging_|log_|include_|disable_tqdm|report_to|run_name|project|trackio_|eval_|"
    "per_device_eval|prediction_loss|batch_eval|save_|enable_jit|push_to_hub|hub_|load_best|metric_for|greater_is|"
    "restore_|full_determinism|seed|use_cpu|accelerator_config|dataloader_pin|remove_unused|label_|ddp_|fsdp|debug|"
    "skip_memory|do_|resume_from|local_rank|use_liger|liger_|auto_find|parallelism|deepspeed|ignore_data_skip|"
    # without an effect in TRL's GRPOTrainer either
    "average_tokens|train_sampling|length_column"
)
OTHERS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "dataloader_multiprocessing_context": "spawn",
    "multi_objective_aggregation": "normalize_then_sum",
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


def test_every_setting_of_trl_is_known() -> None:
    of_transformers = {field.name for field in fields(TrainingArguments)}
    names = {field.name for field in fields(GRPOConfig)}
    names -= {name for name in of_transformers if OF_TRANSFORMERS.match(name)}
    tables = [*STAY, *CHECKED, *ELSEWHERE, *OF_EVALUATE, *WITHOUT_EFFECT]
    assert names - set(tables) == set()
    assert len(tables) == len(set(tables))


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


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_does_no_harm_is_named_in_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_config(changed(name, tmp_path), evaluates=False)
    assert said(caplog) == [f"settings of GRPOConfig have no effect: {name}"]


def test_defaults_and_the_pages_settings_bring_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_config(config(tmp_path), evaluates=False)
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
