"""A queue that gives two batches to each loop of the page, a tokenizer, and stand-ins for the trackers."""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models

import streamadv as sa

with sa.Producer("redis://localhost:6379", run="exp1") as producer:
    for _ in range(6):
        with producer.group(2) as group:
            for rollout in group:
                rollout.push(input_ids=[1, 2], response_mask=[0, 1], reward=float(rollout.rollout_index))


class Queue(sa.TrainerQueue):
    def __iter__(self) -> Iterator[sa.Batch]:
        for _ in range(2):
            batch = self.next_batch()
            assert batch is not None
            yield batch


queue = Queue("redis://localhost:6379", run="exp1", batch_groups=1)


def train_on(batch: sa.Batch) -> dict[str, float]:
    return {"actor/loss": 0.5}


Path("models/qwen").mkdir(parents=True)
made = Tokenizer(models.WordLevel({"one": 1, "two": 2}, unk_token="one"))
made.save("models/qwen/tokenizer.json")

wandb = ModuleType("wandb")
wandb.__spec__ = ModuleSpec("wandb", None)
logged: list[dict[str, Any]] = []
begun = SimpleNamespace(define_metric=lambda *_, **__: None, log=logged.append, finish=lambda: None)
wandb.__dict__.update(run=None, init=lambda project: begun, Table=lambda columns, data: data)
sys.modules["wandb"] = wandb
other = SimpleNamespace(log=lambda metrics, step: None)
