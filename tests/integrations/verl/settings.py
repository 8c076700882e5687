"""A model of two layers, a tokenizer, a data set of prompts, and verl's configuration for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pandas
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS: Final = ["<pad>", "<eos>", "<unk>", "user", "assistant", *"0123456789"]
PROMPTS: Final = 16
#: Rollouts of a prompt.
SIZE: Final = 4


def write_model(folder: Path) -> str:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **small)).save_pretrained(folder)
    return str(folder)


def write_prompts(file: Path, count: int = PROMPTS) -> str:
    records = [
        {
            "prompt": [{"role": "user", "content": f"{number // 10} {number % 10}"}],
            "data_source": "digits",
            "reward_model": {"ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]
    pandas.DataFrame(records).to_parquet(file)
    return str(file)


def overrides(folder: Path, url: str, run: str, **changed: Any) -> list[str]:
    """As on verl's command line: separate_async, 4 prompts a step in 2 batches. changed: with __ for a dot."""
    files = [folder / "model", folder / "prompts.parquet"]
    if not files[0].exists():
        write_model(files[0])
        write_prompts(files[1])
    values: dict[str, Any] = {
        "trainer.v1.trainer_mode": "streamadv_separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 2,
        "+trainer.v1.sampler.sampler_kwargs.url": url,
        "+trainer.v1.sampler.sampler_kwargs.run": run,
        "trainer.save_freq": 2,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.logger": "[console]",
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": folder / "checkpoints",
        "data.train_files": files[1],
        "data.val_files": files[1],
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": files[0],
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": SIZE,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    values |= {name.replace("__", "."): value for name, value in changed.items()}
    return [f"{name}={value}" for name, value in values.items()]


def config_of(folder: Path, url: str, run: str, **changed: Any) -> DictConfig:
    """verl's configuration as its command line has it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides(folder, url, run, **changed))
