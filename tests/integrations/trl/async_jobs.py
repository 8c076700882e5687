"""A job of AsyncGRPOTrainer on CPU: TRL's attention kernel needs a GPU, so another one stands in for it."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing

from streamadv.integrations.transformers import newest_checkpoint
from streamadv.integrations.trl.async_grpo import QueueAsyncGRPOTrainer, QueueRolloutWorker

from .models import policy, tokenizer

#: Rows of a step. Batches of the tests have 8.
ROWS_A_STEP = 6


def attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, *_: Any, **options: Any) -> Tensor:
    """Causal attention within each segment, aligned at its end, as flash attention has it."""
    made = []
    for start, stop, first, last in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        query, key, value = (x.transpose(0, 1)[None] for x in (q[start:stop], k[first:last], v[first:last]))
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        rows, columns = query.shape[2], key.shape[2]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=options["softmax_scale"])
        made.append(out[0].transpose(0, 1))
    return torch.cat(made)


#: Rows of the micro-batches that were made and not trained on yet.
collated: deque[list[tuple[int, ...]]] = deque()
collate = async_grpo_trainer.DataCollatorForRollout.torch_call


def noting(self: Any, examples: list[Any]) -> Any:
    samples = [sample for row in examples[0] for sample in row.samples]
    collated.append([tuple(sample["input_ids"].tolist()) for sample in samples])
    return collate(self, examples)


class NoTransfer:
    """Weights go nowhere."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        deque(iterator, maxlen=0)

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class Recorded(QueueAsyncGRPOTrainer):
    """Its checkpoints hold the rows that the loss was computed of, as the micro-batches had them."""

    die_at = -1
    rows: tuple[tuple[int, ...], ...] = ()

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        self.rows += tuple(collated.popleft())
        if self.state.global_step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(*arguments, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.json").write_text(json.dumps(self.rows))
        super()._save_checkpoint(model, trial)


def train_async(url: str, run: str, steps: int, folder: Path, die_at: int = -1) -> None:
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.DataCollatorForRollout.torch_call = noting
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    policy().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    args = AsyncGRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=ROWS_A_STEP,
        num_generations=4,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        token_budget=0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=3,
    )
    worker = QueueRolloutWorker(args, url, run, batch_groups=2, max_staleness=None, chain="grpo")
    trainer = Recorded(
        str(folder / "model"),
        args,
        worker,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]]}),
        processing_class=tokenizer(),
        weight_transfer=NoTransfer(),
    )
    trainer.die_at = die_at
    checkpoint = newest_checkpoint(folder / "out")
    if checkpoint is not None:
        rows = json.loads((Path(checkpoint) / "rows.json").read_text())
        trainer.rows = tuple(tuple(row) for row in rows)
    trainer.train(resume_from_checkpoint=checkpoint)
