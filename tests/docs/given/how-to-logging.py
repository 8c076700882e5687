"""A queue that gives two batches to each loop of the page, and stand-ins for the loggers."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

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


def stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


stand_in(
    "wandb",
    init=lambda project, config: None,
    define_metric=lambda name, step_metric: None,
    log=lambda data: None,
)
stand_in("mlflow", start_run=lambda run_name: nullcontext(), log_metrics=lambda metrics, step: None)
writer = SimpleNamespace(add_scalar=lambda tag, value, step: None, close=lambda: None)
stand_in("torch.utils.tensorboard", SummaryWriter=lambda folder: writer)
