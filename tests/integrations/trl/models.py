"""A policy of two layers and its tokenizer, made from nothing, and rows for it to be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from streamadv.trainer.microbatch import Batch, MicroBatch

WORDS = ("<pad>", "<eos>", "<unk>", *"0123456789", "guess")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def policy(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=64, **sizes, **heads, **ids))


def config(folder: Path, **options: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_completion_length": 16,
        "beta": 0.0,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**defaults, **options})


class Row(NamedTuple):
    """A row with what a chain and producers bring."""

    ids: Tensor
    mask: Tensor
    columns: dict[str, Tensor]


def rows(lengths: Sequence[int], seed: int = 1) -> list[Row]:
    """Rows of two prompt tokens and a response with a token of a tool in it, where it is long enough."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        mask = torch.ones(length, dtype=torch.bool)
        mask[:2] = False
        if length > 5:
            mask[4] = False
        numbers = {"advantages": 0.0, "rollout_log_probs": -2.5, "ref_log_probs": -2.7}
        columns = {name: mean + 0.3 * torch.randn(length, generator=random) for name, mean in numbers.items()}
        made.append(Row(torch.randint(3, 13, (length,), generator=random), mask, columns))
    return made


def micro_batch(rows: Sequence[Row]) -> MicroBatch:
    names = rows[0].columns if rows else {"advantages": 0, "rollout_log_probs": 0, "ref_log_probs": 0}
    empty = torch.zeros(0)
    columns = {name: torch.cat([empty, *(row.columns[name] for row in rows)]) for name in names}
    columns["input_ids"] = torch.cat([empty.long(), *(row.ids for row in rows)])
    columns["response_mask"] = torch.cat([empty.bool(), *(row.mask for row in rows)])
    return MicroBatch(columns, [len(row.ids) for row in rows], [], {})


def batch_of(parts: Sequence[Sequence[Row]], whole: Sequence[Row] | None = None) -> Batch:
    """A batch cut like this. whole: its rows on all ranks, if this is one rank's part."""
    whole = [row for part in parts for row in part] if whole is None else whole
    known = {
        "version": 0,
        "micro_batches": [micro_batch(part) for part in parts],
        "num_tokens": sum(int(row.mask.sum()) for row in whole),
        "num_rows": len(whole),
        "num_trajectories": len(whole),
        "metrics": {"critic/score/mean": 0.5},
    }
    return Batch(**{field.name: known.get(field.name) for field in fields(Batch)})  # type: ignore[arg-type]
