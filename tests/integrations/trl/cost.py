"""What the queue adds to a step of QueueGRPOTrainer, beside a step of the model: the figures of docs/how-to/trl.md.

python -m tests.integrations.trl.cost [TOKENS]
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import streamadv as sa
from streamadv.integrations.trl import QueueGRPOTrainer, queue_for
from streamadv.store.embedded import EmbeddedServer

from .models import config, tokenizer

STEPS, GROUPS, SIZE = 12, 8, 8
RUN = "cost"


def serve(url: str) -> None:
    """A grouper and an advantage worker, in a process of their own."""
    from streamadv.advantage.worker import run_worker
    from streamadv.grouping.grouper import run_grouper
    from tests.support import join

    threading.Thread(target=run_grouper, args=(join(url, RUN), threading.Event()), daemon=True).start()
    run_worker(join(url, RUN), threading.Event(), device="cpu")


def push(url: str, tokens: int) -> None:
    random = np.random.default_rng(0)
    mask = np.r_[np.zeros(tokens // 2, bool), np.ones(tokens - tokens // 2, bool)]
    with sa.Producer(url, run=RUN) as producer:
        for _ in range((STEPS + 2) * GROUPS):
            with producer.group(SIZE) as group:
                for rollout in group:
                    ids = random.integers(3, 13, tokens)
                    rollout.push(
                        input_ids=ids,
                        response_mask=mask,
                        rollout_log_probs=-2.5 * mask,
                        reward=float(random.random()),
                    )


def main(tokens: int) -> None:
    spent: dict[str, list[float]] = defaultdict(list)  # this thread's processor time, by step
    waited: dict[str, list[float]] = defaultdict(list)  # wall time

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[name].append(time.thread_time() - cpu)
                waited[name].append(time.perf_counter() - wall)

        return call

    torch.set_num_threads(1)
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        push(server.url, tokens)
        worker = multiprocessing.get_context("spawn").Process(target=serve, args=(server.url,), daemon=True)
        worker.start()
        args = config(Path(folder), max_steps=STEPS, save_strategy="steps", save_steps=STEPS // 3)
        queue = queue_for(
            args,
            server.url,
            run=RUN,
            batch_groups=GROUPS,
            tokens_per_micro_batch=8 * tokens,
            max_staleness=None,
        )
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=tokens, **sizes, **heads))
        trainer = QueueGRPOTrainer(model, args, queue, processing_class=tokenizer())
        for owner, name in (
            (queue, "next_batch"),
            (queue, "trained"),
            (queue, "state_dict"),
            (queue, "commit"),
            (trainer, "inputs_of"),
            (trainer, "training_step"),
        ):
            setattr(owner, name, timed(name, getattr(owner, name)))
        trainer.train()
        queue.close()
        worker.kill()
    micro_batches = len(spent["inputs_of"]) // STEPS
    print(f"{GROUPS * SIZE} rows of {tokens} tokens a step, {micro_batches} micro-batches, {STEPS} steps")
    for name, calls in spent.items():
        each = micro_batches if name == "inputs_of" else 1
        cpu, wall = (statistics.median(times[name]) * each * 1000 for times in (spent, waited))
        print(f"{name:14} {cpu:8.1f} ms processor time, {wall:8.1f} ms wall, median of {len(calls)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
