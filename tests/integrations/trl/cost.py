"""What the queue adds to a step of QueueGRPOTrainer, beside a step of the model: the figures of docs/train/trl.md.

python -m tests.integrations.trl.cost [TOKENS]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from streamadv.integrations.trl import QueueGRPOTrainer, queue_for

from ..cost import GROUPS, RUN, SIZE, STEPS, Times, fed
from .models import config, tokenizer


def main(tokens: int) -> None:
    times = Times(time.thread_time)
    torch.set_num_threads(1)
    with fed((STEPS + 2) * GROUPS, tokens, range(3, 13)) as url, tempfile.TemporaryDirectory() as folder:
        args = config(Path(folder), max_steps=STEPS, save_strategy="steps", save_steps=STEPS // 3)
        options = {"tokens_per_micro_batch": 8 * tokens, "max_staleness": None}
        queue = queue_for(args, url, run=RUN, batch_groups=GROUPS, **options)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=tokens, **sizes, **heads))
        trainer = QueueGRPOTrainer(model, args, queue, processing_class=tokenizer())
        times.watch(queue, "next_batch", "trained", "state_dict", "commit")
        times.watch(trainer, "inputs_of", "training_step")
        trainer.train()
        queue.close()
    micro_batches = len(times.calls["inputs_of"]) // STEPS
    print(f"{GROUPS * SIZE} rows of {tokens} tokens a step, {micro_batches} micro-batches, {STEPS} steps")
    times.show(inputs_of=micro_batches)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
